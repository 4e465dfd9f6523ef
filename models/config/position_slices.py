"""Resolved position embeddings of a stack, derived once from its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...kernels.relative_position_buckets import relative_buckets
from ...kernels.rope_scaling import Llama3Scaling, RotaryScaling, YarnScaling
from .stack import StackKeys

BOUNDED_POSITION_TYPES = ("learned_absolute", "learned_parameters", "rope", "xpos")
"""Position embedding types with a table, which bounds the sequence length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionBiasSlice:
    """Position bias: a term added to the attention scores depending on the distance of query and key.

    Attributes:
        kind: function of the distance.
        alibi_heads: number of first heads that have a slope (`alibi`).
        buckets: number of distance buckets (`relative`).
        max_distance: see `relative_buckets` (`relative`).
    """

    kind: Literal["alibi", "kerple", "sandwich", "relative"]
    alibi_heads: int
    buckets: int
    max_distance: int

    @property
    def learned(self) -> bool:
        """True if the bias has parameters."""
        return self.kind in ("kerple", "relative")

    def reach(self, tokens: int, *, causal: bool) -> int:
        """Return the largest distance with its own bias for this sequence length; 0 for ALiBi, without a vector."""
        match self.kind:
            case "alibi":
                return 0
            case "relative":
                return len(relative_buckets(self.buckets, self.max_distance, bidirectional=not causal)) // 2
            case _:
                return max(1, tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySlice:
    """Rotary embedding of the first `dim` channels of each head.

    Attributes:
        dim: rotated channels, even.
        base: base of the frequencies, base ** (-2i / dim).
        interleaved: rotate pairs (2i, 2i + 1); otherwise channel i with channel i + dim / 2.
        position_scale: factor of every position (1 / `seq_len_interpolation_factor`).
        scaling: frequency scaling for long contexts, or None.
        xpos: xPos: scores decay with distance.
        positions: rows of the tables, the longest sequence.
    """

    dim: int
    base: float
    interleaved: bool
    position_scale: float
    scaling: RotaryScaling | None
    xpos: bool
    positions: int


def head_dim_of(keys: StackKeys) -> int:
    """Return the width of one head."""
    return keys.kv_channels or keys.hidden_size // keys.num_attention_heads


def rotary_dim_of(keys: StackKeys) -> int:
    """Return the rotated channels of a head, int(width * rotary_percentage)."""
    return int(head_dim_of(keys) * keys.rotary_percentage)


def position_bias_slice(keys: StackKeys) -> PositionBiasSlice | None:
    """Resolve the position bias; None for other position embedding types."""
    kind = keys.position_embedding_type
    if kind not in ("alibi", "kerple", "sandwich", "relative"):
        return None
    return PositionBiasSlice(
        kind=kind,
        alibi_heads=keys.num_attention_heads_alibi or keys.num_attention_heads,
        buckets=keys.relative_attention_num_buckets,
        max_distance=keys.relative_attention_max_distance,
    )


def rotary_scaling(keys: StackKeys) -> RotaryScaling | None:
    """Resolve the RoPE frequency scaling; None for none."""
    kind = "llama3" if keys.scale_positional_embedding else keys.rotary_scaling
    factor, length, low = keys.rotary_scaling_factor, keys.rotary_original_length, keys.rotary_low_turns or 1.0
    if kind == "llama3":
        high = keys.rotary_high_turns or 4.0
        return Llama3Scaling(
            factor=factor, original_max_position_embeddings=length, low_freq_factor=low, high_freq_factor=high
        )
    if kind == "yarn":
        return YarnScaling(
            factor=factor,
            original_max_position_embeddings=length,
            beta_slow=low,
            beta_fast=keys.rotary_high_turns or 32.0,
        )
    return None


def rotary_slice(keys: StackKeys, *, positions: int) -> RotarySlice | None:
    """Resolve the rotary embedding; None for other position embedding types."""
    if keys.position_embedding_type == "xpos":
        return RotarySlice(
            dim=head_dim_of(keys),
            base=10000.0,
            interleaved=True,
            position_scale=1.0,
            scaling=None,
            xpos=True,
            positions=positions,
        )
    if keys.position_embedding_type != "rope":
        return None
    return RotarySlice(
        dim=rotary_dim_of(keys),
        base=keys.rotary_base,
        interleaved=keys.rotary_interleaved,
        position_scale=1 / (keys.seq_len_interpolation_factor or 1.0),
        scaling=rotary_scaling(keys),
        xpos=False,
        positions=positions,
    )
