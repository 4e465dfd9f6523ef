"""Gradients of biases, summed by the kernel that writes the gradient of what the biases were added to.

The gradient of a bias is a sum over all tokens. torch.compile reads the gradient of a linear layer's output again for
it, after the kernel that wrote it: for the up projection of an MLP after the derivative of the activation, for the QKV
projection after the concatenation of three gradients. Here one kernel writes and sums.

The linear layer must get its bias detached, so that the gradient comes from here alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .activations import FUSED_ACTIVATIONS, NONLINEARITIES, activation_with_derivative
from .custom_op import custom_op
from .launch import jit, rounded, tl, triton

ROWS = 8
BLOCK = 256
"""Rows and columns of a tile: 16 elements of each tensor per thread."""
MAX_PROGRAMS = 1056
"""Most programs of a launch, 8 per multiprocessor of a large GPU; those of the same columns each write partial sums."""

# ---------------------------------------------------------------- Triton


@jit
def write_and_sum_kernel(
    gradient_pointer, inputs_pointer, output_pointer, partial_pointer, rows, width, pitch, chunk_rows,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK columns of a chunk of rows per program, ROWS at a time, and their sums.

    Read: gradient and, if KIND is an activation and not None, its inputs, both (rows, width). Written: output, the
    gradient times the derivative, and partial (chunks, width), fp32, its sums over the rows of each chunk. Rows
    of output, which may be the gradient, and of partial begin `pitch` elements apart.
    """
    chunk = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column, last = columns[None, :], min((chunk + 1) * chunk_rows, rows)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(chunk * chunk_rows, last, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < last) & (column < width)
        gradient = tl.load(gradient_pointer + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if KIND is not None:
            inputs = tl.load(inputs_pointer + row * width + column, mask=mask, other=0.0).to(tl.float32)
            _, slope = activation_with_derivative(inputs, KIND)
            gradient *= slope
        tl.store(output_pointer + row * pitch + column, rounded(gradient, output_pointer.dtype.element_ty), mask=mask)
        sums += gradient
    tl.store(partial_pointer + chunk.to(tl.int64) * pitch + columns, tl.sum(sums, axis=0), mask=columns < width)


def _launch(gradient: Tensor, inputs: Tensor | None, output: Tensor, partial: Tensor, kind: str | None) -> None:
    chunks, width = partial.shape
    rows = gradient.numel() // width
    write_and_sum_kernel[(triton.cdiv(width, BLOCK), chunks)](
        gradient, inputs, output, partial, rows, width, partial.stride(0), triton.cdiv(rows, chunks * ROWS) * ROWS,
        KIND=kind, ROWS=ROWS, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def _partial_sums(gradient: Tensor, launch_width: int, width: int) -> Tensor:
    """Return an empty tensor (chunks, width) for the sums of launches of at most `launch_width` columns each."""
    return gradient.new_empty(max(MAX_PROGRAMS * BLOCK // launch_width, 1), width, dtype=torch.float32)


# ---------------------------------------------------------------- custom operations


@torch.library.custom_op("stoker::activation_backward_with_sums", mutates_args=("gradient",))
def activation_backward_(gradient: Tensor, inputs: Tensor, kind: str) -> Tensor:
    """Overwrite the gradient of the outputs, contiguous as `inputs`, with that of the inputs; return its partial sums.

    They are fp32 (chunks, width), to be summed over the chunks.
    """
    partial = _partial_sums(gradient, gradient.shape[-1], gradient.shape[-1])
    _launch(gradient, inputs, gradient, partial, kind)
    return partial


@activation_backward_.register_fake
def _(gradient: Tensor, inputs: Tensor, kind: str) -> Tensor:
    return _partial_sums(gradient, gradient.shape[-1], gradient.shape[-1])


@custom_op("stoker::join_with_sums")
def join(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate (batch, tokens, heads, head_dim) along heads; also return partial sums over batch and tokens."""
    joined, partial = _empty_joined(query, key, value)
    heads, head_dim = [part.shape[2] for part in (query, key, value)], query.shape[3]
    columns = partial.split([count * head_dim for count in heads], dim=1)
    for part, output, sums in zip((query, key, value), joined.split(heads, dim=2), columns, strict=True):
        _launch(part.contiguous(), None, output, sums, None)
    return joined, partial


@torch.library.register_fake("stoker::join_with_sums")
def _empty_joined(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, head_dim = query.shape
    joined = query.new_empty(batch, tokens, heads + 2 * key.shape[2], head_dim)
    return joined, _partial_sums(query, heads * head_dim, joined.shape[2] * head_dim)


# ---------------------------------------------------------------- autograd


class _BiasedActivation(torch.autograd.Function):
    """Save `projected` only."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, bias: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(projected)
        ctx.kind, ctx.dtype = kind, bias.dtype
        return NONLINEARITIES[kind](projected)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient = gradients[0].contiguous()  # the compiler copies it if it is needed again
        partial = activation_backward_(gradient, ctx.saved_tensors[0].contiguous(), ctx.kind)
        return gradient, partial.sum(dim=0).to(ctx.dtype), None


class _SplitHeads(torch.autograd.Function):
    """Views of queries, keys and values, whose gradients are concatenated."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, bias: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtype = bias.dtype
        query, key, value = projected.split((projected.shape[2] - 2 * groups, groups, groups), dim=2)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        joined, partial = join(*gradients)
        return joined, partial.sum(dim=0).to(ctx.dtype), None


def biased_activation(projected: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Return `NONLINEARITIES[kind](projected)`; the backward pass also computes the gradient of `bias`.

    Args:
        projected: (..., f), to which `bias.detach()` has been added.
        bias: (f,).
        kind: one of `FUSED_ACTIVATIONS`.
    """
    assert kind in FUSED_ACTIVATIONS
    activated = _BiasedActivation.apply(projected, bias, kind)
    assert isinstance(activated, Tensor)
    return activated


def split_heads(projected: Tensor, bias: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of queries, keys and values; the backward pass also computes the gradient of `bias`.

    Args:
        projected: (batch, tokens, heads + 2 groups, head_dim), to which `bias.detach()` has been added.
        bias: ((heads + 2 groups) * head_dim,).
        groups: number of key and value heads.
    """
    return _SplitHeads.apply(projected, bias, groups)
