"""Expert MLPs in fp8: both projections of all experts, their gradients and those of the rows by grouped fp8 matmuls.

As `moe.fused_experts` with rows that are gathered first. Saved are the rows in fp8, transposed, and the result of the
first projection. One scale is shared by all rows of a tensor, and by all experts of a stack of weights where its rows
are side by side (rowwise scales of the transpose).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activations import NONLINEARITIES
from ..moe.assignments import Assignments
from ..moe.permute import activation_backward, combine_rows, gather_rows, use_triton
from .grouped import aligned_assignments, grouped_scaled_matmul, grouped_scaled_outer
from .operands import Quantized, Source
from .quantize import Reduce, quantize
from .recipe import TILE, Fp8Recipe
from .reference import slope
from .weight_cast import WeightCast, backward_cast, cast_tensors, forward_cast


@torch.library.custom_op("stoker::fp8_expert_gradients", mutates_args=())
def _expert_gradients(
    projected: Tensor, inner_gradient: Tensor, order: Tensor, gates: Tensor, gated: bool, nonlinearity: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `moe.permute.activation_backward`."""
    if use_triton(projected):
        return activation_backward(projected, inner_gradient, order, gates, gated=gated, nonlinearity=nonlinearity)
    used = order >= 0
    assignment = order.clamp(min=0).long()
    gate = torch.where(used, gates.flatten()[assignment], 0)[:, None].to(projected.dtype)
    first, *up = projected.chunk(2, dim=1) if gated else (projected,)
    active, derivative = NONLINEARITIES[nonlinearity](first), slope(first, nonlinearity)
    inner = active * up[0] if gated else active
    parts = [inner_gradient * derivative * up[0], inner_gradient * active] if gated else [inner_gradient * derivative]
    dots = torch.where(used, (inner_gradient * inner).sum(1), 0)
    gate_gradient = torch.zeros_like(gates.flatten(), dtype=dots.dtype).scatter_add(0, assignment, dots)
    return gate * torch.cat(parts, 1), gate * inner, gate_gradient.view(gates.shape)


@_expert_gradients.register_fake
def _(
    projected: Tensor, inner_gradient: Tensor, order: Tensor, gates: Tensor, gated: bool, nonlinearity: str
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if projected.dtype == torch.float64 else torch.float32
    return torch.empty_like(projected), torch.empty_like(inner_gradient), torch.empty_like(gates, dtype=dtype)


class _Fp8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor, order: Tensor, ends: Tensor, places: Tensor,
        recipe: Fp8Recipe, nonlinearity: str, gated: bool, reduce: Reduce | None, weight_reduce: Reduce | None,
        *casts: Tensor | None,
    ) -> Tensor:  # fmt: skip
        _, _, needs_up, _ = ctx.needs_input_grad[:4]
        options: dict[str, Any] = {"fast_accumulation": recipe.fast_accumulation_forward}
        rows = quantize(
            gather_rows(hidden, order, places), recipe.forward, recipe.inputs, columns=needs_up, reduce=reduce,
            **recipe.options,
        )  # fmt: skip
        up_rows, kept_up = forward_cast(up.flatten(0, 1), casts[:4], recipe, weight_reduce)  # type: ignore[arg-type]
        down_rows, kept_down = forward_cast(down.flatten(0, 1), casts[4:], recipe, weight_reduce)  # type: ignore[arg-type]
        assert rows.rows is not None
        projected = grouped_scaled_matmul(rows.rows, up_rows, ends, up.shape[1], hidden.dtype, **options)
        source = Source("gated", (projected,), nonlinearity) if gated else NONLINEARITIES[nonlinearity](projected)
        inner = quantize(source, recipe.forward, recipe.inputs, columns=False, reduce=reduce, **recipe.options).rows
        assert inner is not None
        result = grouped_scaled_matmul(inner, down_rows, ends, down.shape[1], hidden.dtype, **options)
        kept = rows.columns[:2] if rows.columns is not None else (None, None)
        ctx.save_for_backward(*kept, projected, gates, order, ends, places, *kept_up, *kept_down)
        ctx.recipe, ctx.reduce, ctx.weight_reduce = recipe, reduce, weight_reduce
        ctx.nonlinearity, ctx.gated, ctx.width, ctx.dtype = nonlinearity, gated, down.shape[2], up.dtype
        return combine_rows(result, gates, places, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        recipe: Fp8Recipe = ctx.recipe
        needs_hidden, needs_gates, needs_up, needs_down = ctx.needs_input_grad[:4]
        kept, kept_scale, projected, gates, order, ends, places, *weights = ctx.saved_tensors
        casts: dict[str, Any] = {"reduce": ctx.reduce, **recipe.options}
        options: dict[str, Any] = {"fast_accumulation": recipe.fast_accumulation_backward}
        outer = gather_rows(gradients[0], order, places)
        hidden_size = outer.shape[1]
        outer = quantize(outer, recipe.backward, recipe.inputs, columns=needs_down, **casts)
        assert outer.rows is not None
        down_columns = backward_cast(tuple(weights[3:]), recipe, ctx.weight_reduce)
        inner_gradient = grouped_scaled_matmul(outer.rows, down_columns, ends, ctx.width, projected.dtype, **options)
        inner, weighted, gate_gradient = _expert_gradients(
            projected, inner_gradient, order, gates, ctx.gated, ctx.nonlinearity
        )
        del inner_gradient
        hidden_gradient = up_gradient = down_gradient = None
        if outer.columns is not None:
            product = quantize(weighted, recipe.forward, recipe.inputs, rows=False, **casts).columns
            assert product is not None
            down_gradient = grouped_scaled_outer(outer.columns, product, ends, ctx.dtype, **options)
        cast = quantize(inner, recipe.backward, recipe.inputs, rows=needs_hidden, columns=needs_up, **casts)
        if cast.columns is not None:
            rows = Quantized(kept, kept_scale, recipe.inputs)
            up_gradient = grouped_scaled_outer(cast.columns, rows, ends, ctx.dtype, **options)
        if cast.rows is not None:
            up_columns = backward_cast(tuple(weights[:3]), recipe, ctx.weight_reduce)
            row_gradient = grouped_scaled_matmul(cast.rows, up_columns, ends, hidden_size, projected.dtype, **options)
            hidden_gradient = combine_rows(row_gradient, None, places, order)
        gate_gradient = gate_gradient.to(gates.dtype) if needs_gates else None
        return hidden_gradient, gate_gradient, up_gradient, down_gradient, *(None,) * 16


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
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    aligned = aligned_assignments(assignments, recipe.inputs)
    casts = *cast_tensors(up_cast), *cast_tensors(down_cast)
    output = _Fp8Experts.apply(
        hidden, gates, up, down, *aligned, recipe, nonlinearity, gated, reduce, weight_reduce, *casts
    )
    assert isinstance(output, Tensor)
    return output
