"""Fused frozen linear layer with a low-rank update (LoRA, arXiv 2106.09685).

The gradient of the frozen weight is never computed. The input is saved once for the frozen product and the update, and
not at all if it is a norm whose own input is saved anyway.
LoRA costs memory traffic rather than arithmetic: the updates of the output and of the input gradient are written first
and the large GEMM accumulates onto them, and the output gradient is read once for both low-rank gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autocast import autocast
from ..custom_op import custom_op
from ..launch import triton_runs_on
from ..norm_functions import NormFactors
from .lora_forward import triton_lora_update
from .lora_grad import MAX_PARTS, MAX_RANK, triton_lora_gradients

# ---------------------------------------------------------------- reference


def reference_lora_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scale: float,
    parts: Sequence[int],
    dropped: Tensor | None = None,
) -> Tensor:
    """Reference composed of differentiable operations; arguments as in `lora_linear`."""
    low = F.linear(inputs if dropped is None else dropped, lora_a)
    pairs = zip(low.split(lora_b.shape[1], dim=-1), lora_b.split(list(parts)), strict=True)
    update = torch.cat([F.linear(part, rows) for part, rows in pairs], dim=-1)
    return F.linear(inputs, weight, bias) + scale * update


# ---------------------------------------------------------------- custom operations


def _part_slices(parts: Sequence[int], rank: int) -> Iterator[tuple[slice, slice]]:
    """Yield for each part its columns of the output and its columns of the low-rank activation."""
    for number, (rows, end) in enumerate(zip(parts, accumulate(parts), strict=True)):
        yield slice(end - rows, end), slice(number * rank, (number + 1) * rank)


def _use_triton(wide: Tensor, lora_b: Tensor, parts: Sequence[int]) -> bool:
    """Return True if the kernels of updates and their gradients support these operands."""
    return triton_runs_on(wide) and lora_b.shape[1] <= MAX_RANK and len(parts) <= MAX_PARTS


def linear_with_update(
    inputs: Tensor,
    weight: Tensor,
    start: Tensor | None,
    low: Tensor,
    lora_b: Tensor,
    scale: float,
    parts: Sequence[int],
) -> Tensor:
    """Return `start + inputs @ weight^T + scale * update`, (n, out), given the low-rank activation (n, parts * rank).

    `start` is a bias (out,), a residual (n, out) or None.

    The update is written first and the large GEMM accumulates onto it: reading its output is free for a compute-bound
    GEMM, while a low-rank product after it would cost another pass over the output.
    """
    if _use_triton(inputs, lora_b, parts):
        output = triton_lora_update(low, lora_b, scale, parts, start)
    else:
        output = inputs.new_empty(len(inputs), len(weight))
        for wide, narrow in _part_slices(parts, lora_b.shape[1]):
            columns = output[:, wide]
            addend, beta = (columns, 0) if start is None else (start[..., wide], 1)
            torch.addmm(addend, low[:, narrow], lora_b[wide].t(), beta=beta, alpha=scale, out=columns)
    return output.addmm_(inputs, weight.t())


def lora_gradients(
    gradient: Tensor,
    lora_b: Tensor,
    low: Tensor,
    scale: float,
    parts: Sequence[int],
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the low-rank activation (n, parts * rank) and of LoRA's B, from the output gradient (n, out).

    The third tensor is the first times `factors` (n, 1), or the first itself without factors.
    """
    if _use_triton(gradient, lora_b, parts):
        return triton_lora_gradients(gradient, lora_b, low, scale, parts, factors)
    low_gradient, lora_b_gradient = torch.empty_like(low), torch.empty_like(lora_b)
    for wide, narrow in _part_slices(parts, lora_b.shape[1]):
        part = gradient[:, wide]
        torch.mul(part @ lora_b[wide], scale, out=low_gradient[:, narrow])
        torch.mul(part.t() @ low[:, narrow], scale, out=lora_b_gradient[wide])
    return low_gradient, lora_b_gradient, low_gradient if factors is None else (low_gradient * factors).to(low.dtype)


def compute_lora_a_gradient(low_gradient: Tensor, inputs: Tensor, gain: Tensor | None) -> Tensor:
    """Return the gradient of LoRA's A, l^T x, from the gradient l (n, r) of the low-rank activation and x (n, in).

    If x = f * source * gain is a norm, `inputs` is its source and `low_gradient` is f * l, since l^T x = ((f * l)^T
    source) * gain.
    """
    dtype = low_gradient.dtype
    if dtype == torch.float16 and inputs.dtype == torch.float32:  # a residual stream may be beyond the range of fp16
        low_gradient = low_gradient.float()
    product = low_gradient.t() @ inputs.to(low_gradient.dtype)
    return product.to(dtype) if gain is None else (product * gain).to(dtype)


@custom_op("stoker::lora_linear")
def fused_lora_linear(
    inputs: Tensor,
    source: Tensor | None,
    factors: Tensor | None,
    gain: Tensor | None,
    weight: Tensor,
    start: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    parts: list[int],
) -> tuple[Tensor, Tensor]:
    """Return output (n, out) and low-rank activation (n, parts * rank) of inputs (n, in).

    `source`, `factors` and `gain` are saved in place of `inputs` if these are a norm; see `NormFactors`. For `start`
    see `linear_with_update`.
    """
    low = inputs @ lora_a.t()
    return linear_with_update(inputs, weight, start, low, lora_b, scale, parts), low


@torch.library.register_fake("stoker::lora_linear")
def _(
    inputs: Tensor, source: Tensor | None, factors: Tensor | None, gain: Tensor | None, weight: Tensor,
    start: Tensor | None, lora_a: Tensor, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return inputs.new_empty(len(inputs), len(weight)), inputs.new_empty(len(inputs), len(lora_a))


@custom_op("stoker::lora_linear_backward")
def fused_lora_linear_backward(
    gradient: Tensor,
    inputs: Tensor,
    factors: Tensor | None,
    gain: Tensor | None,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    low: Tensor,
    scale: float,
    parts: list[int],
    with_input_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the inputs (empty unless `with_input_gradient`), `lora_a` and `lora_b`.

    For `inputs` see `compute_lora_a_gradient`.
    """
    low_gradient, lora_b_gradient, scaled = lora_gradients(gradient, lora_b, low, scale, parts, factors)
    input_gradient = (low_gradient @ lora_a).addmm_(gradient, weight) if with_input_gradient else gradient.new_empty(0)
    return input_gradient, compute_lora_a_gradient(scaled, inputs, gain), lora_b_gradient


@torch.library.register_fake("stoker::lora_linear_backward")
def _(
    gradient: Tensor, inputs: Tensor, factors: Tensor | None, gain: Tensor | None, weight: Tensor, lora_a: Tensor,
    lora_b: Tensor, low: Tensor, scale: float, parts: list[int], with_input_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    input_gradient = gradient.new_empty(inputs.shape) if with_input_gradient else gradient.new_empty(0)
    return input_gradient, torch.empty_like(lora_a), torch.empty_like(lora_b)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, source, factors, gain, weight, _, lora_a, lora_b, scale, parts = inputs
    ctx.save_for_backward(hidden if source is None else source, factors, gain, weight, lora_a, lora_b, output[1])
    ctx.scale, ctx.parts = scale, parts
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    with_input_gradient = ctx.needs_input_grad[0]
    input_gradient, lora_a_gradient, lora_b_gradient = fused_lora_linear_backward(
        gradient.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.parts, with_input_gradient
    )
    # a residual (n, out): a bias, of another shape, is frozen
    start_gradient = gradient if ctx.needs_input_grad[5] else None
    input_gradient = input_gradient if with_input_gradient else None
    return input_gradient, None, None, None, None, start_gradient, lora_a_gradient, lora_b_gradient, None, None


torch.library.register_autograd("stoker::lora_linear", _backward, setup_context=_save)


# ---------------------------------------------------------------- public function


def lora_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scale: float,
    parts: Sequence[int],
    dropped: Tensor | None = None,
    norm: NormFactors | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return `inputs @ (weight + scale * B A)^T + bias`, with separate LoRA matrices for each part of a fused weight.

    A fused weight (QKV, or gate and up) stacks the rows of its projections. Each is a part with its own matrices: part
    i multiplies by rows [i r, (i + 1) r) of `lora_a`, then by its own rows of `lora_b`. With a single part all rows
    share one pair of matrices.

    Args:
        inputs: (..., in), any floating dtype; under autocast, cast to its dtype with the weights.
        weight: (out, in), frozen (no gradient).
        bias: (out,), frozen, or None.
        lora_a: LoRA's A, (parts * r, in).
        lora_b: LoRA's B, (out, r).
        scale: alpha / r.
        parts: rows of each part, which sum to `out`.
        dropped: `inputs` after dropout, the input of `lora_a`; None without dropout.
        norm: factors whose product is `inputs`, saved for the backward instead of it; its gain is frozen. None saves
            `inputs`.
        residual: residual that the result is added to, (..., out), or None.

    Returns:
        (..., out), differentiable once with respect to `inputs`, `dropped`, `residual`, `lora_a` and `lora_b`.

    Raises:
        ValueError: shapes do not match.
    """
    rank = lora_b.shape[-1]
    if sum(parts) != len(weight) or lora_b.shape != (len(weight), rank):
        raise ValueError(
            f"`parts` ({list(parts)}) and `lora_b` {tuple(lora_b.shape)} must have the {len(weight)} rows of `weight`."
        )
    if lora_a.shape != (len(parts) * rank, weight.shape[1]):
        raise ValueError(
            f"`lora_a` {tuple(lora_a.shape)} must be {(len(parts) * rank, weight.shape[1])}: {rank} rows for each part."
        )
    inputs, weight, bias, lora_a, lora_b = autocast(inputs, weight, bias, lora_a, lora_b)
    if dropped is not None:
        dropped = dropped.to(inputs.dtype)
        output = reference_lora_linear(inputs, weight, bias, lora_a, lora_b, scale=scale, parts=parts, dropped=dropped)
        return output if residual is None else residual + output
    rows, start = inputs.flatten(0, -2).contiguous(), bias
    if residual is not None and bias is None and residual.dtype == inputs.dtype:
        start, residual = residual.flatten(0, -2), None
    output, _ = fused_lora_linear(rows, *flatten_norm_factors(norm), weight, start, lora_a, lora_b, scale, list(parts))
    output = output.unflatten(0, inputs.shape[:-1])
    return output if residual is None else residual + output


def flatten_norm_factors(norm: NormFactors | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return source (n, in), factors (n, 1) and gain of a norm with flattened leading dimensions."""
    if norm is None:
        return None, None, None
    return norm.source.flatten(0, -2), norm.inverse_rms.flatten(0, -2), norm.gain
