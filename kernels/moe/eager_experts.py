"""The experts from parts that autograd and a compiler see: grouped or batched matmuls between gather and combine.

Serves every device, dtype and dropout; keeps what autograd keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .assignments import Assignments, padded_assignments
from .grouped_matmul import Backend, grouped_matmul
from .permute import combine_rows, gather_rows
from .reference_experts import activated


def _noise_of_rows(noise: Tensor | None, order: Tensor) -> Tensor | None:
    """Dropout factors (T, k, f) in the order of the rows."""
    return None if noise is None else noise.flatten(0, 1)[order.clamp(min=0)]


def written_out_experts(
    hidden: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    assignments: Assignments,
    *,
    nonlinearity: str,
    gated: bool,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    noise: Tensor | None,
    backend: Backend,
) -> Tensor:
    """`expert_mlp` by grouped matmuls."""
    order, ends, places = assignments
    rows = torch.arange(len(order), device=order.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)
    projected = grouped_matmul(gather_rows(hidden, order, places), up.transpose(1, 2), ends, backend=backend)
    if up_bias is not None:
        projected = projected + _of_rows(up_bias, expert)
    inner = activated(projected, nonlinearity, gated, _noise_of_rows(noise, order))
    result = grouped_matmul(inner, down.transpose(1, 2), ends, backend=backend)
    if down_bias is not None:
        result = result + _of_rows(down_bias, expert)
    return combine_rows(result, gates, places, order)


def _of_rows(bias: Tensor, expert: Tensor) -> Tensor:
    """The bias of each row's expert, by a product with one-hot rows: its gradient is a sum in one order."""
    numbers = torch.arange(len(bias), device=bias.device)
    return (expert[:, None] == numbers).to(bias.dtype) @ bias


def padded_experts(
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    nonlinearity: str,
    gated: bool,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kept: Tensor | None,
    noise: Tensor | None,
    capacity: int,
) -> Tensor:
    """`expert_mlp` by batched matmuls of exactly `capacity` rows for every expert, the last ones empty."""
    order, places = padded_assignments(experts, len(up), capacity, kept)
    rows = gather_rows(hidden, order, places).unflatten(0, (len(up), capacity))
    if up_bias is None:
        projected = torch.bmm(rows, up.transpose(1, 2))
    else:
        projected = torch.baddbmm(up_bias[:, None], rows, up.transpose(1, 2))
    row_noise = _noise_of_rows(noise, order)
    inner = activated(
        projected, nonlinearity, gated, None if row_noise is None else row_noise.view(*rows.shape[:2], -1)
    )
    if down_bias is None:
        result = torch.bmm(inner, down.transpose(1, 2))
    else:
        result = torch.baddbmm(down_bias[:, None], inner, down.transpose(1, 2))
    return combine_rows(result.flatten(0, 1), gates, places, order)
