"""stoker: trains and fine-tunes GPT, T5 and BERT transformers from Hydra YAML with NeMo's keys.

The public Python API is what this module exports (docs/library.md); everything else is internal. It imports nothing
until a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer.api.register import register as register

__version__ = "0.1.0"

_MODULES = {
    "register": "trainer.api.register",
}
"""The module of each public name."""
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
