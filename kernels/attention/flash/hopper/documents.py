"""Packed documents on Hopper: the bounds of each row's document, and tile lists of the persistent grid.

The documents are rows of one sequence, in which a query sees no key before its own document. As only the device knows
them, it balances the tiles itself: the longest first, dealt to the programs in turns there and back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....launch import jit, next_power_of_2, tl
from ..kernel_arguments import device_guard
from .launch_cache import launch_kernel
from .tile_scheduler import num_multiprocessors

ROWS = 1024
"""Rows of a program of `row_bounds`."""
kernel: Any = jit(
    do_not_specialize=("entries", "rows", "steps", "order_width", "pairs", "together", "programs"),
    do_not_specialize_on_alignment=("cu_seqlens_pointer",),
)


@kernel
def row_bounds(cu_seqlens_pointer, entries, begins_pointer, ends_pointer, rows, steps, ROWS: tl.constexpr):
    """Write the first row of each row's document, and the end of it.

    Args:
        cu_seqlens_pointer: int32 (entries,), cumulative lengths, ascending from 0.
        entries: number of them.
        begins_pointer: int32 (rows,); `rows` for a row after all documents, which sees nothing.
        ends_pointer: int32 (rows,); the row itself for such a row, which nothing sees.
        rows: number of rows.
        steps: of the binary search.
        ROWS: rows of a program.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    low = tl.zeros([ROWS], tl.int32)  # after the search the number of entries that are at most the row
    high = low + entries
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        is_before = tl.load(cu_seqlens_pointer + middle, mask=searching, other=0) <= row
        low = tl.where(searching & is_before, middle + 1, low)
        high = tl.where(searching & (is_before == 0), middle, high)
    inside = (low > 0) & (low < entries)
    begin = tl.load(cu_seqlens_pointer + low - 1, mask=inside, other=0)
    end = tl.load(cu_seqlens_pointer + low, mask=inside, other=0)
    tl.store(begins_pointer + row, tl.where(inside, begin, rows), mask=row < rows)
    tl.store(ends_pointer + row, tl.where(inside, end, row), mask=row < rows)


@kernel
def deal_tiles(
    bounds_pointer, order_pointer, order_width, rows, pairs, together, programs,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Write the tile lists of `tile_scheduler.tile_order` for tiles of TILE rows that visit tiles of COLUMNS rows.

    Each program deals the tiles of a pair, in places between those of the other pairs.

    Args:
        bounds_pointer: the ends of `row_bounds` if BY_KEYS, else the begins; tiles are then of queries.
        order_pointer: int32 (programs, order_width), order_width >= 1 + 2 * tiles * pairs / programs, rounded up.
        order_width: see above.
        rows: number of rows.
        pairs: heads, or groups of heads, of which each has all tiles.
        together: pairs whose tiles are dealt at the same time.
        programs: of the grid that the lists are for.
        TILE: rows of a tile.
        COLUMNS: rows of a visited tile.
        TILES: a power of 2, at least the number of tiles.
        BY_KEYS: the tiles are of keys.
    """
    tile = tl.arange(0, TILES)
    tiles = (rows + TILE - 1) // TILE
    exists = tile < tiles
    first = tile * TILE
    end = tl.minimum(first + TILE, rows)
    if BY_KEYS:
        end = tl.load(bounds_pointer + end - 1, mask=exists, other=0)
    else:
        first = tl.load(bounds_pointer + first, mask=exists, other=0)
    visits = tl.maximum((end + COLUMNS - 1) // COLUMNS - first // COLUMNS, 0)
    # in the upper bits what is sorted by; tiles that do not exist come last
    ranked = tl.sort(tl.where(exists, (visits + 1) * TILES + tile, tile), descending=True) % TILES
    pair = tl.program_id(0)
    earlier = pair // together * together
    place = earlier * tiles + tile * tl.minimum(together, pairs - earlier) + pair - earlier
    turn, program = place // programs, place % programs
    program = tl.where(turn % 2 == 0, program, programs - 1 - program)
    entry = order_pointer + program * order_width + 1 + 2 * turn
    tl.store(entry, ranked, mask=exists)
    tl.store(entry + 1, tl.zeros_like(ranked) + pair, mask=exists)
    if pair == 0:
        turns, rest = tiles * pairs // programs, tiles * pairs % programs
        for begin in range(0, programs, TILES):
            program = begin + tile
            dealt = tl.where(turns % 2 == 0, program, programs - 1 - program)
            tl.store(order_pointer + program * order_width, turns + (dealt < rest), mask=program < programs)


def document_bounds(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the begins and ends of `row_bounds`, int32 (rows,) each.

    Args:
        cu_seqlens: int32 (documents + 1), cumulative lengths.
        rows: rows of the packed tensors.
    """
    cu_seqlens = cu_seqlens.contiguous()
    begins, ends = (cu_seqlens.new_empty(rows) for _ in range(2))
    entries = cu_seqlens.shape[0]
    with device_guard(cu_seqlens):
        launch_kernel(row_bounds, -(-rows // ROWS), torch.int32, cu_seqlens.device, {
            "cu_seqlens_pointer": cu_seqlens,
            "entries": entries,
            "begins_pointer": begins,
            "ends_pointer": ends,
            "rows": rows,
            "steps": entries.bit_length(),
            "ROWS": ROWS,
        })  # fmt: skip
    return begins, ends


def with_empty_tail(tensor: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the packed tensor with zeros after all documents, where a NaN would turn up in rows of the same tile.

    With an entry for each row and one more, as in `PackedSequences`, the documents are taken to fill all rows.
    """
    rows = tensor.shape[0]
    if cu_seqlens.shape[0] == rows + 1:
        return tensor
    tail = torch.arange(rows, device=tensor.device) >= cu_seqlens[-1]
    return tensor.masked_fill(tail[:, None, None], 0.0)


def document_tile_order(bounds: Tensor, tile: int, columns: int, pairs: int, together: int, *, by_keys: bool) -> Tensor:
    """Return the tile lists of `deal_tiles`: a row per program, at most one per multiprocessor.

    Args:
        bounds: the ends of `document_bounds` with `by_keys`, else the begins.
        tile: rows of a tile.
        columns: rows of a visited tile.
        pairs: heads, or groups of heads.
        together: pairs processed concurrently, whose inputs fit into the L2 cache.
        by_keys: the tiles are of keys.
    """
    tiles = -(-bounds.shape[0] // tile)
    programs = min(num_multiprocessors(bounds.device), tiles * pairs)
    width = 1 + 2 * -(-tiles * pairs // programs)
    order = bounds.new_empty(programs, width)
    with device_guard(bounds):
        launch_kernel(deal_tiles, pairs, torch.int32, bounds.device, {
            "bounds_pointer": bounds,
            "order_pointer": order,
            "order_width": width,
            "rows": bounds.shape[0],
            "pairs": pairs,
            "together": min(together, pairs),
            "programs": programs,
            "TILE": tile,
            "COLUMNS": columns,
            "TILES": next_power_of_2(max(tiles, 16)),
            "BY_KEYS": by_keys,
        })  # fmt: skip
    return order
