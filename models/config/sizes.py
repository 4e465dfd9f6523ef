"""Sizes of a stack: keys."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from .key_block import ConfigBlock


class SizeKeys(ConfigBlock):
    """Layers, widths and heads of one stack."""

    model_config = ConfigDict(defer_build=True)  # this class and most that derive from it validate nothing themselves

    num_layers: int = Field(12, ge=1)
    """Number of transformer layers."""
    hidden_size: int = Field(768, ge=1)
    """Width of the residual stream."""
    ffn_hidden_size: int = Field(3072, ge=1)
    """Width of the MLP; a gated activation has two projections of this width (no 2/3 rule)."""
    num_attention_heads: int = Field(12, ge=1)
    """Number of query heads."""
    kv_channels: int | None = Field(None, ge=1)
    """Width of one head; null: `hidden_size` / `num_attention_heads`."""
    num_query_groups: int | None = Field(None, ge=1)
    """Number of key/value heads: null or `num_attention_heads` is MHA, 1 is MQA, a divisor in between is GQA."""


def head_dim_of(keys: SizeKeys) -> int:
    """Return the width of one head."""
    return keys.kv_channels or keys.hidden_size // keys.num_attention_heads
