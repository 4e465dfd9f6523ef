"""Registry of supported Hugging Face architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

MODEL_TYPES = tuple(dict.fromkeys(architecture.model_type for architecture in ARCHITECTURES))


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of a config.json, None if it is not supported."""
    model_type = config.get("model_type")
    found = [architecture for architecture in ARCHITECTURES if architecture.model_type == model_type]
    if len(found) == 2:
        gated = str(config.get("feed_forward_proj", "")).startswith("gated-")
        return found[gated]
    return found[0] if found else None
