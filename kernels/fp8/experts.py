"""Expert MLPs in fp8: both projections of all experts, their gradients and those of the rows by grouped fp8 matmuls.

As `moe.fused_experts`, with rows that are cast as they are gathered. Saved are the rows in fp8, transposed, and the
result of the first projection. One scale is shared by all rows of a tensor, and by all experts of a stack of weights
where its rows are side by side (rowwise scales of the transpose). Tensorwise, two operands are exceptions, which would
otherwise be read twice as they are the largest: the input of the second projection has a scale for each row, and the
gradient of its activation in e5m2, whose range is wider, the scale of a bound (`row_cast.backward_amax`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autocast import autocast_dtype
from ..moe.assignments import Assignments
from ..moe.permute import combine_rows
from .expert_rows import aligned_assignments, expert_row_multiple
from .grouped import grouped_scaled_matmul, grouped_scaled_outer
from .operands import Producer, Quantized, Source
from .quantize import BackwardCasts, Reduce, amaxes, quantize, quantize_backward, reduce_amax
from .recipe import TILE, Fp8Recipe
from .row_cast import backward_amax, cast_activated
from .weight_cast import WeightCast, backward_cast, cast_tensors, forward_cast


class _Fp8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor, order: Tensor, ends: Tensor, places: Tensor,
        multiple: int, recipe: Fp8Recipe, nonlinearity: str, gated: bool, reduce: Reduce | None,
        weight_reduce: Reduce | None, *casts: Any,
    ) -> Tensor:  # fmt: skip
        _, _, needs_up, _ = ctx.needs_input_grad[:4]
        options: dict[str, Any] = {"fast_accumulation": True, "multiple": multiple}
        rows = quantize(
            Source("gather", (hidden, order, places)), recipe.forward, recipe.inputs, columns=needs_up, reduce=reduce,
            margin=recipe.margin,
        )  # fmt: skip
        up_rows, kept_up = forward_cast(up.flatten(0, 1), casts[:4], recipe, weight_reduce)
        down_rows, kept_down = forward_cast(down.flatten(0, 1), casts[4:], recipe, weight_reduce)
        assert rows.rows is not None
        projected, _ = grouped_scaled_matmul(rows.rows, up_rows, ends, up.shape[1], hidden.dtype, **options)
        found: tuple[Tensor | None, Tensor | None] = (None, None)
        if recipe.inputs == "tile":
            source = Source("gated" if gated else "activation", (projected,), nonlinearity)
            inner = quantize(source, recipe.forward, recipe.inputs, columns=False, margin=recipe.margin).rows
            assert inner is not None
        else:
            activated = cast_activated(projected, recipe, nonlinearity, gated=gated)
            inner = activated.rows
            if recipe.inputs == "tensor":
                found = activated.amax, activated.peaks
        result, _ = grouped_scaled_matmul(inner, down_rows, ends, down.shape[1], hidden.dtype, **options)
        kept = rows.columns[:2] if rows.columns is not None else (None, None)
        ctx.save_for_backward(*kept, projected, *found, gates, order, ends, places, *kept_up, *kept_down)
        ctx.recipe, ctx.reduce, ctx.weight_reduce, ctx.multiple = recipe, reduce, weight_reduce, multiple
        ctx.nonlinearity, ctx.gated, ctx.width, ctx.dtype = nonlinearity, gated, down.shape[2], up.dtype
        return combine_rows(result, gates, places, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Fp8Recipe = ctx.recipe
        _, needs_gates, _, needs_down = ctx.needs_input_grad[:4]
        saved = ctx.saved_tensors  # once: activation checkpointing allows unpacking only once
        (kept, kept_scale, projected, *found, gates, order, ends, places), weights = saved[:9], saved[9:]
        options: dict[str, Any] = {"fast_accumulation": recipe.fast_accumulation_backward, "multiple": ctx.multiple}
        outer = quantize(
            Source("gather", (gradients[0], order, places)), recipe.backward, recipe.inputs, columns=needs_down,
            reduce=ctx.reduce, margin=recipe.margin,
        )  # fmt: skip
        assert outer.rows is not None
        down_columns = backward_cast(tuple(weights[3:]), recipe, ctx.weight_reduce)
        inner_gradient, largest = grouped_scaled_matmul(
            outer.rows, down_columns, ends, ctx.width, projected.dtype, row_amax=recipe.inputs == "tensor", **options
        )
        inner, product, dots = _cast_backward(ctx, projected, inner_gradient, (largest, *found), order, gates)
        del inner_gradient, down_columns
        hidden_gradient = up_gradient = down_gradient = None
        if outer.columns is not None and product is not None:
            down_gradient = grouped_scaled_outer(outer.columns, product, ends, ctx.dtype, **options)
        del outer, product
        if inner.columns is not None:
            rows = Quantized(kept, kept_scale, recipe.inputs)
            up_gradient = grouped_scaled_outer(inner.columns, rows, ends, ctx.dtype, **options)
        if inner.rows is not None:
            up_columns = backward_cast(tuple(weights[:3]), recipe, ctx.weight_reduce)
            row_gradient, _ = grouped_scaled_matmul(
                inner.rows, up_columns, ends, gradients[0].shape[1], projected.dtype, **options
            )
            hidden_gradient = combine_rows(row_gradient, None, places, order)
        gate_gradient = torch.where(places >= 0, dots[places.clamp(min=0)], 0).to(gates.dtype) if needs_gates else None
        return hidden_gradient, gate_gradient, up_gradient, down_gradient, *(None,) * 17


def _cast_backward(
    ctx: Any, projected: Tensor, inner_gradient: Tensor, found: tuple[Tensor, Tensor, Tensor], order: Tensor,
    gates: Tensor,
) -> BackwardCasts:  # fmt: skip
    """Cast the backward of activation and gates; `found` is that of `backward_amax`, tensorwise."""
    recipe: Fp8Recipe = ctx.recipe
    needs_hidden, _, needs_up, needs_down = ctx.needs_input_grad[:4]
    kind: Producer = "gated" if ctx.gated else "activation"
    of_backward: Producer = "gated_backward" if ctx.gated else "activation_backward"
    source = Source(of_backward, (projected, inner_gradient, order, gates), ctx.nonlinearity)
    wanted: dict[str, Any] = {"rows": needs_hidden, "columns": needs_up}
    if recipe.inputs != "tensor":
        product = Source(kind, (projected, order, gates), ctx.nonlinearity)
        product_amax = amaxes(product, recipe.inputs, rows=False)[1] if needs_down else None
        return quantize_backward(source, recipe, product_amax, **wanted)
    amax = backward_amax(*found, order, gates)
    if recipe.backward != "e5m2":  # whose range has room for a bound
        amax = torch.cat((amaxes(source, "tensor", **wanted)[0], amax[1:]))
    amax = reduce_amax(amax, ctx.reduce)
    none = amax.new_empty(0)
    return quantize_backward(source, recipe, amax[1:] if needs_down else None, amax=(amax[:1], none), **wanted)


def fp8_experts(
    hidden: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    assignments: Assignments,
    *,
    nonlinearity: str,
    gated: bool,
    recipe: Fp8Recipe,
    up_cast: WeightCast | None = None,
    down_cast: WeightCast | None = None,
    reduce: Reduce | None = None,
    weight_reduce: Reduce | None = None,
) -> Tensor:
    """Return the sum over each token's kept experts e of gate * down_e(act(up_e(hidden))), with all products in fp8.

    Args:
        hidden: (T, h); under autocast, cast to its dtype.
        gates: weights of the experts of each token, (T, k).
        up: (E, f, h), or gated (E, 2 f, h) with the rows [gate | up]; widths multiples of 16, blockwise of 128.
        down: (E, h, f).
        assignments: from `sorted_assignments`.
        nonlinearity: a name in `activations.FUSED_ACTIVATIONS`.
        gated: multiply the activated gate by the up projection.
        recipe: formats and scaling; gradients of weights are always in fp8 (`wgrad`).
        up_cast: casts of `up.flatten(0, 1)` from `cast_weight`; None casts in each forward and backward.
        down_cast: likewise of `down.flatten(0, 1)`.
        reduce: as in `fp8_linear`.
        weight_reduce: likewise.

    Returns:
        (T, h), differentiable once in `hidden`, `gates`, `up` and `down`.

    Raises:
        ValueError: a width is no multiple of 16, or blockwise of 128; or `recipe.wgrad` is False.
    """
    multiple = TILE if recipe.scaling == "blockwise" else 16
    for name, stack in (("up", up), ("down", down)):
        if stack.shape[1] % multiple or stack.shape[2] % multiple:
            raise ValueError(
                f"`{name}` {tuple(stack.shape)} must have multiples of {multiple} rows and columns for fp8 with "
                f"{recipe.scaling} scaling."
            )
    if not recipe.wgrad:
        raise ValueError("`recipe.wgrad` (False) must be True for experts, whose gradients are grouped fp8 matmuls.")
    hidden = hidden.to(autocast_dtype(hidden))
    rows = assignments.order.shape[0]
    row_multiple = expert_row_multiple(recipe.inputs, rows, up.shape[0])
    aligned = aligned_assignments(assignments, row_multiple)
    casts = *cast_tensors(up_cast), *cast_tensors(down_cast)
    output = _Fp8Experts.apply(
        hidden, gates, up, down, *aligned, row_multiple, recipe, nonlinearity, gated, reduce, weight_reduce, *casts
    )
    assert isinstance(output, Tensor)
    return output
