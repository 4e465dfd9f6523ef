"""The gated MLP in fp8: fc1, act(gate) * up and fc2 as one function, between whose products little but fp8 is written.

Saved are the input in fp8, transposed, and [gate | up]. The product act(gate) * up exists in fp8 only, cast from
[gate | up] by the kernel that computes it, and once more, transposed, in the backward; the gradient of [gate | up]
exists in fp8 only, in both layouts, cast by the kernel that computes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activations import FUSED_ACTIVATIONS
from ..autocast import autocast_dtype
from ..gated_activation import gated_activation
from .linear import check_weight, fp8_linear
from .operands import Producer, Quantized, Source, source_arguments
from .quantize import Reduce, amaxes, quantize, quantize_backward
from .recipe import TILE, Fp8Recipe
from .scaled_matmul import scaled_matmul
from .weight_cast import WeightCast, backward_cast, cast_tensors, forward_cast


class _Fp8GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, up: Tensor, down: Tensor, recipe: Fp8Recipe, activation: str,
        reduce: Reduce | None, weight_reduce: Reduce | None, producer: Producer | None, kind: str,
        *tensors: Any,
    ) -> Tensor:  # fmt: skip
        needs_inputs, needs_up, needs_down = ctx.needs_input_grad[:3]
        casts = tensors[:8]
        read = inputs.flatten(0, -2) if producer is None else Source(producer, tensors[8:], kind)
        hidden = quantize(read, recipe.forward, recipe.inputs, columns=needs_up, reduce=reduce, margin=recipe.margin)
        up_rows, kept_up = forward_cast(up, casts[:4], recipe, weight_reduce)
        down_rows, kept_down = forward_cast(down, casts[4:], recipe, weight_reduce)
        assert hidden.rows is not None
        gate_up = scaled_matmul(hidden.rows, up_rows, inputs.dtype, fast_accumulation=True)
        source = Source("gated", (gate_up,), activation)
        amax = amaxes(source, recipe.inputs, columns=needs_down, reduce=reduce)
        product = quantize(source, recipe.forward, recipe.inputs, columns=False, amax=amax, margin=recipe.margin).rows
        assert product is not None
        output = scaled_matmul(product, down_rows, inputs.dtype, fast_accumulation=True)
        kept = hidden.columns[:2] if hidden.columns is not None else (None, None)
        ctx.save_for_backward(
            *kept, gate_up, amax[1] if recipe.inputs == "row" else amax[0],
            *(kept_up if needs_inputs else (None,) * 3), *kept_down,
        )  # fmt: skip
        ctx.recipe, ctx.activation, ctx.reduce, ctx.weight_reduce = recipe, activation, reduce, weight_reduce
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = inputs.shape, inputs.dtype, up.dtype
        return output.view(*inputs.shape[:-1], output.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Fp8Recipe = ctx.recipe
        needs_inputs, needs_up, needs_down = ctx.needs_input_grad[:3]
        kept, kept_scale, gate_up, product_amax, *weights = ctx.saved_tensors
        options: dict[str, Any] = {"fast_accumulation": recipe.fast_accumulation_backward}
        outer = quantize(
            gradients[0].flatten(0, -2), recipe.backward, recipe.inputs, columns=needs_down, reduce=ctx.reduce,
            margin=recipe.margin,
        )  # fmt: skip
        assert outer.rows is not None
        down_columns = backward_cast(tuple(weights[3:]), recipe, ctx.weight_reduce)
        product_gradient = scaled_matmul(outer.rows, down_columns, ctx.input_dtype, **options)
        inner, product, _ = quantize_backward(
            Source("gated_backward", (gate_up, product_gradient), ctx.activation), recipe,
            product_amax if needs_down else None, rows=needs_inputs, columns=needs_up, reduce=ctx.reduce,
        )  # fmt: skip
        del product_gradient
        input_gradient = up_gradient = down_gradient = None
        if outer.columns is not None and product is not None:
            down_gradient = scaled_matmul(outer.columns, product, ctx.weight_dtype, **options)
        if inner.columns is not None:
            hidden = Quantized(kept, kept_scale, recipe.inputs)
            up_gradient = scaled_matmul(inner.columns, hidden, ctx.weight_dtype, **options)
        if inner.rows is not None:
            up_columns = backward_cast(tuple(weights[:3]), recipe, ctx.weight_reduce)
            input_gradient = scaled_matmul(inner.rows, up_columns, ctx.input_dtype, **options).view(ctx.input_shape)
        return input_gradient, up_gradient, down_gradient, *(None,) * (len(ctx.needs_input_grad) - 3)


def can_fuse_gated_mlp(recipe: Fp8Recipe, width: int, activation: str) -> bool:
    """Return True if `fp8_gated_mlp` fuses an MLP of this width between the projections."""
    return recipe.wgrad and activation in FUSED_ACTIVATIONS and (recipe.scaling != "blockwise" or width % TILE == 0)


def fp8_gated_mlp(
    inputs: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
    recipe: Fp8Recipe,
    *,
    up_cast: WeightCast | None = None,
    down_cast: WeightCast | None = None,
    reduce: Reduce | None = None,
    weight_reduce: Reduce | None = None,
    source: Source | None = None,
) -> Tensor:
    """Return `F.linear(gated_activation(F.linear(inputs, up), activation), down)` with all products in fp8.

    Where it is not fused (`can_fuse_gated_mlp`), it runs as two `fp8_linear` with the activation between them.

    Args:
        inputs: (..., h); under autocast, cast to its dtype.
        up: (2 f, h) with the rows [gate | up]; h and f multiples of 16.
        down: (n, f).
        activation: a name in `activations.NONLINEARITIES`.
        recipe: formats and scaling.
        up_cast: as `cast` of `fp8_linear`.
        down_cast: likewise.
        reduce: as in `fp8_linear`, for the scales of all activations and gradients.
        weight_reduce: likewise of both weights.
        source: as in `fp8_linear`.

    Returns:
        (..., n) in the dtype of `inputs`, differentiable once.

    Raises:
        ValueError: shapes do not match, or a width is no multiple of 16.
    """
    check_weight("up", up, inputs.shape[-1])
    check_weight("down", down, up.shape[0] // 2)
    inputs = inputs.to(autocast_dtype(inputs))
    hooks: dict[str, Any] = {"reduce": reduce, "weight_reduce": weight_reduce}
    if not can_fuse_gated_mlp(recipe, down.shape[1], activation):
        gate_up = fp8_linear(inputs, up, None, recipe, cast=up_cast, source=source, **hooks)
        return fp8_linear(gated_activation(gate_up, activation), down, None, recipe, cast=down_cast, **hooks)
    producer, kind, *tensors = source_arguments(source)
    casts = *cast_tensors(up_cast), *cast_tensors(down_cast)
    options = recipe, activation, reduce, weight_reduce, producer, kind
    output = _Fp8GatedMLP.apply(inputs, up, down, *options, *casts, *tensors)
    assert isinstance(output, Tensor)
    return output
