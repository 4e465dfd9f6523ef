"""Fused expert MLPs on a GPU: grouped matmuls with fused gather and activation, and a small saved state.

Forward: the first grouped matmul gathers rows of `hidden` while loading, without a copy, and writes its result, which
is saved, and the activated rows, which are not; the second one computes a row per assignment; the rows of a token are
combined. Backward: the output gradient is gathered in the same way, the activated rows are recomputed, and the gradient
of a gate is the dot product of its activated row with the gradient of that row, so that the result of the second matmul
need not be saved. After SonicMoE (arXiv 2512.14080).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..custom_op import custom_op
from .assignments import Assignments
from .grouped_matmul import (
    Backend,
    resolve_backend,
    row_tiles,
    torch_grouped_mm,
    triton_grouped_matmul,
    triton_grouped_outer,
)
from .permute import activation_backward, triton_combine, triton_gather
from .reference_experts import ExpertWeights, apply_activation
from .tile_map import Tiles


@dataclass(frozen=True)
class _Rows:
    """Rows of a call and the backend of their matmuls; with `in_order` row r is token r."""

    order: Tensor
    ends: Tensor
    topk: int
    in_order: bool
    by_torch: bool
    dtype: torch.dtype
    widths: tuple[int, ...]

    @cached_property
    def tiles(self) -> Tiles:
        """Tiles of the Triton kernels."""
        return row_tiles(self.ends, len(self.order), self.dtype, *self.widths)

    def operand(self, tokens: Tensor) -> Tensor:
        """Return tokens (T, K) as an operand: gathered for torch's matmuls, unchanged for ours, which gather."""
        return triton_gather(tokens, self.order, self.topk) if self.by_torch and not self.in_order else tokens

    def token_matmul(self, operand: Tensor, matrices: Tensor) -> Tensor:
        """Multiply the rows of an `operand` by the matrices (E, K, N) of their experts."""
        if self.by_torch or self.in_order:
            return self.row_matmul(operand, matrices)
        options: Any = {"order": self.order, "topk": self.topk}
        return triton_grouped_matmul(operand, matrices, self.ends, self.tiles, **options)[0]

    def row_matmul(self, rows: Tensor, matrices: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply sorted rows (R, K) by the matrices (E, K, N) of their experts, and add their biases (E, N)."""
        if self.by_torch and bias is None:  # torch's matmul adds no bias, and afterwards its result is rounded
            return torch_grouped_mm(rows, matrices, offs=self.ends)
        return triton_grouped_matmul(rows, matrices, self.ends, self.tiles, bias=bias)[0]

    def outer(self, left: Tensor, right: Tensor, gather: str = "") -> Tensor:
        """Sum left^T right over the rows of each expert; `gather` says which of both comes from `operand`."""
        if self.by_torch:
            return torch_grouped_mm(left.t(), right, offs=self.ends).contiguous()
        options: Any = {} if self.in_order else {"order": self.order, "topk": self.topk, "gather": gather}
        return triton_grouped_outer(left, right, self.ends, self.tiles, **options)


def _make_rows(order: Tensor, ends: Tensor, places: Tensor, up: Tensor, down: Tensor, backend: str) -> _Rows:
    by_torch = resolve_backend(backend, down, *up.shape[1:], down.shape[2]) == "torch"
    in_order = not len(order)
    order = places.flatten() if in_order else order
    return _Rows(order, ends, places.shape[1], in_order, by_torch, down.dtype, tuple(down.shape[1:]))


@custom_op("stoker::moe_experts")
def _experts(
    hidden: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    experts: Tensor,
    order: Tensor,
    ends: Tensor,
    places: Tensor,
    nonlinearity: str,
    gated: bool,
    backend: str,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output (T, h) and the result of the first projection, which is saved for the backward."""
    if not len(hidden):
        return hidden.new_empty(hidden.shape, dtype=(hidden if residual is None else residual).dtype), hidden.new_empty(
            0, up.shape[1]
        )
    hidden = hidden.contiguous()
    rows = _make_rows(order, ends, places, up, down, backend)
    if rows.by_torch and up_bias is None:
        projected = rows.token_matmul(rows.operand(hidden), up.transpose(1, 2))
        inner = apply_activation(projected, nonlinearity, gated, None)
    else:
        projected, inner = triton_grouped_matmul(
            hidden,
            up.transpose(1, 2),
            ends,
            rows.tiles,
            order=None if rows.in_order else order,
            topk=rows.topk,
            bias=up_bias,
            activation=nonlinearity,
            gated=gated,
        )
        assert inner is not None
    result = rows.row_matmul(inner, down.transpose(1, 2), down_bias)
    return triton_combine(result, gates, places, residual), projected


@torch.library.register_fake("stoker::moe_experts")
def _(
    hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    experts: Tensor, order: Tensor, ends: Tensor, places: Tensor, *others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    residual: Tensor | None = others[-1]
    output = (hidden if residual is None else residual).new_empty(hidden.shape)
    return output, hidden.new_empty(places.numel(), up.shape[1])


@custom_op("stoker::moe_experts_backward")
def _experts_backward(
    gradient: Tensor,
    projected: Tensor,
    hidden: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    experts: Tensor,
    order: Tensor,
    ends: Tensor,
    places: Tensor,
    nonlinearity: str,
    gated: bool,
    backend: str,
    frozen: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of hidden, gates, the result of the first projection, down and down_bias, if there is one.

    With `frozen` all but the first two are empty.
    """
    if not len(hidden):
        down_gradient, down_bias_gradient = (
            gradient.new_empty(0) if frozen or weight is None else torch.zeros_like(weight)
            for weight in (down, down_bias)
        )
        projected_gradient = gradient.new_empty(0) if frozen else projected.clone()
        return hidden.clone(), gates.clone(), projected_gradient, down_gradient, down_bias_gradient
    gradient = gradient.contiguous()
    rows = _make_rows(order, ends, places, up, down, backend)
    operand = rows.operand(gradient)
    inner_gradient = rows.token_matmul(operand, down)
    projected_gradient, weighted, gate_gradient = activation_backward(
        projected, inner_gradient, rows.order, gates, gated=gated, nonlinearity=nonlinearity
    )
    del inner_gradient
    down_gradient = gradient.new_empty(0) if frozen else rows.outer(operand, weighted, gather="left")
    del operand, weighted
    down_bias_gradient = gradient.new_empty(0)
    if down_bias is not None:
        # per token and expert (T, E) instead of per row, as a token has each expert at most once; dropped ones in E + 1
        by_expert = gradient.float() @ down_bias.float().t()
        gate_gradient += torch.where(places >= 0, by_expert.gather(1, experts), 0)
        if not frozen:
            dense_gates = torch.zeros(len(gradient), len(ends) + 1, device=gradient.device)
            dense_gates = dense_gates.scatter(1, torch.where(places >= 0, experts, len(ends)), gates.float())[:, :-1]
            down_bias_gradient = (dense_gates.t() @ gradient.float()).to(down_bias.dtype)
    hidden_gradient = rows.row_matmul(projected_gradient, up)
    if not rows.in_order:
        hidden_gradient = triton_combine(hidden_gradient, None, places)
    if frozen:
        projected_gradient = gradient.new_empty(0)
    return hidden_gradient, gate_gradient.to(gates.dtype), projected_gradient, down_gradient, down_bias_gradient


@torch.library.register_fake("stoker::moe_experts_backward")
def _(
    gradient: Tensor, projected: Tensor, hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor,
    up_bias: Tensor | None, down_bias: Tensor | None, *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    frozen: bool = others[-1]
    present = (projected, down, down_bias)
    found = (gradient.new_empty(0 if frozen or each is None else each.shape) for each in present)
    return hidden.new_empty(hidden.shape), gates.new_empty(gates.shape), *found  # pyrefly: ignore[bad-return]


@custom_op("stoker::moe_experts_up_gradients")
def _up_gradients(
    projected_gradient: Tensor,
    hidden: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    order: Tensor,
    ends: Tensor,
    places: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return gradients of up and up_bias; empty for an absent bias."""
    if not len(hidden):
        return torch.zeros_like(up), hidden.new_zeros(0 if up_bias is None else up_bias.shape)
    rows = _make_rows(order, ends, places, up, down, backend)
    up_gradient = rows.outer(projected_gradient, rows.operand(hidden.contiguous()), gather="right")
    if up_bias is None:
        return up_gradient, hidden.new_empty(0)
    # the sum over rows as a product with ones
    ones = projected_gradient.new_ones(1, 16).expand(len(projected_gradient), 16)
    up_bias_gradient = triton_grouped_outer(projected_gradient, ones, ends, rows.tiles)[:, :, 0].contiguous()
    return up_gradient, up_bias_gradient


@torch.library.register_fake("stoker::moe_experts_up_gradients")
def _(
    projected_gradient: Tensor, hidden: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(up.shape), hidden.new_empty(0 if up_bias is None else up_bias.shape)


class SavedExperts(NamedTuple):
    """Tensors that the backward of fused experts reads, and what else it depends on.

    Attributes:
        tensors: result of the first projection, hidden, gates, up, down, up_bias, down_bias, experts, order, ends and
            places.
        nonlinearity: as in `expert_mlp`.
        gated: likewise.
        backend: see `grouped_matmul`.
        frozen: no weight or bias requires a gradient.
    """

    tensors: tuple[Any, ...]
    nonlinearity: str
    gated: bool
    backend: str
    frozen: bool

    def gradients(
        self, gradient: Tensor, meanwhile: Callable[[Tensor, Tensor], tuple[Tensor | None, ...]] | None = None
    ) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden, gates, up, down, up_bias and down_bias; None for those frozen or absent.

        Args:
            gradient: of the output, (T, h).
            meanwhile: called with the first two as soon as they are known, to start what runs beside the last matmul;
                returns what to return in their place.
        """
        projected, hidden, _, up, down, up_bias, down_bias, _, order, ends, places = self.tensors
        hidden_gradient, gate_gradient, projected_gradient, down_gradient, down_bias_gradient = _experts_backward(
            gradient.to(projected.dtype), *self.tensors, *self[1:]
        )
        first: tuple[Tensor | None, ...] = hidden_gradient, gate_gradient
        if meanwhile is not None:
            first = meanwhile(hidden_gradient, gate_gradient)
        if self.frozen:
            return *first, None, None, None, None
        up_gradient, up_bias_gradient = _up_gradients(
            projected_gradient, hidden, up, down, up_bias, order, ends, places, self.backend
        )
        biases = None if up_bias is None else up_bias_gradient, None if down_bias is None else down_bias_gradient
        return *first, up_gradient, down_gradient, *biases


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, gates, up, down, up_bias, down_bias, experts, order, ends, places, *ctx.options, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], hidden, gates, up, down, up_bias, down_bias, experts, order, ends, places)


def _backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 14
    # accessed once: activation checkpointing allows unpacking only once
    nonlinearity, gated, backend = ctx.options
    saved = SavedExperts(ctx.saved_tensors, nonlinearity, gated, backend, not any(ctx.needs_input_grad[2:6]))
    gradients = saved.gradients(gradient)
    present = (x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad[:6], strict=True))
    return *present, *(None,) * 7, gradient if ctx.needs_input_grad[13] else None


torch.library.register_autograd("stoker::moe_experts", _backward, setup_context=_save)


def fused_experts(
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
    weights: ExpertWeights,
    assignments: Assignments,
    *,
    backend: Backend,
    residual: Tensor | None,
) -> Tensor:
    """`expert_mlp` without dropout, where Triton runs, with any `backend` of `grouped_matmul` but `loop`."""
    return fused_experts_and_saved(hidden, experts, gates, weights, assignments, backend=backend, residual=residual)[0]


def fused_experts_and_saved(
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
    weights: ExpertWeights,
    assignments: Assignments,
    *,
    backend: Backend,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output of `fused_experts`, and the result of the first projection for `SavedExperts`."""
    *matrices, nonlinearity, gated = weights
    return _experts(hidden, gates, *matrices, experts, *assignments, nonlinearity, gated, backend, residual)
