"""Token permutation for grouped matmuls: the mapping between rows and assignments (a token and one of its k experts).

Assignment a = token * k + slot. Rows are the assignments sorted by expert, in token order within an expert; dropped
assignments have no row. Nothing here is read on the host, and the order is deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dropout import derived_rows, draw_keys
from ..launch import triton_runs_on
from .counting_sort import counting_sort


class Assignments(NamedTuple):
    """Permutation of assignments to rows and its inverse; all int32.

    Attributes:
        order: assignment of each row, (rows,), -1 in an empty row. In `sorted_assignments` empty rows come last.
            For `fused_experts` also (0,): row r is token r, or empty, as `places` (T, 1) say.
        ends: exclusive end row of each expert, (E,).
        places: row of each assignment, (T, k), -1 if dropped.
    """

    order: Tensor
    ends: Tensor
    places: Tensor


def sorted_assignments(experts: Tensor, num_experts: int, kept: Tensor | None = None) -> Assignments:
    """Return the assignments sorted by expert, T k rows.

    Args:
        experts: expert of each assignment, (T, k) int64, from 0 to `num_experts` - 1.
        num_experts: E.
        kept: (T, k) bool, False for a dropped assignment; None keeps all.
    """
    if triton_runs_on(experts):
        return Assignments(*counting_sort(experts, num_experts, kept))
    keys = experts if kept is None else torch.where(kept, experts, num_experts)
    sorted_keys, order = keys.reshape(-1).sort(stable=True)
    numbers = torch.arange(num_experts, device=experts.device)
    ends = torch.searchsorted(sorted_keys, numbers, right=True, out_int32=True)
    rows = torch.arange(len(order), device=experts.device, dtype=torch.int32)
    places = torch.empty_like(rows).scatter(0, order, rows).view(experts.shape)
    order = order.to(torch.int32)
    if kept is not None:
        order = torch.where(rows < ends[-1], order, -1)
        places = torch.where(kept, places, -1)
    return Assignments(order, ends, places)


def padded_assignments(
    experts: Tensor, num_experts: int, capacity: int, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `order` (E capacity,) and `places` (T, k), int32, with every expert padded to `capacity` rows.

    Assignments beyond `capacity` are dropped. Other arguments as in `sorted_assignments`.
    """
    order, ends, places = sorted_assignments(experts, num_experts, kept)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    rank = places - starts[experts]
    fits = (places >= 0) & (rank < capacity)
    places = torch.where(fits, experts.to(torch.int32) * capacity + rank, -1)
    slots = torch.arange(capacity, device=experts.device, dtype=torch.int32)
    rows = starts[:, None] + slots
    filled = rows < ends[:, None]
    last = max(len(order) - 1, 0)
    padded = torch.where(filled, order[rows.clamp(max=last)], -1)
    return padded.reshape(-1), places


def assignment_rows(key: Tensor, tokens: Tensor, topk: int) -> Tensor:
    """Return what the dropout masks of assignments are functions of, whichever rank computes them, int64 (T, k).

    Args:
        key: int64 (2,), of a layer and micro batch, see `kernels.dropout`.
        tokens: place of each token in the micro batch, int64 (T,).
        topk: k.
    """
    return derived_rows(key, tokens[:, None] + (torch.arange(1, topk + 1, device=tokens.device) << 32))


def draw_assignment_rows(experts: Tensor) -> Tensor:
    """Return `assignment_rows` of `experts`, (T, k), under a key from the default generator of the device."""
    tokens = torch.arange(len(experts), device=experts.device)
    return assignment_rows(draw_keys(device=experts.device), tokens, experts.shape[1])
