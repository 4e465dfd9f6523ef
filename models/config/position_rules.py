"""Cross-field rules of the position embedding and attention window of a stack.

A rule is a pure function from keys to findings; paths are relative to the block of the stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ...kernels.rope_scaling import YarnScaling
from .key_block import Finding
from .positions import KEYS_OF_KINDS, SCALING_KEYS, PositionKeys, resolve_window, rotary_dim_of, rotary_scaling
from .sizes import head_dim_of


def _percentage_for(rotated: int, width: int) -> float:
    """Return the shortest decimal p with int(width * p) == rotated; int(0.57 * 200) is 113, hence the + 1."""
    for digits in range(1, 9):
        smallest = math.ceil(rotated / width * 10**digits)
        for numerator in (smallest, smallest + 1):
            candidate = numerator / 10**digits
            if candidate <= 1 and int(width * candidate) == rotated:
                return candidate
    return rotated / width


def rotated_channels_are_pairs(keys: PositionKeys) -> Iterator[Finding]:
    """RoPE rotates channels in pairs, and `sandwich` has pairs of sine and cosine."""
    kind = keys.position_embedding_type
    width, rotated = head_dim_of(keys), rotary_dim_of(keys)
    if kind in ("xpos", "sandwich") and width % 2:
        yield Finding.error(
            ("kv_channels", "position_embedding_type"),
            f"`position_embedding_type` ({kind}) works on pairs of channels and does not support heads {width} wide.",
            "use an even kv_channels, or other num_attention_heads",
        )
    if kind != "rope":
        return
    if width < 2:
        yield Finding.error(
            ("kv_channels", "position_embedding_type"),
            f"`position_embedding_type` (rope) rotates pairs of channels and does not support heads {width} wide.",
            "use kv_channels of at least 2, or fewer heads",
        )
    elif rotated < 2 or rotated % 2:
        valid = _percentage_for(max(2, rotated - rotated % 2), width)
        yield Finding.error(
            ("rotary_percentage", "kv_channels"),
            f"`rotary_percentage` ({keys.rotary_percentage:g}) of heads {width} wide (`hidden_size` / "
            f"`num_attention_heads`, or `kv_channels`) rotates {rotated} channels, which must be an even number.",
            f"use rotary_percentage={valid:g}, or an even kv_channels",
        )


def keys_of_positions_have_an_effect(keys: PositionKeys) -> Iterator[Finding]:
    """Keys of a position embedding type have no effect with other types."""
    for kind, names in KEYS_OF_KINDS.items():
        if kind == keys.position_embedding_type:
            continue
        for name in names:
            value = getattr(keys, name)
            neutral = name == "seq_len_interpolation_factor" and value == 1
            if value != PositionKeys.model_fields[name].default and not neutral:
                yield Finding.warning(
                    (name, "position_embedding_type"),
                    f"`{name}` ({value}) has no effect with `position_embedding_type` "
                    f"({keys.position_embedding_type}).",
                    f"use position_embedding_type={kind}",
                )


def rotary_scaling_is_consistent(keys: PositionKeys) -> Iterator[Finding]:
    """Only one kind of RoPE scaling can be active, and its settings have no effect without it."""
    if keys.position_embedding_type != "rope":
        return
    scaling = rotary_scaling(keys)
    if scaling is None:
        for name in SCALING_KEYS:
            if getattr(keys, name) != PositionKeys.model_fields[name].default:
                yield Finding.warning(
                    (name, "rotary_scaling"),
                    f"`{name}` ({getattr(keys, name)}) has no effect with `rotary_scaling` (null).",
                    "use rotary_scaling=llama3 or yarn",
                )
        return
    if keys.scale_positional_embedding and keys.rotary_scaling == "yarn":
        yield Finding.error(
            ("scale_positional_embedding", "rotary_scaling"),
            "`scale_positional_embedding` (True) is Llama 3.1's scaling and contradicts `rotary_scaling` (yarn).",
            "use scale_positional_embedding=False, or rotary_scaling=llama3",
        )
    switch = "rotary_scaling" if keys.rotary_scaling else "scale_positional_embedding"
    if (keys.seq_len_interpolation_factor or 1.0) != 1.0:
        yield Finding.error(
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
        yield Finding.error(
            ("rotary_low_turns", "rotary_high_turns"),
            f"`rotary_low_turns` ({low:g}) must be smaller than `rotary_high_turns` ({high:g}).",
            f"use rotary_low_turns={high / 4:g}, or rotary_high_turns={low * 4:g}",
        )
    if isinstance(scaling, YarnScaling) and keys.rotary_base <= 1:
        yield Finding.error(
            ("rotary_base", "rotary_scaling"),
            f"`rotary_base` ({keys.rotary_base:g}) must be greater than 1 with `rotary_scaling` (yarn).",
            "use rotary_base=10000",
        )


def alibi_heads_are_within_heads(keys: PositionKeys) -> Iterator[Finding]:
    """The number of ALiBi heads is at most the number of heads."""
    sloped, heads = keys.num_attention_heads_alibi, keys.num_attention_heads
    if sloped is not None and sloped > heads:
        yield Finding.error(
            ("num_attention_heads_alibi", "num_attention_heads"),
            f"`num_attention_heads_alibi` ({sloped}) must not be more than `num_attention_heads` ({heads}).",
            f"use num_attention_heads_alibi={heads} or null",
        )


def window_fits_direction(keys: PositionKeys, causal: bool) -> Iterator[Finding]:
    """The right side of a window has no effect in causal attention."""
    if causal and keys.window_size is not None and keys.window_size[1] > 0:
        left, right = keys.window_size
        yield Finding.warning(
            ("window_size",),
            f"the {right} tokens to the right in `window_size` ([{left}, {right}]) have no effect: attention is "
            "causal.",
            f"use window_size=[{left},0]",
        )


def relative_buckets_are_valid(keys: PositionKeys, causal: bool) -> Iterator[Finding]:
    """The maximum distance exceeds the distances with a bucket of their own, half of the buckets of a direction."""
    if keys.position_embedding_type != "relative":
        return
    buckets, largest = keys.relative_attention_num_buckets, keys.relative_attention_max_distance
    if not causal and buckets % 4:
        yield Finding.error(
            ("relative_attention_num_buckets",),
            f"`relative_attention_num_buckets` ({buckets}) must be a multiple of 4 in bidirectional attention: half of "
            "the buckets are for later keys.",
            f"use relative_attention_num_buckets={buckets + -buckets % 4}",
        )
        return
    exact = buckets // (2 if causal else 4)
    if largest <= exact:
        yield Finding.error(
            ("relative_attention_max_distance", "relative_attention_num_buckets"),
            f"`relative_attention_max_distance` ({largest}) must be more than the {exact} distances that have a bucket "
            f"of their own with `relative_attention_num_buckets` ({buckets}).",
            f"use relative_attention_max_distance={4 * exact}, or fewer buckets",
        )


def window_masks_nothing(keys: PositionKeys, *, causal: bool, longest: int | None) -> bool:
    """Return True if the stack's window covers its longest sequence (None: unlimited) and so masks nothing."""
    masks = [resolve_window(keys, causal=causal, max_length=length) is not None for length in (None, longest)]
    return masks == [True, False]


def xpos_needs_causal_mask(keys: PositionKeys) -> Iterator[Finding]:
    """Under xPos scores of later keys grow with their distance, so it needs a causal mask."""
    if keys.position_embedding_type == "xpos":
        yield Finding.error(
            ("position_embedding_type",),
            "`position_embedding_type` (xpos) is not supported in a bidirectional stack: scores of later tokens would "
            "grow with their distance.",
            "use position_embedding_type=rope",
        )


POSITION_RULES: tuple[Callable[[PositionKeys], Iterator[Finding]], ...] = (
    rotated_channels_are_pairs,
    keys_of_positions_have_an_effect,
    rotary_scaling_is_consistent,
    alibi_heads_are_within_heads,
)
"""Rules of causal and bidirectional stacks alike."""

DIRECTION_RULES: tuple[Callable[[PositionKeys, bool], Iterator[Finding]], ...] = (
    window_fits_direction,
    relative_buckets_are_valid,
)
"""Rules that depend on whether the stack is causal, their second argument."""
