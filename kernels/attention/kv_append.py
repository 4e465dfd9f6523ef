"""Rotary embedding of queries and keys fused with the append to the KV cache, for one decoded token per sequence.

In plain PyTorch these are about twenty small kernels per layer, which take longer on a GPU than the projections.
"""

# Triton resolves constexpr conditions at compile time, which pyright does not know:
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from ..launch import jit, next_power_of_2, rounded, tl, triton_runs_on
from ..rope import apply_rotary

RotaryTables = tuple[Tensor, Tensor, Tensor, Tensor]
"""Cosine and sine for queries, then for keys, each (rows, rotary_dim / 2), fp32 (fp64 with fp64)."""


# ---------------------------------------------------------------- reference


def reference_apply_rotary_and_append_kv(
    projected: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    cos_sin: RotaryTables | None,
    interleaved: bool,
) -> Tensor:
    """Reference of `apply_rotary_and_append_kv` in plain PyTorch, for any device and floating dtype."""
    groups, slots = key_cache.shape[1:3]
    query, key, value = projected.split((projected.shape[1] - 2 * groups, groups, groups), dim=1)
    if cos_sin is not None:
        query_cosine, query_sine, key_cosine, key_sine = (angle[:, None] for angle in cos_sin)
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
    """Each program processes one head of one row.

    projected: (rows, HEADS + 2 GROUPS, HEAD_DIM). query: (rows, HEADS, HEAD_DIM). key, value: (rows, GROUPS, slots,
    HEAD_DIM). lengths: int64 (rows,). cosine, sine, key_cosine, key_sine: (rows, HALF). HALF: half the rotary width,
    which covers the first channels of a head; 0 without rotary embedding.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, BLOCK_D)
    inside = channel < HEAD_DIM
    head_pointer = projected_pointer + row * stride_row + head * stride_head
    values = tl.load(head_pointer + channel, mask=inside, other=0.0)
    dtype = query_pointer.dtype.element_ty
    if HALF > 0:  # noqa: SIM102 (the first condition is a compile-time constant, the second is not)
        if head < HEADS + GROUPS:
            rotated = channel < 2 * HALF
            if INTERLEAVED:
                pair, first = channel // 2, channel % 2 == 0
                other_channel = tl.where(first, channel + 1, channel - 1)
            else:
                pair, first = channel % HALF, channel < HALF
                other_channel = tl.where(first, channel + HALF, channel - HALF)
            angle = row * HALF + pair
            if head < HEADS:
                cosine = tl.load(cosine_pointer + angle, mask=rotated, other=1.0)
                sine = tl.load(sine_pointer + angle, mask=rotated, other=0.0)
            else:
                cosine = tl.load(key_cosine_pointer + angle, mask=rotated, other=1.0)
                sine = tl.load(key_sine_pointer + angle, mask=rotated, other=0.0)
            other = tl.load(head_pointer + other_channel, mask=rotated, other=0.0)
            rotation = values.to(cosine.dtype) * cosine + tl.where(first, -sine, sine) * other.to(cosine.dtype)
            # channels without rotary embedding keep their bits: no round trip through another dtype
            values = tl.where(rotated, rounded(rotation, dtype), values)
    if head < HEADS:
        tl.store(query_pointer + (row * HEADS + head) * HEAD_DIM + channel, values, mask=inside)
    else:
        group = (head - HEADS) % GROUPS
        slot = (tl.load(lengths_pointer + row) - 1) % slots
        offset = ((row * GROUPS + group) * slots + slot) * HEAD_DIM + channel
        if head < HEADS + GROUPS:
            tl.store(key_pointer + offset, values, mask=inside)
        else:
            tl.store(value_pointer + offset, values, mask=inside)


def triton_apply_rotary_and_append_kv(
    projected: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    cos_sin: RotaryTables | None,
    interleaved: bool,
) -> Tensor:
    """Launch `append_kernel`; arguments as in `apply_rotary_and_append_kv`."""
    rows, projected_heads, head_dim = projected.shape
    groups, slots = key_cache.shape[1:3]
    projected = projected if projected.stride(-1) == 1 else projected.contiguous()
    query = projected.new_empty(rows, projected_heads - 2 * groups, head_dim)
    cosine, sine, key_cosine, key_sine = (None,) * 4 if cos_sin is None else (angle.contiguous() for angle in cos_sin)
    append_kernel[(rows, projected_heads)](
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
        HEADS=projected_heads - 2 * groups,
        GROUPS=groups,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        HALF=0 if cos_sin is None else cos_sin[0].shape[1],
        INTERLEAVED=interleaved,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return query


# ---------------------------------------------------------------- public function


def apply_rotary_and_append_kv(
    projected: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    cos_sin: RotaryTables | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Apply rotary embedding to one new token per sequence and append its keys and values to the cache; no gradient.

    Under torch.compile the plain PyTorch version runs, which the compiler fuses as well.

    Args:
        projected: (rows, heads + 2 groups, head_dim), all query heads, then all key groups, then all value groups.
        key_cache: (rows, groups, slots, head_dim), contiguous, dtype of `projected`; updated in place.
        value_cache: like `key_cache`.
        lengths: int64 (rows,), sequence lengths including this token, which is written to slot (length - 1) % slots.
        cos_sin: cos/sin tables for the first channels of queries and keys, see `kernels.rope.apply_rotary`; None
            without rotary embedding.
        interleaved: rotate the pairs (2i, 2i + 1); otherwise channel i with channel i + rotary_dim / 2.

    Returns:
        The queries, (rows, heads, head_dim).

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    _check(projected, key_cache, value_cache, lengths, cos_sin)
    arguments = (projected, key_cache, value_cache, lengths, cos_sin, interleaved)
    if triton_runs_on(projected) and not torch.compiler.is_compiling():
        return triton_apply_rotary_and_append_kv(*arguments)
    return reference_apply_rotary_and_append_kv(*arguments)


def _check(
    projected: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor, cos_sin: RotaryTables | None
) -> None:
    rows, heads, head_dim = projected.shape
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        fits = cache.ndim == 4 and (cache.shape[0], cache.shape[3]) == (rows, head_dim) and heads > 2 * cache.shape[1]
        if not fits or cache.shape != key_cache.shape or cache.dtype != projected.dtype or not cache.is_contiguous():
            raise ValueError(
                f"`{name}` {tuple(cache.shape)} of {cache.dtype} must be ({rows}, groups, slots, {head_dim}) of "
                f"{projected.dtype}, contiguous, for `projected` {tuple(projected.shape)}."
            )
    if lengths.shape != (rows,) or lengths.dtype != torch.int64:
        raise ValueError(f"`lengths` {tuple(lengths.shape)} of {lengths.dtype} must be ({rows},) of torch.int64.")
    for angle in cos_sin or ():
        if angle.ndim != 2 or len(angle) != rows or not 0 < 2 * angle.shape[1] <= head_dim:
            raise ValueError(f"`cos_sin` {tuple(angle.shape)} must be ({rows}, up to {head_dim // 2}).")
