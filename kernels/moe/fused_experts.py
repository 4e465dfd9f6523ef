"""Fused expert MLPs on a GPU: grouped matmuls with fused gather and activation, and a small saved state.

Forward: the first grouped matmul gathers rows of `hidden` while loading, without a copy, and writes its result, which
is saved, and the activated rows, which are not; the second one computes a row per assignment; the rows of a token are
combined. Backward: the output gradient is gathered in the same way, the activated rows are recomputed, and the gradient
of a gate is the dot product of its activated row with the gradient of that row, so that the result of the second matmul
need not be saved. After SonicMoE (arXiv 2512.14080).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

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
    """Rows of a call and the backend of their matmuls."""

    order: Tensor
    ends: Tensor
    topk: int
    by_torch: bool
    dtype: torch.dtype
    widths: tuple[int, ...]

    @cached_property
    def tiles(self) -> Tiles:
        """Tiles of the Triton kernels."""
        return row_tiles(self.ends, len(self.order), self.dtype, *self.widths)

    def operand(self, tokens: Tensor) -> Tensor:
        """Return tokens (T, K) as an operand: gathered for torch's matmuls, unchanged for ours, which gather."""
        return triton_gather(tokens, self.order, self.topk) if self.by_torch else tokens

    def token_matmul(self, operand: Tensor, matrices: Tensor) -> Tensor:
        """Multiply the rows of an `operand` by the matrices (E, K, N) of their experts."""
        if self.by_torch:
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
        options: Any = {"order": self.order, "topk": self.topk, "gather": gather}
        return triton_grouped_outer(left, right, self.ends, self.tiles, **options)


def _make_rows(order: Tensor, ends: Tensor, topk: int, up: Tensor, down: Tensor, backend: str) -> _Rows:
    by_torch = resolve_backend(backend, down, *up.shape[1:], down.shape[2]) == "torch"
    return _Rows(order, ends, topk, by_torch, down.dtype, tuple(down.shape[1:]))


@torch.library.custom_op("stoker::moe_experts", mutates_args=())
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
    rows = _make_rows(order, ends, places.shape[1], up, down, backend)
    if rows.by_torch and up_bias is None:
        projected = rows.token_matmul(rows.operand(hidden), up.transpose(1, 2))
        inner = apply_activation(projected, nonlinearity, gated, None)
    else:
        projected, inner = triton_grouped_matmul(
            hidden,
            up.transpose(1, 2),
            ends,
            rows.tiles,
            order=order,
            topk=rows.topk,
            bias=up_bias,
            activation=nonlinearity,
            gated=gated,
        )
        assert inner is not None
    result = rows.row_matmul(inner, down.transpose(1, 2), down_bias)
    return triton_combine(result, gates, places, residual), projected


@_experts.register_fake
def _(
    hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    experts: Tensor, order: Tensor, *others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    residual: Tensor | None = others[-1]
    output = (hidden if residual is None else residual).new_empty(hidden.shape)
    return output, hidden.new_empty(order.shape[0], up.shape[1])


@torch.library.custom_op("stoker::moe_experts_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of hidden, gates, up, down, up_bias and down_bias; empty for an absent bias.

    With `frozen` all but the first two are empty.
    """
    if not len(hidden):
        weights = (up, down, up_bias, down_bias)
        d_up, d_down, d_up_bias, d_down_bias = (
            gradient.new_empty(0) if frozen or weight is None else torch.zeros_like(weight) for weight in weights
        )
        return hidden.clone(), gates.clone(), d_up, d_down, d_up_bias, d_down_bias
    hidden, gradient = hidden.contiguous(), gradient.contiguous()
    rows = _make_rows(order, ends, places.shape[1], up, down, backend)
    operand = rows.operand(gradient)
    inner_gradient = rows.token_matmul(operand, down)
    projected_gradient, weighted, gate_gradient = activation_backward(
        projected, inner_gradient, order, gates, gated=gated, nonlinearity=nonlinearity
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
    up_gradient = gradient.new_empty(0)
    if not frozen:
        up_gradient = rows.outer(projected_gradient, rows.operand(hidden), gather="right")
    up_bias_gradient = gradient.new_empty(0)
    if up_bias is not None and not frozen:  # the sum over rows as a product with ones
        ones = projected_gradient.new_ones(1, 16).expand(len(order), 16)
        up_bias_gradient = triton_grouped_outer(projected_gradient, ones, ends, rows.tiles)[:, :, 0].contiguous()
    row_gradient = rows.row_matmul(projected_gradient, up)
    hidden_gradient = triton_combine(row_gradient, None, places)
    return (
        hidden_gradient,
        gate_gradient.to(gates.dtype),
        up_gradient,
        down_gradient,
        up_bias_gradient,
        down_bias_gradient,
    )


@_experts_backward.register_fake
def _(
    gradient: Tensor, projected: Tensor, hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor,
    up_bias: Tensor | None, down_bias: Tensor | None, *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    frozen: bool = others[-1]
    hidden_gradient, gate_gradient = (x.new_empty(x.shape) for x in (hidden, gates))
    if frozen:
        return hidden_gradient, gate_gradient, *(gradient.new_empty(0) for _ in range(4))  # type: ignore[return-value]
    up_gradient, down_gradient = (x.new_empty(x.shape) for x in (up, down))
    biases = (gradient.new_empty(0 if bias is None else bias.shape) for bias in (up_bias, down_bias))
    return hidden_gradient, gate_gradient, up_gradient, down_gradient, *biases  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, gates, up, down, up_bias, down_bias, experts, order, ends, places, *ctx.options, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], hidden, gates, up, down, up_bias, down_bias, experts, order, ends, places)


def _backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 14
    saved = ctx.saved_tensors  # accessed once: activation checkpointing allows unpacking only once
    frozen = not any(ctx.needs_input_grad[2:6])
    gradients = _experts_backward(gradient.to(saved[0].dtype), *saved, *ctx.options, frozen)
    present = (x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad[:6], strict=True))
    return *present, *(None,) * 7, gradient if ctx.needs_input_grad[13] else None


_experts.register_autograd(_backward, setup_context=_save)


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
    *matrices, nonlinearity, gated = weights
    return _experts(hidden, gates, *matrices, experts, *assignments, nonlinearity, gated, backend, residual)[0]
