"""The experts on a GPU as one operation: grouped matmuls with gather and activation inside, little kept for backward.

Forward: rows of `hidden` are read through the order of the assignments, never copied; the first matmul writes what it
gave, which is kept, and the activated rows, which are not; the second gives a row for each assignment; a token's rows
are summed. Backward: the gradient of the output is read through the same order, the activated rows are computed again,
and the gradient of a gate is the dot product of its activated row with its row's gradient in front of the second
matrix, so that the second matmul's result is not needed. After SonicMoE (arXiv 2512.14080).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .assignments import Assignments
from .grouped_matmul import Backend, resolved, row_tiles, torch_grouped_mm, triton_outer, triton_rows
from .permute import activation_backward, triton_combine, triton_gather
from .reference_experts import activated
from .tile_map import Tiles


@dataclass(frozen=True)
class _Rows:
    """The rows of a call and how their matmuls are computed."""

    order: Tensor
    ends: Tensor
    topk: int
    by_torch: bool
    dtype: torch.dtype
    widths: tuple[int, ...]

    @cached_property
    def tiles(self) -> Tiles:
        """Of our kernels."""
        return row_tiles(self.ends, len(self.order), self.dtype, *self.widths)

    def read(self, tokens: Tensor) -> Tensor:
        """(T, K) as `times` and `outer` take it: torch's matmuls read it row by row, ours by token."""
        return triton_gather(tokens, self.order, self.topk) if self.by_torch else tokens

    def times(self, read: Tensor, matrices: Tensor, bias: Tensor | None = None) -> Tensor:
        """What `read` gave times (E, K, N)."""
        if self.by_torch:
            return self.sorted_times(read, matrices, bias)
        more: Any = {"order": self.order, "topk": self.topk, "bias": bias}
        return triton_rows(read, matrices, self.ends, self.tiles, **more)[0]

    def sorted_times(self, rows: Tensor, matrices: Tensor, bias: Tensor | None = None) -> Tensor:
        """Sorted rows (R, K) times (E, K, N)."""
        if not self.by_torch:
            return triton_rows(rows, matrices, self.ends, self.tiles, bias=bias)[0]
        out = torch_grouped_mm(rows, matrices, offs=self.ends)
        return out if bias is None else out + bias[self.experts()]

    def experts(self) -> Tensor:
        """The expert of each row; the last one for empty rows."""
        rows = torch.arange(len(self.order), device=self.order.device, dtype=torch.int32)
        return torch.searchsorted(self.ends, rows, right=True).clamp(max=len(self.ends) - 1)

    def outer(self, left: Tensor, right: Tensor, gather: str = "") -> Tensor:
        """Sum over the rows of each expert of left^T right; `gather` names the operand that `read` gave."""
        if self.by_torch:
            return torch_grouped_mm(left.t(), right, offs=self.ends).contiguous()
        more: Any = {"order": self.order, "topk": self.topk, "gather": gather}
        return triton_outer(left, right, self.ends, self.tiles, **more)


def _rows(order: Tensor, ends: Tensor, topk: int, up: Tensor, down: Tensor, backend: str) -> _Rows:
    by_torch = resolved(backend, down, *up.shape[1:], down.shape[2]) == "torch"
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
    onto: Tensor | None,
) -> tuple[Tensor, Tensor]:
    hidden = hidden.contiguous()
    rows = _rows(order, ends, places.shape[1], up, down, backend)
    if rows.by_torch:
        projected = rows.times(rows.read(hidden), up.transpose(1, 2), up_bias)
        inner = activated(projected, nonlinearity, gated, None)
    else:
        projected, inner = triton_rows(
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
    result = rows.sorted_times(inner, down.transpose(1, 2), down_bias)
    return triton_combine(result, gates, places, onto), projected


@_experts.register_fake
def _(
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
    onto: Tensor | None,
) -> tuple[Tensor, Tensor]:
    output = (hidden if onto is None else onto).new_empty(hidden.shape)
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
    frozen: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of hidden, gates, up, down, up_bias, down_bias; empty where there is no bias.

    With `frozen` all but the first two are empty.
    """
    hidden, gradient = hidden.contiguous(), gradient.contiguous()
    rows = _rows(order, ends, places.shape[1], up, down, backend)
    read = rows.read(gradient)
    inner_gradient = rows.times(read, down)
    projected_gradient, weighted, gate_gradient = activation_backward(
        projected, inner_gradient, order, gates, gated=gated, nonlinearity=nonlinearity
    )
    del inner_gradient
    down_gradient = gradient.new_empty(0) if frozen else rows.outer(read, weighted, gather="left")
    del read, weighted
    down_bias_gradient = gradient.new_empty(0)
    if down_bias is not None:
        # by token instead of by row: a token has an expert once at most
        by_expert = gradient.float() @ down_bias.float().t()
        gate_gradient += torch.where(places >= 0, by_expert.gather(1, experts), 0)
        if not frozen:
            shares = torch.where(places >= 0, gates.float(), 0)
            of_expert = torch.zeros(len(gradient), len(ends), device=gradient.device).scatter(1, experts, shares)
            down_bias_gradient = (of_expert.t() @ gradient.float()).to(down_bias.dtype)
    up_gradient = gradient.new_empty(0) if frozen else rows.outer(projected_gradient, rows.read(hidden), gather="right")
    up_bias_gradient = gradient.new_empty(0)
    if up_bias is not None and not frozen:  # a sum over rows is a product with ones
        ones = projected_gradient.new_ones(1, 16).expand(len(order), 16)
        up_bias_gradient = triton_outer(projected_gradient, ones, ends, rows.tiles)[:, :, 0].contiguous()
    row_gradient = rows.sorted_times(projected_gradient, up)
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
    frozen: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    none = gradient.new_empty(0)
    if frozen:
        of_hidden, of_gates = (x.new_empty(x.shape) for x in (hidden, gates))
        return of_hidden, of_gates, *(gradient.new_empty(0) for _ in range(4))  # type: ignore[return-value]
    first, second = (none.new_empty(0 if bias is None else bias.shape) for bias in (up_bias, down_bias))
    dense = [x.new_empty(x.shape) for x in (hidden, gates, up, down)]
    return dense[0], dense[1], dense[2], dense[3], first, second


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, gates, up, down, up_bias, down_bias, experts, order, ends, places, *ctx.how, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], hidden, gates, up, down, up_bias, down_bias, experts, order, ends, places)


def _backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 14
    saved = ctx.saved_tensors  # once: a checkpoint unpacks each of them a single time
    frozen = not any(ctx.needs_input_grad[2:6])
    gradients = _experts_backward(gradient.to(saved[0].dtype), *saved, *ctx.how, frozen)
    present = (x if needed else None for x, needed in zip(gradients, ctx.needs_input_grad[:6], strict=True))
    return *present, *(None,) * 7, gradient if ctx.needs_input_grad[13] else None


_experts.register_autograd(_backward, setup_context=_save)


def fused_experts(
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    assignments: Assignments,
    *,
    nonlinearity: str,
    gated: bool,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    backend: Backend,
    onto: Tensor | None,
) -> Tensor:
    """`expert_mlp` without dropout where Triton runs, its matmuls by a `backend` of `grouped_matmul` but `loop`."""
    order, ends, places = assignments
    return _experts(
        hidden, gates, up, down, up_bias, down_bias, experts, order, ends, places, nonlinearity, gated, backend, onto
    )[0]
