"""Linear layers whose three products run in fp8: forward, gradient of the input (dgrad) and of the weight (wgrad).

The input is cast once, in both layouts, and its transpose in fp8 is all that is saved of it. The gradient of the output
is cast once, in both layouts. A weight is cast for every forward, and its transpose for every backward, unless the
caller keeps its casts (`weight_cast.cast_weight`) for the micro batches of an optimizer step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast
from .operands import Producer, Quantized, Source, source_arguments
from .quantize import Reduce, quantize
from .recipe import Fp8Recipe
from .scaled_matmul import scaled_matmul
from .weight_cast import WeightCast, backward_cast, cast_tensors, forward_cast


class _Fp8Linear(torch.autograd.Function):
    """Save the fp8 transpose of the input (with `wgrad` off, the input), and the weight or its transpose's cast."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        rows_data: Tensor | None,
        rows_scale: Tensor | None,
        columns_data: Tensor | None,
        columns_scale: Tensor | None,
        recipe: Fp8Recipe,
        reduce: Reduce | None,
        weight_reduce: Reduce | None,
        producer: Producer | None,
        activation: str,
        *tensors: Tensor,
    ) -> Tensor:
        needs_inputs, needs_weight = ctx.needs_input_grad[:2]
        hidden = inputs.flatten(0, -2) if producer is None else Source(producer, tensors, activation)
        pair = quantize(
            hidden, recipe.forward, recipe.inputs, columns=needs_weight and recipe.wgrad, reduce=reduce,
            margin=recipe.margin,
        )  # fmt: skip
        cast = rows_data, rows_scale, columns_data, columns_scale
        rows, kept_weight = forward_cast(weight, cast, recipe, weight_reduce)
        assert pair.rows is not None
        output = scaled_matmul(pair.rows, rows, inputs.dtype, fast_accumulation=True)
        kept: tuple[Tensor | None, ...] = (None, None)
        if needs_weight:
            kept = (inputs, None) if pair.columns is None else pair.columns[:2]
        ctx.save_for_backward(*kept, *(kept_weight if needs_inputs else (None,) * 3))
        ctx.recipe, ctx.reduce, ctx.weight_reduce = recipe, reduce, weight_reduce
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = inputs.shape, inputs.dtype, weight.dtype
        return output.view(*inputs.shape[:-1], output.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Fp8Recipe = ctx.recipe
        needs_inputs, needs_weight = ctx.needs_input_grad[:2]
        kept, kept_scale, *kept_weight = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        pair = quantize(
            gradient, recipe.backward, recipe.inputs, rows=needs_inputs, columns=needs_weight and recipe.wgrad,
            reduce=ctx.reduce, margin=recipe.margin,
        )  # fmt: skip
        fast = recipe.fast_accumulation_backward
        input_gradient = weight_gradient = None
        if pair.rows is not None:
            columns = backward_cast(tuple(kept_weight), recipe, ctx.weight_reduce)
            input_gradient = scaled_matmul(pair.rows, columns, ctx.input_dtype, fast_accumulation=fast)
            input_gradient = input_gradient.view(ctx.input_shape)
        if pair.columns is not None:
            inputs = Quantized(kept, kept_scale, recipe.inputs)
            weight_gradient = scaled_matmul(pair.columns, inputs, ctx.weight_dtype, fast_accumulation=fast)
        elif needs_weight:
            weight_gradient = (gradient.t() @ kept.flatten(0, -2)).to(ctx.weight_dtype)
        return input_gradient, weight_gradient, *(None,) * (len(ctx.needs_input_grad) - 2)


def check_weight(name: str, weight: Tensor, width: int) -> None:
    """Raise ValueError if a matrix does not fit inputs of this width, or fp8 cannot multiply by it."""
    if weight.ndim != 2 or weight.shape[1] != width:
        raise ValueError(f"`{name}` {tuple(weight.shape)} must be (N, {width}), to match its inputs.")
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        raise ValueError(f"`{name}` {tuple(weight.shape)} must have multiples of 16 rows and columns for fp8.")


def fp8_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Fp8Recipe,
    *,
    cast: WeightCast | None = None,
    reduce: Reduce | None = None,
    weight_reduce: Reduce | None = None,
    source: Source | None = None,
) -> Tensor:
    """Return `F.linear(inputs, weight, bias)` with all products in fp8.

    Args:
        inputs: (..., K); under autocast, cast to its dtype, as is the bias.
        weight: (N, K); N and K multiples of 16.
        bias: (N,), added to the rounded product, or None; its gradient is computed without fp8.
        recipe: formats and scaling.
        cast: casts of `weight`, from `cast_weight`; None casts it here, and its transpose in the backward.
        reduce: maximum over the ranks that hold parts of `inputs` (`quantize.amaxes`), for its scales and those of the
            gradient of the output; None: each rank has its own.
        weight_reduce: likewise over ranks that hold parts of `weight`.
        source: what makes `inputs`, (M, K) of all its rows, which is cast instead of them: nothing reads their values,
            so that a compiler does not compute them. Needs `wgrad`.

    Returns:
        (..., N) in the dtype of `inputs`, differentiable once.

    Raises:
        ValueError: shapes do not match, or a width is no multiple of 16.
    """
    check_weight("weight", weight, inputs.shape[-1])
    inputs, bias = autocast(inputs, bias)
    options = recipe, reduce, weight_reduce, *source_arguments(source)
    output = _Fp8Linear.apply(inputs, weight, *cast_tensors(cast), *options)
    assert isinstance(output, Tensor)
    return output if bias is None else output + bias
