"""One more token of each text: queries and keys turn by its position, keys and values go into the cache, in one pass.

In plain torch that is some twenty small kernels a layer, which take a GPU longer than the projections beside them.
"""

# Triton's constant conditions decide which names exist:
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from ..interpreter_rounding import rounded
from ..launch import jit, next_power_of_2, tl, triton_runs_on
from ..rope import apply_rotary

Angles = tuple[Tensor, Tensor, Tensor, Tensor]
"""Cosine and sine of queries, then of keys, each (rows, dim / 2), fp32 (fp64 with fp64)."""


# ---------------------------------------------------------------- reference


def reference_turn_and_append(
    projected: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, angles: Angles | None, interleaved: bool
) -> Tensor:
    """`turn_and_append` in plain torch, any device and floating dtype."""
    groups, slots = key_cache.shape[1:3]
    query, key, value = projected.split((projected.shape[1] - 2 * groups, groups, groups), dim=1)
    if angles is not None:
        query_cosine, query_sine, key_cosine, key_sine = (angle[:, None] for angle in angles)
        query = apply_rotary(query[:, None], query_cosine, query_sine, interleaved=interleaved)[:, 0]
        key = apply_rotary(key[:, None], key_cosine, key_sine, interleaved=interleaved)[:, 0]
    row = torch.arange(len(projected), device=projected.device)
    slot = (lengths - 1) % slots
    key_cache[row, :, slot] = key
    value_cache[row, :, slot] = value
    return query


# ---------------------------------------------------------------- Triton


@jit
def append_kernel(
    projected_pointer, query_pointer, key_pointer, value_pointer, lengths_pointer,
    cosine_pointer, sine_pointer, key_cosine_pointer, key_sine_pointer,
    stride_row, stride_head, slots,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row. HALF: pairs of channels that turn, the first of a head; 0 for none.

    projected: (rows, HEADS + 2 GROUPS, HEAD_DIM). query: (rows, HEADS, HEAD_DIM). key, value: (rows, GROUPS, slots,
    HEAD_DIM). lengths: int64 (rows,). cosine and the others: (rows, HALF).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, BLOCK_D)
    inside = channel < HEAD_DIM
    here = projected_pointer + row * stride_row + head * stride_head
    numbers = tl.load(here + channel, mask=inside, other=0.0)
    element = query_pointer.dtype.element_ty
    if HALF > 0:  # noqa: SIM102 (one is known to the compiler, the other is not)
        if head < HEADS + GROUPS:
            turns = channel < 2 * HALF
            if INTERLEAVED:
                pair, first = channel // 2, channel % 2 == 0
                other_channel = tl.where(first, channel + 1, channel - 1)
            else:
                pair, first = channel % HALF, channel < HALF
                other_channel = tl.where(first, channel + HALF, channel - HALF)
            angle = row * HALF + pair
            if head < HEADS:
                cosine = tl.load(cosine_pointer + angle, mask=turns, other=1.0)
                sine = tl.load(sine_pointer + angle, mask=turns, other=0.0)
            else:
                cosine = tl.load(key_cosine_pointer + angle, mask=turns, other=1.0)
                sine = tl.load(key_sine_pointer + angle, mask=turns, other=0.0)
            other = tl.load(here + other_channel, mask=turns, other=0.0)
            turned = numbers.to(cosine.dtype) * cosine + tl.where(first, -sine, sine) * other.to(cosine.dtype)
            # what does not turn stays as it is, not a number away and back
            numbers = tl.where(turns, rounded(turned, element), numbers)
    if head < HEADS:
        tl.store(query_pointer + (row * HEADS + head) * HEAD_DIM + channel, numbers, mask=inside)
    else:
        group = (head - HEADS) % GROUPS
        slot = (tl.load(lengths_pointer + row) - 1) % slots
        place = ((row * GROUPS + group) * slots + slot) * HEAD_DIM + channel
        if head < HEADS + GROUPS:
            tl.store(key_pointer + place, numbers, mask=inside)
        else:
            tl.store(value_pointer + place, numbers, mask=inside)


def triton_turn_and_append(
    projected: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, angles: Angles | None, interleaved: bool
) -> Tensor:
    """Launch the kernel."""
    rows, parts, width = projected.shape
    groups, slots = key_cache.shape[1:3]
    projected = projected if projected.stride(-1) == 1 else projected.contiguous()
    query = projected.new_empty(rows, parts - 2 * groups, width)
    cosine, sine, key_cosine, key_sine = (None,) * 4 if angles is None else (angle.contiguous() for angle in angles)
    append_kernel[(rows, parts)](
        projected_pointer=projected,
        query_pointer=query,
        key_pointer=key_cache,
        value_pointer=value_cache,
        lengths_pointer=lengths,
        cosine_pointer=cosine,
        sine_pointer=sine,
        key_cosine_pointer=key_cosine,
        key_sine_pointer=key_sine,
        stride_row=projected.stride(0),
        stride_head=projected.stride(1),
        slots=slots,
        HEADS=parts - 2 * groups,
        GROUPS=groups,
        HEAD_DIM=width,
        BLOCK_D=next_power_of_2(width),
        HALF=0 if angles is None else angles[0].shape[1],
        INTERLEAVED=interleaved,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return query


# ---------------------------------------------------------------- public function


def turn_and_append(
    projected: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    angles: Angles | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Turn the heads of one token of each text, and put its keys and values where the cache has room; no gradient.

    A compiler makes as much of the plain torch: within it that runs.

    Args:
        projected: (rows, heads + 2 groups, head_dim), all query heads, then all key groups, then all value groups.
        key_cache: (rows, groups, slots, head_dim), contiguous, dtype of `projected`; written in place.
        value_cache: likewise.
        lengths: int64 (rows,), tokens of each text with this one, which goes to slot (length - 1) % slots.
        angles: by which the first channels of queries and keys turn, those of `kernels.rope.apply_rotary`; None for
            none.
        interleaved: turn the pairs (2i, 2i + 1); otherwise channel i with channel i + dim / 2.

    Returns:
        The queries, (rows, heads, head_dim).

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(projected, key_cache, value_cache, lengths, angles)
    arguments = (projected, key_cache, value_cache, lengths, angles, interleaved)
    if triton_runs_on(projected) and not torch.compiler.is_compiling():
        return triton_turn_and_append(*arguments)
    return reference_turn_and_append(*arguments)


def _check(projected: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, angles: Angles | None) -> None:
    rows, parts, width = projected.shape
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        fits = cache.ndim == 4 and (cache.shape[0], cache.shape[3]) == (rows, width) and parts > 2 * cache.shape[1]
        if not fits or cache.shape != key_cache.shape or cache.dtype != projected.dtype or not cache.is_contiguous():
            raise ValueError(
                f"`{name}` {tuple(cache.shape)} of {cache.dtype} must be ({rows}, groups, slots, {width}) of "
                f"{projected.dtype}, contiguous, for `projected` {tuple(projected.shape)}."
            )
    if lengths.shape != (rows,) or lengths.dtype != torch.int64:
        raise ValueError(f"`lengths` {tuple(lengths.shape)} of {lengths.dtype} must be ({rows},) of torch.int64.")
    for angle in angles or ():
        if angle.ndim != 2 or len(angle) != rows or not 0 < 2 * angle.shape[1] <= width:
            raise ValueError(f"`angles` {tuple(angle.shape)} must be ({rows}, up to {width // 2}).")
