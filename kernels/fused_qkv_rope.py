"""Fused split of a QKV projection and rotary embedding (arXiv 2104.09864) of queries and keys.

torch.compile splits, rotates and copies in separate passes, and concatenates the gradients in two more. Here each
element is read once and written once, forward and backward: the backward kernel rotates by the negative angle and
writes the gradient of the whole projection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .custom_op import custom_op
from .launch import jit, next_power_of_2, rounded, tl, triton, triton_runs_on
from .rope import apply_rotary

# channel pairs per program: enough loads in flight for each of its 128 threads
PAIRS = 1024

QKV = tuple[Tensor, Tensor, Tensor]
"""Queries (batch, tokens, heads, head_dim), keys and values (batch, tokens, groups, head_dim)."""


# ---------------------------------------------------------------- reference


def reference_qkv_rope(projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, interleaved: bool) -> QKV:
    """Reference in plain PyTorch, any device and floating dtype."""
    heads = projected.shape[2] - 2 * groups
    query_key, value = projected.split((heads + groups, groups), dim=2)
    # queries and keys are adjacent: rotate both at once
    query, key = apply_rotary(query_key, cosine, sine, interleaved=interleaved).split((heads, groups), dim=2)
    # a view would keep the whole projection alive for the backward, besides the rotated queries and keys
    return query, key, value.contiguous()


# ---------------------------------------------------------------- Triton


@jit
def _load_heads(
    projected, query, key, value, is_query, is_key, is_value, channel, inside, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Load channels of some heads, (heads, channels); pointers are to the first channel of each head, (heads,).

    Forward from `projected`, backward from `query`, `key` and `value`, of which each head has one.
    """
    if BACKWARD:
        values = tl.load(query[:, None] + channel, mask=is_query[:, None] & inside, other=0.0)
        values += tl.load(key[:, None] + channel, mask=is_key[:, None] & inside, other=0.0)
        values += tl.load(value[:, None] + channel, mask=is_value[:, None] & inside, other=0.0)
    else:
        exists = is_query | is_key | is_value
        values = tl.load(projected[:, None] + channel, mask=exists[:, None] & inside, other=0.0)
    return values


@jit
def _store_heads(
    values, projected, query, key, value, is_query, is_key, is_value, channel, inside, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Store channels of some heads, in the opposite direction of `_load_heads`."""
    if BACKWARD:
        exists = is_query | is_key | is_value
        tl.store(projected[:, None] + channel, values, mask=exists[:, None] & inside)
    else:
        tl.store(query[:, None] + channel, values, mask=is_query[:, None] & inside)
        tl.store(key[:, None] + channel, values, mask=is_key[:, None] & inside)
        tl.store(value[:, None] + channel, values, mask=is_value[:, None] & inside)


@jit
def fused_qkv_rope_kernel(
    projected_pointer, query_pointer, key_pointer, value_pointer, cosine_pointer, sine_pointer, tokens, angle_stride,
    query_stride_row, query_stride_token, query_stride_head,
    key_stride_row, key_stride_token, key_stride_head,
    value_stride_row, value_stride_token, value_stride_head,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Process BLOCK_HEADS of the HEADS + 2 GROUPS heads of one token per program.

    projected: (rows * tokens, HEADS + 2 GROUPS, HEAD_DIM), contiguous. cosine, sine: (rows or 1, tokens, HALF), with
    row stride angle_stride, 0 if shared by all rows. HALF: rotated channel pairs. BLOCK_REST: block size of the
    unrotated channels, 0 for none.
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
    value_head = head - HEADS - GROUPS
    value = value_pointer + row * value_stride_row + token * value_stride_token + value_head * value_stride_head

    pair = tl.arange(0, BLOCK_HALF)
    inside = pair < HALF
    angle = row * angle_stride + token * HALF + pair
    is_rotated = (is_query | is_key)[:, None]
    cosine = tl.where(is_rotated, tl.load(cosine_pointer + angle, mask=inside, other=1.0)[None, :], 1.0)
    sine = tl.where(is_rotated, tl.load(sine_pointer + angle, mask=inside, other=0.0)[None, :], 0.0)
    if BACKWARD:
        sine = -sine
    if INTERLEAVED:
        first_channel, second_channel = 2 * pair, 2 * pair + 1
    else:
        first_channel, second_channel = pair, pair + HALF
    element = projected_pointer.dtype.element_ty
    first = _load_heads(
        projected, query, key, value, is_query, is_key, is_value, first_channel, inside, BACKWARD
    ).to(cosine.dtype)  # fmt: skip
    second = _load_heads(
        projected, query, key, value, is_query, is_key, is_value, second_channel, inside, BACKWARD
    ).to(cosine.dtype)  # fmt: skip
    rotated_first = rounded(first * cosine - second * sine, element)
    rotated_second = rounded(second * cosine + first * sine, element)
    _store_heads(
        rotated_first, projected, query, key, value, is_query, is_key, is_value, first_channel, inside, BACKWARD
    )
    _store_heads(
        rotated_second, projected, query, key, value, is_query, is_key, is_value, second_channel, inside, BACKWARD
    )
    if BLOCK_REST > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        unrotated = _load_heads(
            projected, query, key, value, is_query, is_key, is_value, rest, rest < HEAD_DIM, BACKWARD
        )  # fmt: skip
        _store_heads(
            unrotated, projected, query, key, value, is_query, is_key, is_value, rest, rest < HEAD_DIM, BACKWARD
        )


def _launch(projected: Tensor, qkv: QKV, cosine: Tensor, sine: Tensor, interleaved: bool, backward: bool) -> None:
    """Write `qkv` from `projected`, or backward `projected` from `qkv`; last dimensions must be contiguous."""
    query, key, value = qkv
    rows, tokens, heads, width = query.shape
    groups, half = key.shape[2], cosine.shape[-1]
    block_half, rest = next_power_of_2(half), width - 2 * half
    block_heads = min(next_power_of_2(heads + 2 * groups), max(PAIRS // block_half, 1))
    fused_qkv_rope_kernel[(rows * tokens, triton.cdiv(heads + 2 * groups, block_heads))](
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


def triton_forward(projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, interleaved: bool) -> QKV:
    """Launch the kernel from the projection to queries, keys and values."""
    rows, tokens, all_heads, width = projected.shape
    query = projected.new_empty(rows, tokens, all_heads - 2 * groups, width)
    key, value = (projected.new_empty(rows, tokens, groups, width) for _ in range(2))
    angles = cosine.contiguous(), sine.contiguous()
    _launch(projected.contiguous(), (query, key, value), *angles, interleaved, backward=False)
    return query, key, value


def triton_backward(gradients: QKV, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    """Launch the kernel from the gradients of queries, keys and values to that of the projection."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in gradients)
    rows, tokens, heads, width = query.shape
    gradient = query.new_empty(rows, tokens, heads + 2 * key.shape[2], width)
    _launch(gradient, (query, key, value), cosine.contiguous(), sine.contiguous(), interleaved, backward=True)
    return gradient


# ---------------------------------------------------------------- custom operations


@custom_op("stoker::rotary_split")
def _fused_qkv_rope(
    projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return triton_forward(projected, cosine, sine, groups, interleaved)


@torch.library.register_fake("stoker::rotary_split")
def _(projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, interleaved: bool) -> QKV:
    rows, tokens, all_heads, width = projected.shape
    query = projected.new_empty(rows, tokens, all_heads - 2 * groups, width)
    key, value = (projected.new_empty(rows, tokens, groups, width) for _ in range(2))
    return query, key, value


@custom_op("stoker::rotary_split_backward")
def _fused_qkv_rope_backward(
    query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool
) -> Tensor:
    return triton_backward((query, key, value), cosine, sine, interleaved)


@torch.library.register_fake("stoker::rotary_split_backward")
def _(query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    rows, tokens, heads, width = query.shape
    return query.new_empty(rows, tokens, heads + 2 * key.shape[2], width)


def _save(ctx: Any, inputs: tuple[Any, ...], output: QKV) -> None:
    _, cosine, sine, _, ctx.interleaved = inputs
    ctx.save_for_backward(cosine, sine)


def _backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None, None, None]:
    cosine, sine = ctx.saved_tensors
    return _fused_qkv_rope_backward(query, key, value, cosine, sine, ctx.interleaved), None, None, None, None


torch.library.register_autograd("stoker::rotary_split", _backward, setup_context=_save)


# ---------------------------------------------------------------- public function


def fused_qkv_rope(
    projected: Tensor, cosine: Tensor, sine: Tensor, groups: int, *, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused QKV projection and apply `kernels.rope.apply_rotary` to its queries and keys.

    Args:
        projected: (batch, tokens, heads + 2 groups, head_dim): all query heads, then all key groups, then all value
            groups.
        cosine: (tokens, dim / 2), or (batch, tokens, dim / 2) if rows have different positions, with dim <= head_dim;
            fp32 (fp64 for fp64), not differentiated.
        sine: like `cosine`.
        groups: number of key and value heads.
        interleaved: rotate pairs (2i, 2i + 1); otherwise channel i with channel i + dim / 2.

    Returns:
        Queries (batch, tokens, heads, head_dim), keys and values (batch, tokens, groups, head_dim), differentiable once
        on a GPU. None of them is a view of `projected`.

    Raises:
        ValueError: shapes do not match.
    """
    _check(projected, cosine, sine, groups)
    if triton_runs_on(projected):
        return _fused_qkv_rope(projected, cosine, sine, groups, interleaved)
    return reference_qkv_rope(projected, cosine, sine, groups, interleaved)


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
