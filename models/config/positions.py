"""Position embeddings and attention windows of a stack: what the keys resolve to, and their rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ...kernels.relative_position_buckets import relative_buckets
from ...kernels.rope_scaling import Llama3Scaling, RotaryScaling, YarnScaling
from .dense_stack import DenseStackKeys
from .key_block import Finding

BOUNDED_POSITION_TYPES = ("learned_absolute", "learned_parameters", "rope", "xpos")
"""Position embedding types with a table, which bounds the sequence length."""

_SCALING_KEYS = ("rotary_scaling_factor", "rotary_original_length", "rotary_low_turns", "rotary_high_turns")
_ROTARY_KEYS = (
    "rotary_percentage",
    "rotary_base",
    "rotary_interleaved",
    "seq_len_interpolation_factor",
    "scale_positional_embedding",
    "rotary_scaling",
    *_SCALING_KEYS,
)
_KEYS_OF_KINDS = {
    "rope": _ROTARY_KEYS,
    "alibi": ("num_attention_heads_alibi",),
    "relative": ("relative_attention_num_buckets", "relative_attention_max_distance"),
}


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

    def max_distinct_distance(self, tokens: int, *, causal: bool) -> int:
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


def head_dim_of(keys: DenseStackKeys) -> int:
    """Return the width of one head."""
    return keys.kv_channels or keys.hidden_size // keys.num_attention_heads


def rotary_dim_of(keys: DenseStackKeys) -> int:
    """Return the rotated channels of a head, int(width * rotary_percentage)."""
    return int(head_dim_of(keys) * keys.rotary_percentage)


def position_bias_slice(keys: DenseStackKeys) -> PositionBiasSlice | None:
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


def rotary_scaling(keys: DenseStackKeys) -> RotaryScaling | None:
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


def rotary_slice(keys: DenseStackKeys, *, positions: int) -> RotarySlice | None:
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


def resolve_window(keys: DenseStackKeys, *, causal: bool, max_length: int | None = None) -> tuple[int, int] | None:
    """Resolve the attention window; None if it masks nothing in sequences of up to `max_length` tokens (None: any)."""
    left, right = (
        -1 if max_length is not None and side >= max_length - 1 else side for side in keys.window_size or (-1, -1)
    )
    right = 0 if causal else right
    return None if left < 0 and (causal or right < 0) else (left, right)


# ---------------------------------------------------------------- rules


def _percentage_for(rotated: int, width: int) -> float:
    """Return the shortest decimal p with int(width * p) == rotated; int(0.57 * 200) is 113, hence the + 1."""
    for digits in range(1, 9):
        smallest = math.ceil(rotated / width * 10**digits)
        for numerator in (smallest, smallest + 1):
            candidate = numerator / 10**digits
            if candidate <= 1 and int(width * candidate) == rotated:
                return candidate
    return rotated / width


def rotated_channels_are_pairs(keys: DenseStackKeys) -> Iterator[Finding]:
    """RoPE rotates channels in pairs, and `sandwich` has pairs of sine and cosine."""
    kind = keys.position_embedding_type
    width, rotated = head_dim_of(keys), rotary_dim_of(keys)
    if kind in ("xpos", "sandwich") and width % 2:
        yield Finding(
            "error",
            ("kv_channels", "position_embedding_type"),
            f"`position_embedding_type` ({kind}) works on pairs of channels and does not support heads {width} wide.",
            "use an even kv_channels, or other num_attention_heads",
        )
    if kind != "rope":
        return
    if width < 2:
        yield Finding(
            "error",
            ("kv_channels", "position_embedding_type"),
            f"`position_embedding_type` (rope) rotates pairs of channels and does not support heads {width} wide.",
            "use kv_channels of at least 2, or fewer heads",
        )
    elif rotated < 2 or rotated % 2:
        valid = _percentage_for(max(2, rotated - rotated % 2), width)
        yield Finding(
            "error",
            ("rotary_percentage", "kv_channels"),
            f"`rotary_percentage` ({keys.rotary_percentage:g}) of heads {width} wide (`hidden_size` / "
            f"`num_attention_heads`, or `kv_channels`) rotates {rotated} channels, which must be an even number.",
            f"use rotary_percentage={valid:g}, or an even kv_channels",
        )


def keys_of_positions_have_an_effect(keys: DenseStackKeys) -> Iterator[Finding]:
    """Keys of a position embedding type have no effect with other types."""
    for kind, names in _KEYS_OF_KINDS.items():
        if kind == keys.position_embedding_type:
            continue
        for name in names:
            value = getattr(keys, name)
            neutral = name == "seq_len_interpolation_factor" and value == 1
            if value != DenseStackKeys.model_fields[name].default and not neutral:
                yield Finding(
                    "warning",
                    (name, "position_embedding_type"),
                    f"`{name}` ({value}) has no effect with `position_embedding_type` "
                    f"({keys.position_embedding_type}).",
                    f"use position_embedding_type={kind}",
                )


def rotary_scaling_is_consistent(keys: DenseStackKeys) -> Iterator[Finding]:
    """Only one kind of RoPE scaling can be active, and its settings have no effect without it."""
    if keys.position_embedding_type != "rope":
        return
    scaling = rotary_scaling(keys)
    if scaling is None:
        for name in _SCALING_KEYS:
            if getattr(keys, name) != DenseStackKeys.model_fields[name].default:
                yield Finding(
                    "warning",
                    (name, "rotary_scaling"),
                    f"`{name}` ({getattr(keys, name)}) has no effect with `rotary_scaling` (null).",
                    "use rotary_scaling=llama3 or yarn",
                )
        return
    if keys.scale_positional_embedding and keys.rotary_scaling == "yarn":
        yield Finding(
            "error",
            ("scale_positional_embedding", "rotary_scaling"),
            "`scale_positional_embedding` (True) is Llama 3.1's scaling and contradicts `rotary_scaling` (yarn).",
            "use scale_positional_embedding=False, or rotary_scaling=llama3",
        )
    switch = "rotary_scaling" if keys.rotary_scaling else "scale_positional_embedding"
    if (keys.seq_len_interpolation_factor or 1.0) != 1.0:
        yield Finding(
            "error",
            ("seq_len_interpolation_factor", switch),
            f"`seq_len_interpolation_factor` ({keys.seq_len_interpolation_factor:g}) and `{switch}` "
            f"({getattr(keys, switch)}) both scale the positions and cannot be combined.",
            f"use seq_len_interpolation_factor=null, or {switch}={'null' if switch == 'rotary_scaling' else False}",
        )
    low, high = (
        (scaling.beta_slow, scaling.beta_fast)
        if isinstance(scaling, YarnScaling)
        else (scaling.low_freq_factor, scaling.high_freq_factor)
    )
    if low >= high:
        yield Finding(
            "error",
            ("rotary_low_turns", "rotary_high_turns"),
            f"`rotary_low_turns` ({low:g}) must be smaller than `rotary_high_turns` ({high:g}).",
            f"use rotary_low_turns={high / 4:g}, or rotary_high_turns={low * 4:g}",
        )
    if isinstance(scaling, YarnScaling) and keys.rotary_base <= 1:
        yield Finding(
            "error",
            ("rotary_base", "rotary_scaling"),
            f"`rotary_base` ({keys.rotary_base:g}) must be greater than 1 with `rotary_scaling` (yarn).",
            "use rotary_base=10000",
        )


def alibi_heads_are_within_heads(keys: DenseStackKeys) -> Iterator[Finding]:
    """The number of ALiBi heads is at most the number of heads."""
    sloped, heads = keys.num_attention_heads_alibi, keys.num_attention_heads
    if sloped is not None and sloped > heads:
        yield Finding(
            "error",
            ("num_attention_heads_alibi", "num_attention_heads"),
            f"`num_attention_heads_alibi` ({sloped}) must not be more than `num_attention_heads` ({heads}).",
            f"use num_attention_heads_alibi={heads} or null",
        )


def window_fits_direction(keys: DenseStackKeys, causal: bool) -> Iterator[Finding]:
    """The right side of a window has no effect in causal attention."""
    if causal and keys.window_size is not None and keys.window_size[1] > 0:
        left, right = keys.window_size
        yield Finding(
            "warning",
            ("window_size",),
            f"the {right} tokens to the right in `window_size` ([{left}, {right}]) have no effect: attention is "
            "causal.",
            f"use window_size=[{left},0]",
        )


def relative_buckets_are_valid(keys: DenseStackKeys, causal: bool) -> Iterator[Finding]:
    """The maximum distance exceeds the distances with a bucket of their own, half of the buckets of a direction."""
    if keys.position_embedding_type != "relative":
        return
    buckets, largest = keys.relative_attention_num_buckets, keys.relative_attention_max_distance
    if not causal and buckets % 4:
        yield Finding(
            "error",
            ("relative_attention_num_buckets",),
            f"`relative_attention_num_buckets` ({buckets}) must be a multiple of 4 in bidirectional attention: half of "
            "the buckets are for later keys.",
            f"use relative_attention_num_buckets={buckets + -buckets % 4}",
        )
        return
    exact = buckets // (2 if causal else 4)
    if largest <= exact:
        yield Finding(
            "error",
            ("relative_attention_max_distance", "relative_attention_num_buckets"),
            f"`relative_attention_max_distance` ({largest}) must be more than the {exact} distances that have a bucket "
            f"of their own with `relative_attention_num_buckets` ({buckets}).",
            f"use relative_attention_max_distance={4 * exact}, or fewer buckets",
        )


def window_masks_nothing(keys: DenseStackKeys, *, causal: bool, longest: int | None) -> bool:
    """Return True if the stack's window covers its longest sequence (None: unlimited) and so masks nothing."""
    masks = [resolve_window(keys, causal=causal, max_length=length) is not None for length in (None, longest)]
    return masks == [True, False]


def xpos_needs_causal_mask(keys: DenseStackKeys) -> Iterator[Finding]:
    """Under xPos scores of later keys grow with their distance, so it needs a causal mask."""
    if keys.position_embedding_type == "xpos":
        yield Finding(
            "error",
            ("position_embedding_type",),
            "`position_embedding_type` (xpos) is not supported in a bidirectional stack: scores of later tokens would "
            "grow with their distance.",
            "use position_embedding_type=rope",
        )


POSITION_RULES: tuple[Callable[[DenseStackKeys], Iterator[Finding]], ...] = (
    rotated_channels_are_pairs,
    keys_of_positions_have_an_effect,
    rotary_scaling_is_consistent,
    alibi_heads_are_within_heads,
)
"""Rules of causal and bidirectional stacks alike."""

DIRECTION_RULES: tuple[Callable[[DenseStackKeys, bool], Iterator[Finding]], ...] = (
    window_fits_direction,
    relative_buckets_are_valid,
)
"""Rules that depend on whether the stack is causal, their second argument."""
