"""Which row of a grouped matmul computes which assignment: a token and one of its k experts.

Assignment a = token * k + slot. Rows are the assignments sorted by expert, in the order of their tokens within an
expert; the dropped ones have no row. Nothing here is read on the host, and the order is the same in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import triton_runs_on
from .counting_sort import sorted_on_device


class Assignments(NamedTuple):
    """Rows and assignments, each in the order of the other; all int32.

    Attributes:
        order: (rows,), the assignment in a row, -1 in an empty row. Sorted: the empty rows are the last.
        ends: (E,), the row after the last one of each expert.
        places: (T, k), the row of each assignment, -1 where it was dropped.
    """

    order: Tensor
    ends: Tensor
    places: Tensor


def sorted_assignments(experts: Tensor, num_experts: int, kept: Tensor | None = None) -> Assignments:
    """Assignments sorted by expert, T k rows.

    Args:
        experts: (T, k) int64, from 0 to `num_experts` - 1.
        num_experts: E.
        kept: (T, k) bool, False for a dropped assignment; None keeps all.
    """
    if triton_runs_on(experts):
        return Assignments(*sorted_on_device(experts, num_experts, kept))
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
    """`order` (E capacity,) and `places` (T, k), int32, when every expert has `capacity` rows, the last ones empty.

    What an expert has above `capacity` is dropped; see `sorted_assignments` for the arguments.
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
