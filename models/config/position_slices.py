"""The positions of a stack as small frozen records, derived once from its flat keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...kernels.relative_position_buckets import relative_buckets
from ...kernels.rope_scaling import Llama3Scaling, RotaryScaling, YarnScaling
from .stack import StackKeys

BOUNDED = ("learned_absolute", "learned_parameters", "rope", "xpos")
"""Positions that come from a table: no text is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistanceSlice:
    """Positions that add a term to the scores for each distance of key and query.

    Attributes:
        kind: which function of the distance.
        alibi_heads: heads with a slope, the first ones (`alibi`).
        buckets: of distances (`relative`).
        max_distance: see `relative_buckets` (`relative`).
    """

    kind: Literal["alibi", "kerple", "sandwich", "relative"]
    alibi_heads: int
    buckets: int
    max_distance: int

    @property
    def learned(self) -> bool:
        """Whether it has parameters."""
        return self.kind in ("kerple", "relative")

    def reach(self, tokens: int, *, causal: bool) -> int:
        """The largest distance its vector tells apart in sequences of so many tokens; 0 for slopes, without one."""
        match self.kind:
            case "alibi":
                return 0
            case "relative":
                return len(relative_buckets(self.buckets, self.max_distance, bidirectional=not causal)) // 2
            case _:
                return max(1, tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySlice:
    """Rotary embedding: the first `dim` channels of each head turn, the rest pass.

    Attributes:
        dim: rotated channels, even.
        base: base of the frequencies, base ** (-2i / dim).
        interleaved: pairs (2i, 2i + 1) turn; otherwise channel i with channel i + dim / 2.
        position_scale: factor of every position (1 / `seq_len_interpolation_factor`).
        scaling: other frequencies for long texts, None for those of `base`.
        fading: queries grow and keys shrink with their position (xPos).
        positions: rows of the table, the longest sequence.
    """

    dim: int
    base: float
    interleaved: bool
    position_scale: float
    scaling: RotaryScaling | None
    fading: bool
    positions: int


def head_dim_of(keys: StackKeys) -> int:
    """Width of one head."""
    return keys.kv_channels or keys.hidden_size // keys.num_attention_heads


def rotary_dim_of(keys: StackKeys) -> int:
    """Channels of a head that turn: int(width * rotary_percentage)."""
    return int(head_dim_of(keys) * keys.rotary_percentage)


def distance_slice(keys: StackKeys) -> DistanceSlice | None:
    """The positions on scores the keys describe, None for other kinds of positions."""
    kind = keys.position_embedding_type
    if kind not in ("alibi", "kerple", "sandwich", "relative"):
        return None
    return DistanceSlice(
        kind=kind,
        alibi_heads=keys.num_attention_heads_alibi or keys.num_attention_heads,
        buckets=keys.relative_attention_num_buckets,
        max_distance=keys.relative_attention_max_distance,
    )


def rotary_scaling(keys: StackKeys) -> RotaryScaling | None:
    """The rotary frequencies for long texts the keys describe, None for the usual ones."""
    kind = "llama3" if keys.scale_positional_embedding else keys.rotary_scaling
    factor, length, low = keys.rotary_scaling_factor, keys.rotary_original_length, keys.rotary_low_turns or 1.0
    if kind == "llama3":
        high = keys.rotary_high_turns or 4.0
        return Llama3Scaling(factor=factor, original_length=length, low=low, high=high)
    if kind == "yarn":
        return YarnScaling(factor=factor, original_length=length, slow=low, fast=keys.rotary_high_turns or 32.0)
    return None


def rotary_slice(keys: StackKeys, *, positions: int) -> RotarySlice | None:
    """The rotary embedding the keys describe, None for other kinds of positions."""
    if keys.position_embedding_type == "xpos":
        return RotarySlice(
            dim=head_dim_of(keys),
            base=10000.0,
            interleaved=True,
            position_scale=1.0,
            scaling=None,
            fading=True,
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
        fading=False,
        positions=positions,
    )
