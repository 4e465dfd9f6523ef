"""Expert MLPs composed of differentiable operations: grouped or batched matmuls between gather and combine.

Supports every device, dtype and dropout; autograd saves all intermediates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .assignments import Assignments, padded_assignments
from .grouped_matmul import Backend, grouped_matmul
from .permute import combine_rows, gather_rows
from .reference_experts import ExpertWeights, apply_activation


def _row_dropout_mask(dropout_mask: Tensor | None, order: Tensor) -> Tensor | None:
    """Return the dropout mask (T, k, f) in the order of the rows, (rows, f)."""
    return None if dropout_mask is None else dropout_mask.flatten(0, 1)[order.clamp(min=0)]


def eager_experts(
    hidden: Tensor,
    gates: Tensor,
    weights: ExpertWeights,
    assignments: Assignments,
    *,
    dropout_mask: Tensor | None,
    backend: Backend,
) -> Tensor:
    """`expert_mlp` by grouped matmuls, composed of differentiable operations."""
    up, down, up_bias, down_bias, nonlinearity, gated = weights
    order, ends, places = assignments
    rows = gather_rows(hidden, order, places)
    projected = grouped_matmul(rows, up.transpose(1, 2), ends, backend=backend, bias=up_bias)
    inner = apply_activation(projected, nonlinearity, gated, _row_dropout_mask(dropout_mask, order))
    result = grouped_matmul(inner, down.transpose(1, 2), ends, backend=backend, bias=down_bias)
    return combine_rows(result, gates, places, order)


def padded_experts(
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
    weights: ExpertWeights,
    *,
    kept: Tensor | None,
    dropout_mask: Tensor | None,
    capacity: int,
) -> Tensor:
    """`expert_mlp` by batched matmuls, with every expert padded to exactly `capacity` rows."""
    up, down, up_bias, down_bias, nonlinearity, gated = weights
    order, places = padded_assignments(experts, len(up), capacity, kept)
    rows = gather_rows(hidden, order, places).unflatten(0, (len(up), capacity))
    if up_bias is None:
        projected = torch.bmm(rows, up.transpose(1, 2))
    else:
        projected = torch.baddbmm(up_bias[:, None], rows, up.transpose(1, 2))
    row_mask = _row_dropout_mask(dropout_mask, order)
    inner = apply_activation(
        projected, nonlinearity, gated, None if row_mask is None else row_mask.view(*rows.shape[:2], -1)
    )
    if down_bias is None:
        result = torch.bmm(inner, down.transpose(1, 2))
    else:
        result = torch.baddbmm(down_bias[:, None], inner, down.transpose(1, 2))
    return combine_rows(result.flatten(0, 1), gates, places, order)
