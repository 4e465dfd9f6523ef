"""Queries, keys and values of a fused projection, queries and keys turned by their positions, in one pass over memory.

A compiler splits, turns and copies in passes of their own, and joins the gradients in two more. Here each number is
read once and written once, forward and backward: the backward turns the other way and writes the gradient of the
projection as a whole. Rotary embedding: arXiv 2104.09864.
"""

# Triton's constant conditions decide which names exist:
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .interpreter_rounding import rounded
from .launch import jit, next_power_of_2, tl, triton, triton_runs_on
from .rope import apply_rotary

# channel pairs of a program: enough loads in flight for each of its 128 threads
PAIRS = 1024

Parts = tuple[Tensor, Tensor, Tensor]
"""Queries (batch, tokens, heads, head_dim), keys and values (batch, tokens, groups, head_dim)."""


# ---------------------------------------------------------------- reference


def reference_rotary_split(projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, interleaved: bool) -> Parts:
    """`rotary_split` in plain torch, any device and floating dtype."""
    heads = projected.shape[2] - 2 * groups
    turning, value = projected.split((heads + groups, groups), dim=2)
    # queries and keys are neighbours: one pass turns both
    query, key = apply_rotary(turning, cosine, sine, interleaved=interleaved).split((heads, groups), dim=2)
    # a view would keep everything that was projected for the backward, beside queries and keys once turned
    return query, key, value.contiguous()


# ---------------------------------------------------------------- Triton


@jit
def _taken(
    projected, query, key, value, is_query, is_key, is_value, channel, inside, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Numbers of some heads, (heads, channels). The pointers are to the first channel of each head, (heads,)."""
    if BACKWARD:
        numbers = tl.load(query[:, None] + channel, mask=is_query[:, None] & inside, other=0.0)
        numbers += tl.load(key[:, None] + channel, mask=is_key[:, None] & inside, other=0.0)
        numbers += tl.load(value[:, None] + channel, mask=is_value[:, None] & inside, other=0.0)
    else:
        exists = is_query | is_key | is_value
        numbers = tl.load(projected[:, None] + channel, mask=exists[:, None] & inside, other=0.0)
    return numbers


@jit
def _put(
    numbers, projected, query, key, value, is_query, is_key, is_value, channel, inside, BACKWARD: tl.constexpr,
):  # fmt: skip
    """The way back of `_taken`."""
    if BACKWARD:
        exists = is_query | is_key | is_value
        tl.store(projected[:, None] + channel, numbers, mask=exists[:, None] & inside)
    else:
        tl.store(query[:, None] + channel, numbers, mask=is_query[:, None] & inside)
        tl.store(key[:, None] + channel, numbers, mask=is_key[:, None] & inside)
        tl.store(value[:, None] + channel, numbers, mask=is_value[:, None] & inside)


@jit
def rotary_split_kernel(
    projected_pointer, query_pointer, key_pointer, value_pointer, cosine_pointer, sine_pointer, tokens, angle_stride,
    query_stride_row, query_stride_token, query_stride_head,
    key_stride_row, key_stride_token, key_stride_head,
    value_stride_row, value_stride_token, value_stride_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_HEADS of the HEADS + 2 GROUPS heads of one token. HALF: pairs of channels that turn.

    projected: (rows * tokens, HEADS + 2 GROUPS, HEAD_DIM), contiguous. cosine, sine: (rows or 1, tokens, HALF), a row
    angle_stride from the next, 0 where all have the same. BLOCK_REST: of the channels that pass, 0 for none.
    """
    place = tl.program_id(0).to(tl.int64)
    row, token = place // tokens, place % tokens
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + GROUPS)
    is_value = (head >= HEADS + GROUPS) & (head < HEADS + 2 * GROUPS)
    projected = projected_pointer + (place * (HEADS + 2 * GROUPS) + head) * HEAD_DIM
    query = query_pointer + row * query_stride_row + token * query_stride_token + head * query_stride_head
    key = key_pointer + row * key_stride_row + token * key_stride_token + (head - HEADS) * key_stride_head
    of_values = head - HEADS - GROUPS
    value = value_pointer + row * value_stride_row + token * value_stride_token + of_values * value_stride_head

    pair = tl.arange(0, BLOCK_HALF)
    inside = pair < HALF
    angle = row * angle_stride + token * HALF + pair
    turns = (is_query | is_key)[:, None]
    cosine = tl.where(turns, tl.load(cosine_pointer + angle, mask=inside, other=1.0)[None, :], 1.0)
    sine = tl.where(turns, tl.load(sine_pointer + angle, mask=inside, other=0.0)[None, :], 0.0)
    if BACKWARD:
        sine = -sine
    if INTERLEAVED:
        first_channel, second_channel = 2 * pair, 2 * pair + 1
    else:
        first_channel, second_channel = pair, pair + HALF
    element = projected_pointer.dtype.element_ty
    first = _taken(
        projected, query, key, value, is_query, is_key, is_value, first_channel, inside, BACKWARD
    ).to(cosine.dtype)  # fmt: skip
    second = _taken(
        projected, query, key, value, is_query, is_key, is_value, second_channel, inside, BACKWARD
    ).to(cosine.dtype)  # fmt: skip
    turned_first = rounded(first * cosine - second * sine, element)
    turned_second = rounded(second * cosine + first * sine, element)
    _put(turned_first, projected, query, key, value, is_query, is_key, is_value, first_channel, inside, BACKWARD)
    _put(turned_second, projected, query, key, value, is_query, is_key, is_value, second_channel, inside, BACKWARD)
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        passing = _taken(
            projected, query, key, value, is_query, is_key, is_value, rest, rest < HEAD_DIM, BACKWARD
        )  # fmt: skip
        _put(passing, projected, query, key, value, is_query, is_key, is_value, rest, rest < HEAD_DIM, BACKWARD)


def _launch(projected: Tensor, parts: Parts, cosine: Tensor, sine: Tensor, interleaved: bool, backward: bool) -> None:
    """Write `parts` of `projected`, or `projected` of `parts`; the last dimension of all is contiguous."""
    query, key, value = parts
    rows, tokens, heads, width = query.shape
    groups, half = key.shape[2], cosine.shape[-1]
    block_half, rest = next_power_of_2(half), width - 2 * half
    block_heads = min(next_power_of_2(heads + 2 * groups), max(PAIRS // block_half, 1))
    rotary_split_kernel[(rows * tokens, triton.cdiv(heads + 2 * groups, block_heads))](
        projected_pointer=projected,
        query_pointer=query,
        key_pointer=key,
        value_pointer=value,
        cosine_pointer=cosine,
        sine_pointer=sine,
        tokens=tokens,
        angle_stride=tokens * half if cosine.ndim == 3 else 0,
        query_stride_row=query.stride(0),
        query_stride_token=query.stride(1),
        query_stride_head=query.stride(2),
        key_stride_row=key.stride(0),
        key_stride_token=key.stride(1),
        key_stride_head=key.stride(2),
        value_stride_row=value.stride(0),
        value_stride_token=value.stride(1),
        value_stride_head=value.stride(2),
        HEADS=heads,
        GROUPS=groups,
        HEAD_DIM=width,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=next_power_of_2(rest) if rest else 0,
        INTERLEAVED=interleaved,
        BACKWARD=backward,
        num_warps=4,
        enable_fp_fusion=True,
    )


def triton_forward(projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, interleaved: bool) -> Parts:
    """Launch the kernel from the projection to its parts."""
    rows, tokens, all_heads, width = projected.shape
    query = projected.new_empty(rows, tokens, all_heads - 2 * groups, width)
    key, value = (projected.new_empty(rows, tokens, groups, width) for _ in range(2))
    angles = cosine.contiguous(), sine.contiguous()
    _launch(projected.contiguous(), (query, key, value), *angles, interleaved, backward=False)
    return query, key, value


def triton_backward(gradients: Parts, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """Launch the kernel from the gradients of the parts to that of the projection."""
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in gradients)
    rows, tokens, heads, width = query.shape
    gradient = query.new_empty(rows, tokens, heads + 2 * key.shape[2], width)
    _launch(gradient, (query, key, value), cosine.contiguous(), sine.contiguous(), interleaved, backward=True)
    return gradient


# ---------------------------------------------------------------- custom operations


@torch.library.custom_op("stoker::rotary_split", mutates_args=())
def _rotary_split(
    projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return triton_forward(projected, cosine, sine, groups, interleaved)


@_rotary_split.register_fake
def _(projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, interleaved: bool) -> Parts:
    rows, tokens, all_heads, width = projected.shape
    query = projected.new_empty(rows, tokens, all_heads - 2 * groups, width)
    key, value = (projected.new_empty(rows, tokens, groups, width) for _ in range(2))
    return query, key, value


@torch.library.custom_op("stoker::rotary_split_backward", mutates_args=())
def _rotary_split_backward(
    query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool
) -> Tensor:
    return triton_backward((query, key, value), cosine, sine, interleaved)


@_rotary_split_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    rows, tokens, heads, width = query.shape
    return query.new_empty(rows, tokens, heads + 2 * key.shape[2], width)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Parts) -> None:
    _, cosine, sine, _, ctx.interleaved = inputs
    ctx.save_for_backward(cosine, sine)


def _backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None, None, None]:
    cosine, sine = ctx.saved_tensors
    return _rotary_split_backward(query, key, value, cosine, sine, ctx.interleaved), None, None, None, None


_rotary_split.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------- public function


def rotary_split(
    projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, *, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection and turn its queries and keys, as `kernels.rope.apply_rotary` does.

    Args:
        projected: (batch, tokens, heads + 2 groups, head_dim): all query heads, then all key groups, then all value
            groups.
        cosine: (tokens, dim / 2), or (batch, tokens, dim / 2) for rows of different positions, with dim <= head_dim;
            fp32 (fp64 for fp64). No gradient goes there.
        sine: like `cosine`.
        groups: key and value heads.
        interleaved: turn the pairs (2i, 2i + 1); otherwise channel i with channel i + dim / 2.

    Returns:
        Queries (batch, tokens, heads, head_dim), keys and values (batch, tokens, groups, head_dim), differentiable once
        on a GPU. None of them is a view that keeps `projected`.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(projected, cosine, sine, groups)
    if triton_runs_on(projected):
        return _rotary_split(projected, cosine, sine, groups, interleaved)
    return reference_rotary_split(projected, cosine, sine, groups, interleaved)


def _check(projected: Tensor, cosine: Tensor, sine: Tensor, groups: int) -> None:
    if projected.ndim != 4 or projected.shape[2] <= 2 * groups:
        raise ValueError(
            f"`projected` {tuple(projected.shape)} must be (batch, tokens, heads + 2 * {groups}, head_dim)."
        )
    rows, tokens, _, width = projected.shape
    for name, angle in (("cosine", cosine), ("sine", sine)):
        fits = angle.ndim >= 2 and angle.shape[:-1] in ((tokens,), (rows, tokens)) and angle.shape == cosine.shape
        if not fits or not 0 < 2 * angle.shape[-1] <= width:
            raise ValueError(
                f"`{name}` {tuple(angle.shape)} must be ({tokens}, up to {width // 2}), or ({rows}, {tokens}, up to "
                f"{width // 2}), for `projected` {tuple(projected.shape)}."
            )
