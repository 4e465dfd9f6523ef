"""Registry of supported Hugging Face architectures, built in and of users' own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.extensions import extension_names, load_extension
from .architecture import Architecture
from .bert import BERT
from .gpt2 import GPT2
from .gpt_neox import GPT_NEOX
from .llama import LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3
from .t5 import MT5, T5, T5_GATED

ARCHITECTURES: tuple[Architecture, ...] = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL),
    *(GPT2, GPT_NEOX),
    *(T5, T5_GATED, MT5),
    BERT,
)
"""In the order in which they are tried when a model fits several of them."""


def all_architectures() -> tuple[Architecture, ...]:
    """Return the built-in architectures, and those of users' own (`weight_map`).

    Raises:
        ValueError: one of these cannot be imported, or is no `Architecture` of its name.
    """
    return (*ARCHITECTURES, *map(_own_architecture, extension_names("weight_map")))


def model_types() -> tuple[str, ...]:
    """Return the `model_type` of all architectures."""
    return tuple(dict.fromkeys(architecture.model_type for architecture in all_architectures()))


def _own_architecture(name: str) -> Architecture:
    made = load_extension("weight_map", name)()
    if not isinstance(made, Architecture) or made.name != name:
        found = f"the architecture {made.name}" if isinstance(made, Architecture) else type(made).__name__
        raise ValueError(f"the weight_map {name!r} must return an `Architecture` of this name, but returned {found}.")
    return made


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of a config.json: by name a user's own, or by `model_type`; None if it is not supported.

    Raises:
        ValueError: as `all_architectures`.
    """
    names, own = config.get("architectures"), extension_names("weight_map")
    for name in names if isinstance(names, list) else ():
        if name in own:
            return _own_architecture(name)
    model_type = config.get("model_type")
    found = [architecture for architecture in all_architectures() if architecture.model_type == model_type]
    if len(found) == 2:
        gated = str(config.get("feed_forward_proj", "")).startswith("gated-")
        return found[gated]
    return found[0] if found else None
