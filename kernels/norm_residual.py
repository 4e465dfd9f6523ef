"""LayerNorm and RMSNorm fused with the residual branch; one backward kernel accumulates the gradients of both.

The residual x of a pre-norm layer is read by the norm and by the residual add, and the output of the norm may have two
consumers, such as a router and the experts. torch.compile adds these gradients, computes the norm's gradient and
reduces those of its weight and bias over the rows in kernels that do not saturate memory bandwidth. Here each tensor is
read once, and the forward pass saves only x. A linear layer after the norm would save the norm's output for the
gradient of its weight; `norm_residual_linear` recomputes it in the same backward kernel, from values that are loaded
anyway. The gradient of the residual is also that of the branch's output where it is added, so that its sum over the
rows is the gradient of the bias of the branch's last linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .custom_op import custom_op
from .launch import jit, next_power_of_2, rounded, tl, triton_runs_on
from .norm_functions import layer_norm, norm_dtype, rms_norm

MAX_WIDTH = 4096
"""Largest width whose rows fit in the registers of a program."""
MAX_PROGRAMS = 528
"""Most programs of a launch, 4 per multiprocessor of a large GPU; each writes partial gradients of weight and bias."""


# ---------------------------------------------------------------- Triton


@jit
def _load_tile(
    inputs_pointer, residual_gradient_pointer, first_gradient_pointer, second_gradient_pointer, start, last, width,
    SECOND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load ROWS rows of each tensor, without a cast, which would wait for the loads."""
    row = (start + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    place = row.to(tl.int64) * width + column
    mask = (row < last) & (column < width)
    inputs = tl.load(inputs_pointer + place, mask=mask, other=0.0)
    residual = tl.load(residual_gradient_pointer + place, mask=mask, other=0.0)
    first = tl.load(first_gradient_pointer + place, mask=mask, other=0.0)
    second = first
    if SECOND:
        second = tl.load(second_gradient_pointer + place, mask=mask, other=0.0)
    return inputs, residual, first, second


@jit
def norm_residual_backward_kernel(
    inputs_pointer, weight_pointer, bias_pointer, residual_gradient_pointer, first_gradient_pointer,
    second_gradient_pointer, gradient_pointer, normed_pointer, partial_pointer, rows, width, chunk_rows, epsilon,
    SECOND: tl.constexpr, WRITE_NORMED: tl.constexpr, CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    SUM_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process a chunk of rows per program, ROWS at a time, while the next ones are prefetched.

    Read: inputs and the gradients (rows, width), weight and, with CENTERED, which makes it LayerNorm, bias (width,).
    Written: gradient (rows, width), with WRITE_NORMED normed (rows, width), and partial (programs, 1 to 3, width),
    fp32: the chunk's gradient of the weight, the sum over its rows of the gradient of the norm's output times the
    normalized inputs, with CENTERED that of the bias, the sum of the gradient of the norm's output, and with
    SUM_RESIDUAL the sum of the gradient of the residual.
    """
    number = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    gain = tl.load(weight_pointer + column, mask=column < width, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gain += 1.0
    offset = gain
    if WRITE_NORMED and CENTERED:
        offset = tl.load(bias_pointer + column, mask=column < width, other=0.0).to(tl.float32)
    weight_gradient = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_gradient = tl.zeros((ROWS, BLOCK), tl.float32)
    residual_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    begin = number * chunk_rows
    last = min(begin + chunk_rows, rows)
    inputs, residual, first, second = _load_tile(
        inputs_pointer, residual_gradient_pointer, first_gradient_pointer, second_gradient_pointer, begin, last, width,
        SECOND, ROWS, BLOCK,
    )  # fmt: skip
    for start in range(begin, last, ROWS):
        next_inputs, next_residual, next_first, next_second = _load_tile(
            inputs_pointer, residual_gradient_pointer, first_gradient_pointer, second_gradient_pointer, start + ROWS,
            last, width, SECOND, ROWS, BLOCK,
        )  # fmt: skip
        x = inputs.to(tl.float32)
        outer = first.to(tl.float32)
        if SECOND:
            outer += second.to(tl.float32)
        if CENTERED:
            x = tl.where(column < width, x - (tl.sum(x, axis=1) / width)[:, None], 0.0)
        weighted = outer * gain
        root = tl.rsqrt(tl.sum(x * x, axis=1) / width + epsilon)
        mean = tl.sum(weighted * x, axis=1) * root / width
        quotient = x * root[:, None]
        weight_gradient += outer * quotient
        through_norm = weighted - quotient * mean[:, None]
        if CENTERED:
            bias_gradient += outer
            through_norm -= (tl.sum(weighted, axis=1) / width)[:, None]
        on_residual = residual.to(tl.float32)
        if SUM_RESIDUAL:
            residual_sum += on_residual
        gradient = on_residual + root[:, None] * through_norm
        row = (start + tl.arange(0, ROWS))[:, None]
        place = row.to(tl.int64) * width + column
        mask = (row < last) & (column < width)
        tl.store(gradient_pointer + place, rounded(gradient, gradient_pointer.dtype.element_ty), mask=mask)
        if WRITE_NORMED:
            normed = quotient * gain
            if CENTERED:
                normed += offset
            tl.store(normed_pointer + place, rounded(normed, normed_pointer.dtype.element_ty), mask=mask)
        inputs, residual, first, second = next_inputs, next_residual, next_first, next_second
    column = tl.arange(0, BLOCK)
    partial = partial_pointer + number.to(tl.int64) * (1 + CENTERED + SUM_RESIDUAL) * width + column
    tl.store(partial, tl.sum(weight_gradient, axis=0), mask=column < width)
    if CENTERED:
        tl.store(partial + width, tl.sum(bias_gradient, axis=0), mask=column < width)
    if SUM_RESIDUAL:
        tl.store(partial + (1 + CENTERED) * width, tl.sum(residual_sum, axis=0), mask=column < width)


def launch_options(width: int) -> dict[str, int]:
    """Return constants and launch options: a whole row or several short ones per program, 8 elements per thread."""
    block = next_power_of_2(width)
    return {"ROWS": max(1, 1024 // block), "BLOCK": block, "num_warps": max(4, block // 256), "enable_fp_fusion": True}


def _row_chunks(rows: int, width: int) -> tuple[int, int]:
    """Return the number of row chunks, one per program, and the rows of a chunk, a multiple of the tile."""
    tile = launch_options(width)["ROWS"]
    chunk_rows = -(-rows // (MAX_PROGRAMS * tile)) * tile
    return -(-rows // chunk_rows), chunk_rows


def triton_backward(
    residual_gradient: Tensor,
    first_gradient: Tensor,
    second_gradient: Tensor | None,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    zero_centered: bool,
    *,
    with_sum: bool = False,
    with_normed: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernel.

    Returns:
        Gradient of `inputs`; partial sums over the rows, fp32 (chunks, 1 to 3, width), to be summed: the gradient of
        `weight`, that of `bias`, if it is given, and with `with_sum` the sum of `residual_gradient`; with
        `with_normed` the norm of `inputs`, else None.
    """
    inputs, residual_gradient, first_gradient = (x.contiguous() for x in (inputs, residual_gradient, first_gradient))
    second_gradient = None if second_gradient is None else second_gradient.contiguous()
    width = inputs.shape[-1]
    rows = inputs.numel() // width
    _, chunk_rows = _row_chunks(rows, width)
    gradient = torch.empty_like(inputs)
    normed = torch.empty_like(inputs, dtype=norm_dtype(inputs, weight)) if with_normed else None
    partial = _empty_partial(inputs, bias, with_sum)
    norm_residual_backward_kernel[(len(partial),)](
        inputs, weight, bias if with_normed else None, residual_gradient, first_gradient, second_gradient, gradient,
        normed, partial, rows, width, chunk_rows, epsilon,
        SECOND=second_gradient is not None, WRITE_NORMED=with_normed, CENTERED=bias is not None,
        ZERO_CENTERED=zero_centered, SUM_RESIDUAL=with_sum, **launch_options(width),
    )  # fmt: skip
    return gradient, partial, normed


# ---------------------------------------------------------------- custom operations and Functions


@custom_op("stoker::norm_residual_backward")
def _norm_residual_backward(
    residual_gradient: Tensor,
    first_gradient: Tensor,
    second_gradient: Tensor | None,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    zero_centered: bool,
    with_sum: bool,
) -> tuple[Tensor, Tensor]:
    operands = residual_gradient, first_gradient, second_gradient, inputs, weight, bias
    gradient, partial, _ = triton_backward(*operands, epsilon, zero_centered, with_sum=with_sum)
    return gradient, partial


@torch.library.register_fake("stoker::norm_residual_backward")
def _(
    residual_gradient: Tensor,
    first_gradient: Tensor,
    second_gradient: Tensor | None,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    zero_centered: bool,
    with_sum: bool,
) -> tuple[Tensor, Tensor]:
    return _empty_like(inputs), _empty_partial(inputs, bias, with_sum)


@custom_op("stoker::norm_residual_backward_with_normed")
def _backward_with_normed(
    residual_gradient: Tensor,
    normed_gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = residual_gradient, normed_gradient, None, inputs, weight, bias
    gradient, partial, normed = triton_backward(*operands, epsilon, zero_centered, with_normed=True)
    assert normed is not None
    return gradient, partial, normed


@torch.library.register_fake("stoker::norm_residual_backward_with_normed")
def _(
    residual_gradient: Tensor, normed_gradient: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like(inputs), _empty_partial(inputs, bias, False), _empty_like(inputs).to(norm_dtype(inputs, weight))


def _empty_like(inputs: Tensor) -> Tensor:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format)


def _empty_partial(inputs: Tensor, bias: Tensor | None, with_sum: bool) -> Tensor:
    width = inputs.shape[-1]
    chunks, _ = _row_chunks(inputs.numel() // width, width)
    return inputs.new_empty(chunks, 1 + (bias is not None) + with_sum, width, dtype=torch.float32)


def _parameter_gradients(partial: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of parameters, of which `partial` has the sums of those that are not None."""
    sums = iter(partial.sum(dim=0))
    return [None if each is None else next(sums).to(each.dtype) for each in parameters]


class _NormResidual(torch.autograd.Function):
    """Take the norm's output as `normed`, computed by the caller, and return views only.

    Compiled by torch 2.11, an output made by a cast to its own dtype in here would lose its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output_bias: Tensor | None,
        normed: Tensor,
        epsilon: float,
        zero_centered: bool,
        two_outputs: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(residual, weight, bias, output_bias)
        ctx.epsilon, ctx.zero_centered = epsilon, zero_centered
        return residual.view_as(residual), normed.view_as(normed), *((normed.view_as(normed),) if two_outputs else ())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        residual, weight, bias, output_bias = ctx.saved_tensors
        residual_gradient, first, *second = gradients
        gradient, partial = _norm_residual_backward(
            residual_gradient, first, second[0] if second else None, residual, weight, bias, ctx.epsilon,
            ctx.zero_centered, output_bias is not None,
        )  # fmt: skip
        return gradient, *_parameter_gradients(partial, weight, bias, output_bias), None, None, None, None


class _NormResidualLinear(torch.autograd.Function):
    """Take the norm's output as `normed`, as above, and do not save it."""

    @staticmethod
    def forward(
        ctx: Any,
        residual: Tensor,
        gain: Tensor,
        offset: Tensor | None,
        normed: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        zero_centered: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(residual, gain, offset, weight)
        ctx.epsilon, ctx.zero_centered = epsilon, zero_centered
        return residual.view_as(residual), F.linear(normed, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        residual, gain, offset, weight = ctx.saved_tensors
        residual_gradient, outer = gradients
        gradient, partial, normed = _backward_with_normed(
            residual_gradient, outer @ weight, residual, gain, offset, ctx.epsilon, ctx.zero_centered
        )
        rows = outer.flatten(0, -2)
        weight_gradient = rows.t() @ normed.flatten(0, -2) if ctx.needs_input_grad[4] else None
        bias_gradient = rows.sum(0) if ctx.needs_input_grad[5] else None
        of_norm = _parameter_gradients(partial, gain, offset)
        return gradient, *of_norm, None, weight_gradient, bias_gradient, None, None


# ---------------------------------------------------------------- public functions


def can_fuse_residual(residual: Tensor, weight: Tensor) -> bool:
    """Return True if `norm_residual` can be used: in a compiled layer, for a trained norm, where Triton runs.

    Not in eager mode, where the memory estimate counts what autograd saves for the unfused layer, nor for a frozen
    norm, whose compiled backward already runs at memory bandwidth.
    """
    trained = torch.is_grad_enabled() and weight.requires_grad
    return trained and torch.compiler.is_compiling() and residual.shape[-1] <= MAX_WIDTH and triton_runs_on(residual)


def _norm(inputs: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    return rms_norm(inputs, weight, **options) if bias is None else layer_norm(inputs, weight, bias, **options)


def norm_residual(
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    epsilon: float,
    zero_centered: bool,
    two_outputs: bool,
    output_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the residual and its `layer_norm` or `rms_norm`, for one or two consumers, with a fused backward.

    Args:
        residual: residual stream, (..., h).
        weight: (h,).
        bias: (h,) of LayerNorm; None for RMSNorm.
        epsilon: as in `rms_norm`.
        zero_centered: as in `rms_norm`.
        two_outputs: return the norm's output twice, for two consumers, whose gradients the kernel adds.
        output_bias: bias (h,) of the last linear layer of the branch, whose output is added to the returned residual as
            it is. Its gradient comes from here: the linear layer must get it detached.

    Returns:
        Residual, norm, and with `two_outputs` the norm again, else None; differentiable once. All must be used, since
        the kernel reads the gradients of all, also where they are zeros.
    """
    with torch.no_grad():  # plain PyTorch, which the compiler fuses with preceding operations
        normed = _norm(residual, weight, bias, epsilon=epsilon, zero_centered=zero_centered)
    arguments = residual, weight, bias, output_bias, normed, epsilon, zero_centered, two_outputs
    residual, normed, *second = _NormResidual.apply(*arguments)
    return residual, normed, second[0] if second else None


def norm_residual_linear(
    residual: Tensor,
    gain: Tensor,
    offset: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    epsilon: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """Return the residual and `F.linear(norm(residual), weight, bias)`, saving the residual but not the norm.

    Args:
        residual: residual stream, (..., h).
        gain: weight of the norm, (h,).
        offset: bias of LayerNorm, (h,); None for RMSNorm.
        weight: (n, h), in `norm_dtype`.
        bias: (n,), or None.
        epsilon: as in `rms_norm`.
        zero_centered: as in `rms_norm`.

    Returns:
        Residual (..., h) and projection (..., n), differentiable once; both must be used.
    """
    with torch.no_grad():
        normed = _norm(residual, gain, offset, epsilon=epsilon, zero_centered=zero_centered)
    arguments = residual, gain, offset, normed, weight, bias, epsilon, zero_centered
    residual, projected = _NormResidualLinear.apply(*arguments)
    return residual, projected
