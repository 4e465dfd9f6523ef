"""Rows of experts for fp8, which contracts them along its rows: every expert begins at a multiple of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..custom_op import custom_op
from ..launch import jit, next_power_of_2, tl, triton, triton_runs_on
from ..moe.assignments import Assignments
from .operands import row_multiple
from .recipe import TILE, Granularity


def expert_row_multiple(granularity: Granularity, rows: int, experts: int) -> int:
    """Return what the rows of an expert begin at multiples of: 16 bytes or a tile, and 128 where that adds few rows.

    Args:
        granularity: of the scales of the rows.
        rows: assignments to all experts.
        experts: their number.
    """
    return TILE if rows >= 8 * TILE * experts else row_multiple(granularity)


@jit
def align_rows_kernel(
    order_pointer, ends_pointer, padded_order_pointer, padded_ends_pointer, places_pointer, rows, experts,
    MULTIPLE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move BLOCK rows per program behind the empty rows of the experts before; see `aligned_assignments`.

    padded_order_pointer and places_pointer: filled with -1 before.
    """
    expert = tl.arange(0, BLOCK_E)
    end = tl.load(ends_pointer + expert, mask=expert < experts, other=0)
    start = tl.load(ends_pointer + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    added = (MULTIPLE - (end - start) % MULTIPLE) % MULTIPLE
    padded_end = end + tl.cumsum(tl.where(expert < experts, added, 0), axis=0)
    tl.store(padded_ends_pointer + expert, padded_end, mask=expert < tl.where(tl.program_id(0) == 0, experts, 0))
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = (tl.reshape(end, (1, BLOCK_E)) <= tl.reshape(row, (BLOCK, 1))) & tl.reshape(expert < experts, (1, BLOCK_E))
    place = row + tl.sum(tl.where(before, tl.reshape(added, (1, BLOCK_E)), 0), axis=1)
    assignment = tl.load(order_pointer + row, mask=row < rows, other=-1)
    tl.store(padded_order_pointer + place, assignment, mask=assignment >= 0)
    tl.store(places_pointer + assignment, place, mask=assignment >= 0)


def align_block(experts: int) -> dict[str, int]:
    """Return the rows of a program, which compares each with every expert, and its warps."""
    width = next_power_of_2(experts)
    return {"BLOCK_E": width, "BLOCK": max(16, min(128, 4096 // width)), "num_warps": 4}


def triton_align_rows(order: Tensor, ends: Tensor, places: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel of `aligned_assignments`."""
    rows, experts = order.shape[0], ends.shape[0]
    count = _padded_rows(rows, experts, multiple)
    padded_order, padded_places = order.new_full((count,), -1), torch.full_like(places, -1)
    padded_ends = torch.empty_like(ends)
    block = align_block(experts)
    align_rows_kernel[(max(1, triton.cdiv(rows, block["BLOCK"])),)](
        order, ends, padded_order, padded_ends, padded_places, rows, experts,
        MULTIPLE=multiple, enable_fp_fusion=True, **block,
    )  # fmt: skip
    return padded_order, padded_ends, padded_places


@custom_op("stoker::fp8_align_rows")
def _align_rows(order: Tensor, ends: Tensor, places: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    if triton_runs_on(order):
        return triton_align_rows(order, ends, places, multiple)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    padded_ends = ((ends - starts + multiple - 1) // multiple * multiple).cumsum(0, dtype=torch.int32)
    shifts = torch.cat((ends.new_zeros(1), padded_ends[:-1])) - starts
    used = order >= 0
    rows = used.nonzero()[:, 0]
    target = rows + shifts[torch.searchsorted(ends, rows.int(), right=True)]
    padded_order = order.new_full((_padded_rows(order.shape[0], ends.shape[0], multiple),), -1)
    padded_order[target] = order[used]
    padded_places = torch.full_like(places, -1)
    padded_places.view(-1)[order[used].long()] = target.int()
    return padded_order, padded_ends, padded_places


@torch.library.register_fake("stoker::fp8_align_rows")
def _(order: Tensor, ends: Tensor, places: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    count = _padded_rows(order.shape[0], ends.shape[0], multiple)
    return order.new_empty(count), torch.empty_like(ends), torch.empty_like(places)


def _padded_rows(rows: int, experts: int, multiple: int) -> int:
    """Return `rows` with those that every expert may need, rounded up to the multiple."""
    return (rows + experts * (multiple - 1) + multiple - 1) // multiple * multiple


def aligned_assignments(assignments: Assignments, multiple: int) -> Assignments:
    """Return the assignments with empty rows at the end of each expert, so that the next begins where fp8 reads it.

    Args:
        assignments: from `sorted_assignments`, T k rows.
        multiple: of rows that experts begin at, from `expert_row_multiple`.

    Returns:
        Those of R rows, T k with (multiple - 1) more for each expert, rounded up to the multiple.
    """
    return Assignments(*_align_rows(*assignments, multiple))
