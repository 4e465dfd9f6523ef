"""stoker: trains and fine-tunes GPT, T5 and BERT transformers from Hydra YAML with NeMo's keys.

The names below are the public Python API (docs/library.md), with `stoker.kernels`; everything else is internal and may
change with any version. A change of the API follows semantic versioning: a name or argument that is to go warns for one
minor version first. Importing this module imports nothing else: each name is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import kernels as kernels
    from .models.block import Block as Block
    from .models.block import Branches as Branches
    from .trainer.api.lightning_modules import BertModule as BertModule
    from .trainer.api.lightning_modules import GPTModule as GPTModule
    from .trainer.api.lightning_modules import T5Module as T5Module
    from .trainer.api.models import convert as convert
    from .trainer.api.models import evaluate as evaluate
    from .trainer.api.models import generate as generate
    from .trainer.api.models import load as load
    from .trainer.api.register import register as register
    from .trainer.api.runs import explain_attention as explain_attention
    from .trainer.api.runs import finetune as finetune
    from .trainer.api.runs import load_config as load_config
    from .trainer.api.runs import plan as plan
    from .trainer.api.runs import train as train
    from .trainer.api.token_data_module import TokenDataModule as TokenDataModule
    from .trainer.config.problems import ConfigError as ConfigError
    from .trainer.utils.errors import UserError as UserError

__version__ = "0.1.0"

_MODULES = {
    "BertModule": "trainer.api.lightning_modules",
    "Block": "models.block",
    "Branches": "models.block",
    "ConfigError": "trainer.config.problems",
    "GPTModule": "trainer.api.lightning_modules",
    "T5Module": "trainer.api.lightning_modules",
    "TokenDataModule": "trainer.api.token_data_module",
    "UserError": "trainer.utils.errors",
    "convert": "trainer.api.models",
    "evaluate": "trainer.api.models",
    "explain_attention": "trainer.api.runs",
    "finetune": "trainer.api.runs",
    "generate": "trainer.api.models",
    "load": "trainer.api.models",
    "load_config": "trainer.api.runs",
    "plan": "trainer.api.runs",
    "register": "trainer.api.register",
    "train": "trainer.api.runs",
}
"""The module of each public name."""
__all__ = ["__version__", "kernels", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return importlib.import_module(".kernels", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
