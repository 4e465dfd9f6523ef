"""Row tiles of a grouped matmul, computed on the device from the ends of the experts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import jit, next_power_of_2, tl

_BLOCK = 256


class Tiles(NamedTuple):
    """Tiles of at most `block` rows of one expert each; all int32 on the device.

    Attributes:
        experts: expert of each tile, (bound,); E for the rows after the last expert's.
        rows: first row of each tile, (bound,).
        num_tiles: number of tiles, (1,).
        experts_by_load: experts in descending order of their number of rows, (E,).
        block: rows of a tile.
    """

    experts: Tensor
    rows: Tensor
    num_tiles: Tensor
    experts_by_load: Tensor
    block: int


@jit(do_not_specialize=["rows"])  # changes from step to step where ranks exchange tokens
def tiles_kernel(
    ends_pointer, experts_pointer, rows_pointer, count_pointer, heaviest_pointer, experts, rows,
    BLOCK_ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tiles of one expert per program; program `experts` writes those of the rows after the last expert's.

    ends_pointer: (experts,); for the others see `Tiles`.
    """
    expert = tl.program_id(0)
    other = tl.arange(0, BLOCK_E)
    end = tl.load(ends_pointer + other, mask=other < experts, other=0)
    start = tl.load(ends_pointer + other - 1, mask=(other > 0) & (other < experts), other=0)
    load = end - start
    tiles_before = tl.sum(tl.where(other < expert, (load + BLOCK_ROWS - 1) // BLOCK_ROWS, 0))
    first = tl.load(ends_pointer + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends_pointer + expert, mask=expert < experts, other=rows)
    if expert < experts:
        own = stop - first
        heavier = (load > own) | ((load == own) & (other < expert))
        rank = tl.sum(tl.where((other < experts) & heavier, 1, 0))
        tl.store(heaviest_pointer + rank, expert)
    tiles = (stop - first + BLOCK_ROWS - 1) // BLOCK_ROWS
    if expert == experts:
        tl.store(count_pointer, tiles_before + tiles)
    for begin in range(0, tiles, BLOCK):
        number = begin + tl.arange(0, BLOCK)
        inside = number < tiles
        tl.store(experts_pointer + tiles_before + number, number * 0 + expert, mask=inside)
        tl.store(rows_pointer + tiles_before + number, first + number * BLOCK_ROWS, mask=inside)


def max_tiles(rows: int, experts: int, block: int) -> int:
    """Return an upper bound of the number of tiles: each expert and the remaining rows add at most one partial tile."""
    return rows // block + experts + 1


def find_tiles(ends: Tensor, rows: int, block: int) -> Tiles:
    """Return the tiles of `block` rows for experts with ends (E,) among `rows` rows; launches one small kernel."""
    experts = len(ends)
    bound = max_tiles(rows, experts, block)
    buffer = torch.empty(2 * bound + 1 + experts, dtype=torch.int32, device=ends.device)
    tile_experts, first_row, count, heaviest = buffer.split([bound, bound, 1, experts])
    tiles_kernel[(experts + 1,)](
        ends,
        tile_experts,
        first_row,
        count,
        heaviest,
        experts,
        rows,
        BLOCK_ROWS=block,
        BLOCK_E=next_power_of_2(experts),
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return Tiles(tile_experts, first_row, count, heaviest, block)
