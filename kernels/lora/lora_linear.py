"""A frozen linear layer with a low-rank update (LoRA, arXiv 2106.09685) as one operation.

The gradient of the weight is never made. The input is kept once, for the frozen product and the update together; where
it is the norm of something that is kept anyway, not at all.
Updates cost passes over memory rather than arithmetic: those of the output and of the gradient of the input are written
before the large product, which adds to what it finds, and the gradient of the output is read once for both of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch import triton_runs_on
from ..norm_functions import NormParts
from .lora_forward import triton_narrow_update
from .lora_grad import MOST_PARTS, WIDEST_RANK, triton_narrow_products

# ---------------------------------------------------------------- reference


def reference_lora_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    *,
    scale: float,
    parts: Sequence[int],
    dropout: float = 0.0,
) -> Tensor:
    """The operation from parts that autograd sees; arguments as in `lora_linear`."""
    low = F.linear(F.dropout(inputs, dropout) if dropout else inputs, down)
    pairs = zip(low.split(up.shape[1], dim=-1), up.split(list(parts)), strict=True)
    update = torch.cat([F.linear(part, rows) for part, rows in pairs], dim=-1)
    return F.linear(inputs, weight, bias) + scale * update


# ---------------------------------------------------------------- custom operations


def _places(parts: Sequence[int], rank: int) -> Iterator[tuple[slice, slice]]:
    """For each part its columns of the output, and its columns of the low-rank product."""
    for number, (rows, end) in enumerate(zip(parts, accumulate(parts), strict=True)):
        yield slice(end - rows, end), slice(number * rank, (number + 1) * rank)


def _has_kernels(wide: Tensor, up: Tensor, parts: Sequence[int]) -> bool:
    """Whether those of updates and their gradients serve."""
    return triton_runs_on(wide) and up.shape[1] <= WIDEST_RANK and len(parts) <= MOST_PARTS


def updated_product(
    inputs: Tensor, weight: Tensor, start: Tensor | None, low: Tensor, up: Tensor, scale: float, parts: Sequence[int]
) -> Tensor:
    """`start + inputs @ weight^T + scale * update`, (n, out), from the low-rank product (n, parts * rank).

    `start` is a bias (out,), or a tensor like the result, or None.

    The update is written first and the large product adds to it: a matrix product that is busy computing reads what is
    there for nothing, a narrow one would take a pass over the output more.
    """
    if _has_kernels(inputs, up, parts):
        output = triton_narrow_update(low, up, scale, parts, start)
    else:
        output = inputs.new_empty(len(inputs), len(weight))
        for wide, narrow in _places(parts, up.shape[1]):
            columns = output[:, wide]
            first, share = (columns, 0) if start is None else (start[..., wide], 1)
            torch.addmm(first, low[:, narrow], up[wide].t(), beta=share, alpha=scale, out=columns)
    return output.addmm_(inputs, weight.t())


def narrow_gradients(
    gradient: Tensor,
    up: Tensor,
    low: Tensor,
    scale: float,
    parts: Sequence[int],
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the low-rank product (n, parts * rank) and of `up`, from that of the output (n, out).

    The third is the first times `factors` (n, 1), or the first.
    """
    if _has_kernels(gradient, up, parts):
        return triton_narrow_products(gradient, up, low, scale, parts, factors)
    of_low, of_up = torch.empty_like(low), torch.empty_like(up)
    for wide, narrow in _places(parts, up.shape[1]):
        part = gradient[:, wide]
        torch.mul(part @ up[wide], scale, out=of_low[:, narrow])
        torch.mul(part.t() @ low[:, narrow], scale, out=of_up[wide])
    return of_low, of_up, of_low if factors is None else (of_low * factors).to(low.dtype)


def gradient_of_down(of_low: Tensor, inputs: Tensor, gain: Tensor | None) -> Tensor:
    """Gradient of the first matrix, l^T x, from that of the low-rank product l (n, r) and the inputs x (n, in).

    Where x = f * source * gain is a norm, `inputs` are its source and `of_low` is f * l: l^T x = ((f * l)^T source) *
    gain.
    """
    product = of_low.t() @ inputs.to(of_low.dtype)
    return product if gain is None else (product * gain).to(of_low.dtype)


@torch.library.custom_op("stoker::lora_linear", mutates_args=())
def _lora_linear(
    inputs: Tensor,
    source: Tensor | None,
    factors: Tensor | None,
    gain: Tensor | None,
    weight: Tensor,
    start: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    parts: list[int],
) -> tuple[Tensor, Tensor]:
    """Output (n, out) and low-rank product (n, parts * rank) of inputs (n, in), which may be a norm of `source`.

    For `start` see `updated_product`.
    """
    low = inputs @ down.t()
    return updated_product(inputs, weight, start, low, up, scale, parts), low


@_lora_linear.register_fake
def _(
    inputs: Tensor,
    source: Tensor | None,
    factors: Tensor | None,
    gain: Tensor | None,
    weight: Tensor,
    start: Tensor | None,
    down: Tensor,
    up: Tensor,
    scale: float,
    parts: list[int],
) -> tuple[Tensor, Tensor]:
    return inputs.new_empty(len(inputs), len(weight)), inputs.new_empty(len(inputs), len(down))


@torch.library.custom_op("stoker::lora_linear_backward", mutates_args=())
def _lora_linear_backward(
    gradient: Tensor,
    inputs: Tensor,
    factors: Tensor | None,
    gain: Tensor | None,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    low: Tensor,
    scale: float,
    parts: list[int],
    of_inputs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the inputs (empty unless `of_inputs`), `down` and `up`; for `inputs` see `gradient_of_down`."""
    of_low, of_up, scaled = narrow_gradients(gradient, up, low, scale, parts, factors)
    of = (of_low @ down).addmm_(gradient, weight) if of_inputs else gradient.new_empty(0)
    return of, gradient_of_down(scaled, inputs, gain), of_up


@_lora_linear_backward.register_fake
def _(
    gradient: Tensor,
    inputs: Tensor,
    factors: Tensor | None,
    gain: Tensor | None,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    low: Tensor,
    scale: float,
    parts: list[int],
    of_inputs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    of = gradient.new_empty(inputs.shape) if of_inputs else gradient.new_empty(0)
    return of, torch.empty_like(down), torch.empty_like(up)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, source, factors, gain, weight, _, down, up, scale, parts = inputs
    ctx.save_for_backward(hidden if source is None else source, factors, gain, weight, down, up, output[1])
    ctx.scale, ctx.parts = scale, parts
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    of_inputs = ctx.needs_input_grad[0]
    of_hidden, of_down, of_up = _lora_linear_backward(
        gradient.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.parts, of_inputs
    )
    of_start = gradient if ctx.needs_input_grad[5] else None  # a bias is frozen
    return of_hidden if of_inputs else None, None, None, None, None, of_start, of_down, of_up, None, None


_lora_linear.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------- public function


def lora_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    *,
    scale: float,
    parts: Sequence[int],
    dropout: float = 0.0,
    norm: NormParts | None = None,
    onto: Tensor | None = None,
) -> Tensor:
    """`inputs @ (weight + scale * update)^T + bias`, the update being the low-rank product of each part.

    A fused weight has its projections one below the other. Each is a part with matrices of its own: part i multiplies
    by rows [i r, (i + 1) r) of `down`, then by its own rows of `up`. One part has one pair of matrices for all rows.

    Args:
        inputs: (..., in), any floating dtype; under autocast, cast to its dtype with the weights.
        weight: (out, in), frozen: it gets no gradient.
        bias: (out,), likewise; None for none.
        down: (parts * r, in), LoRA's A.
        up: (out, r), LoRA's B.
        scale: alpha / r.
        parts: rows of each part, `out` together.
        dropout: probability of dropping an input of `down`; 0 outside training.
        norm: what `inputs` are the product of, kept for the backward in their place (its gain is frozen); None keeps
            them.
        onto: (..., out), what the result is added to; None for nothing.

    Returns:
        (..., out), differentiable once in `inputs`, `onto`, `down` and `up`.

    Raises:
        ValueError: the shapes do not fit.
    """
    rank = up.shape[-1]
    if sum(parts) != len(weight) or up.shape != (len(weight), rank):
        raise ValueError(
            f"`parts` ({list(parts)}) and `up` {tuple(up.shape)} must have the {len(weight)} rows of `weight`."
        )
    if down.shape != (len(parts) * rank, weight.shape[1]):
        raise ValueError(
            f"`down` {tuple(down.shape)} must be {(len(parts) * rank, weight.shape[1])}: {rank} rows for each part."
        )
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        inputs, weight, down, up = inputs.to(dtype), weight.to(dtype), down.to(dtype), up.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if dropout:
        output = reference_lora_linear(inputs, weight, bias, down, up, scale=scale, parts=parts, dropout=dropout)
        return output if onto is None else onto + output
    rows, start = inputs.flatten(0, -2).contiguous(), bias
    if onto is not None and bias is None and onto.dtype == inputs.dtype:
        start, onto = onto.flatten(0, -2), None
    output, _ = _lora_linear(rows, *rows_of(norm), weight, start, down, up, scale, list(parts))
    output = output.unflatten(0, inputs.shape[:-1])
    return output if onto is None else onto + output


def rows_of(norm: NormParts | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Source (n, in), factors (n, 1) and gain of a norm, as the operations take them."""
    if norm is None:
        return None, None, None
    return norm.source.flatten(0, -2), norm.factors.flatten(0, -2), norm.gain
