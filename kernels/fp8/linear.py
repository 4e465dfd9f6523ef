"""Linear layers whose three products run in fp8: forward, gradient of the input (dgrad) and of the weight (wgrad).

The input is cast once, in both layouts, and its transpose in fp8 is all that is saved of it. The gradient of the output
is cast once, in both layouts. A weight is cast for every forward, and its transpose for every backward, unless the
caller keeps its casts (`cast_weight`) for the micro batches of an optimizer step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .quantize import Quantized, QuantizedPair, Reduce, amaxes, quantize
from .recipe import Fp8Recipe
from .scaled_matmul import scaled_matmul


class WeightCast(NamedTuple):
    """Casts of a weight (N, K), or of a stack of them, which hold until the optimizer changes it.

    Attributes:
        rows: cast of the weight, which the forward reads.
        columns: cast of its transpose, which the backward reads; None to cast it in each backward.
    """

    rows: Quantized
    columns: Quantized | None


def cast_weight(
    weight: Tensor,
    recipe: Fp8Recipe,
    *,
    columns: bool = True,
    reduce: Reduce | None = None,
    out: WeightCast | None = None,
) -> WeightCast:
    """Cast a weight, for all micro batches of an optimizer step.

    Args:
        weight: (N, K).
        recipe: the recipe of the layer.
        columns: cast the transpose too; without, each backward casts it.
        reduce: as in `quantize.amaxes`, over ranks that hold parts of the weight.
        out: casts of an earlier step, whose memory is overwritten, so that CUDA graphs and compiled code find the new
            ones in the same place.

    Returns:
        The casts, `out` if given.
    """
    pair = _quantize_weight(weight, recipe, columns=columns, reduce=reduce)
    assert pair.rows is not None
    new = WeightCast(pair.rows, pair.columns)
    if out is None:
        return new
    for old, fresh in zip(out, new, strict=True):
        if old is not None and fresh is not None:
            old.data.copy_(fresh.data)
            old.scale.copy_(fresh.scale)
    return out


def _quantize_weight(
    weight: Tensor,
    recipe: Fp8Recipe,
    *,
    rows: bool = True,
    columns: bool = True,
    amax: tuple[Tensor, Tensor] | None = None,
    reduce: Reduce | None = None,
) -> QuantizedPair:
    options: dict[str, Any] = {"margin": recipe.margin, "power_of_two": recipe.power_of_two}
    return quantize(
        weight, recipe.forward, recipe.weights, rows=rows, columns=columns, amax=amax, reduce=reduce, **options
    )


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
        out_dtype: torch.dtype,
    ) -> Tensor:
        options: dict[str, Any] = {"margin": recipe.margin, "power_of_two": recipe.power_of_two}
        trains = ctx.needs_input_grad[1]
        hidden = inputs.flatten(0, -2)
        pair = quantize(
            hidden, recipe.forward, recipe.inputs, columns=trains and recipe.wgrad, reduce=reduce, **options
        )
        weight_amax = None
        if rows_data is None or rows_scale is None:
            weight_amax = amaxes(weight, recipe.weights, reduce=weight_reduce)
            rows = _quantize_weight(weight, recipe, columns=False, amax=weight_amax).rows
        else:
            rows = Quantized(rows_data, rows_scale, recipe.weights)
        assert pair.rows is not None
        assert rows is not None
        output = scaled_matmul(pair.rows, rows, out_dtype, fast_accumulation=recipe.fast_accumulation_forward)
        kept: tuple[Tensor | None, ...] = (None, None)
        if trains:
            kept = (inputs, None) if pair.columns is None else pair.columns[:2]
        if columns_data is None and ctx.needs_input_grad[0]:
            ctx.save_for_backward(*kept, weight, *(weight_amax or (None, None)))
        else:
            ctx.save_for_backward(*kept, None, columns_data, columns_scale)
        ctx.recipe, ctx.reduce, ctx.weight_reduce = recipe, reduce, weight_reduce
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = inputs.shape, inputs.dtype, weight.dtype
        return output.view(*inputs.shape[:-1], output.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Fp8Recipe = ctx.recipe
        options: dict[str, Any] = {"margin": recipe.margin, "power_of_two": recipe.power_of_two}
        needs_inputs, needs_weight = ctx.needs_input_grad[:2]
        kept, kept_scale, weight, first, second = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        pair = quantize(
            gradient,
            recipe.backward,
            recipe.inputs,
            rows=needs_inputs,
            columns=needs_weight and recipe.wgrad,
            reduce=ctx.reduce,
            **options,
        )
        fast = recipe.fast_accumulation_backward
        input_gradient = weight_gradient = None
        if needs_inputs:
            if weight is None:
                columns: Quantized | None = Quantized(first, second, recipe.weights)
            else:  # with the maxima of the forward, where it found them
                amax = None if first is None else (first, second)
                columns = _quantize_weight(weight, recipe, rows=False, amax=amax, reduce=ctx.weight_reduce).columns
            assert pair.rows is not None
            assert columns is not None
            input_gradient = scaled_matmul(pair.rows, columns, ctx.input_dtype, fast_accumulation=fast)
            input_gradient = input_gradient.view(ctx.input_shape)
        if needs_weight and pair.columns is not None:
            inputs = Quantized(kept, kept_scale, recipe.inputs)
            weight_gradient = scaled_matmul(pair.columns, inputs, ctx.weight_dtype, fast_accumulation=fast)
        elif needs_weight:
            weight_gradient = (gradient.t() @ kept.flatten(0, -2)).to(ctx.weight_dtype)
        return input_gradient, weight_gradient, *(None,) * 8


def fp8_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Fp8Recipe,
    *,
    cast: WeightCast | None = None,
    reduce: Reduce | None = None,
    weight_reduce: Reduce | None = None,
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

    Returns:
        (..., N) in the dtype of `inputs`, differentiable once.

    Raises:
        ValueError: shapes do not match, or a width is no multiple of 16.
    """
    if weight.ndim != 2 or inputs.shape[-1] != weight.shape[1]:
        raise ValueError(f"`weight` {tuple(weight.shape)} must be (N, {inputs.shape[-1]}), to match `inputs`.")
    if weight.shape[0] % 16 or weight.shape[1] % 16:
        raise ValueError(f"`weight` {tuple(weight.shape)} must have multiples of 16 rows and columns for fp8.")
    if torch.is_autocast_enabled(inputs.device.type):
        dtype = torch.get_autocast_dtype(inputs.device.type)
        inputs, bias = inputs.to(dtype), None if bias is None else bias.to(dtype)
    rows, columns = cast or (None, None)
    output = _Fp8Linear.apply(
        inputs,
        weight,
        *(rows[:2] if rows else (None, None)),
        *(columns[:2] if columns else (None, None)),
        recipe,
        reduce,
        weight_reduce,
        inputs.dtype,
    )
    assert isinstance(output, Tensor)
    return output if bias is None else output + bias
