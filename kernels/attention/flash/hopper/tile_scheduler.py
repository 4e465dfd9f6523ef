"""Tile scheduler of the persistent grid: tile lists per program, balanced by cost, built on the host once per shape."""

from __future__ import annotations

import heapq
from functools import lru_cache

import torch
from torch import Tensor

# budget in the L2 cache for the heads processed concurrently; each of its two partitions holds a copy
L2_BUDGET_BYTES = 8 << 20
# fixed cost of a tile, in inner tiles: its first loads and the store of its results
TILE_COST = 1.0


def key_tiles_per_query_tile(queries: int, keys: int, rows: int, columns: int, causal: bool) -> list[int]:
    """Return the number of tiles of `columns` keys that each tile of `rows` queries visits."""
    ends = [min(keys, (tile + 1) * rows + keys - queries) if causal else keys for tile in range(-(-queries // rows))]
    return [max(1, -(-end // columns)) for end in ends]


def query_tiles_per_key_tile(queries: int, keys: int, rows: int, columns: int, causal: bool) -> list[int]:
    """Return the number of tiles of `columns` queries that each tile of `rows` keys visits."""
    firsts = [max(0, tile * rows - (keys - queries)) // columns if causal else 0 for tile in range(-(-keys // rows))]
    return [max(0, -(-queries // columns) - first) for first in firsts]


def balance_tiles(visits: list[int], pairs: int, together: int, programs: int) -> list[list[int]]:
    """Assign tiles to programs: [count, tile, pair, tile, pair, ...] for each, in execution order.

    Greedy: the longest tiles of each `together` pairs first, each to the least loaded program.

    Args:
        visits: inner tiles of each tile, the same for every pair.
        pairs: number of (sequence, head) pairs.
        together: pairs processed concurrently, whose inputs fit into the L2 cache.
        programs: programs of the grid.
    """
    longest_first = sorted(range(len(visits)), key=lambda tile: -visits[tile])
    lists: list[list[int]] = [[0] for _ in range(programs)]
    loads = [(0.0, program) for program in range(programs)]
    for begin in range(0, pairs, together):
        for tile in longest_first:
            for pair in range(begin, min(begin + together, pairs)):
                load, program = loads[0]
                heapq.heapreplace(loads, (load + visits[tile] + TILE_COST, program))
                lists[program][0] += 1
                lists[program] += (tile, pair)
    return lists


def pair_tiles(tiles: int, pairs: int, programs: int) -> list[list[int]]:
    """Assign tile p of keys, then tile `tiles` - 1 - p, of a pair to a program: as much work for all of them.

    As `balance_tiles`, for `hopper_fused_backward` with a causal mask, an even number of tiles, and as many queries. A
    pair takes tiles / 2 programs at the same time. Returns an empty list where so many programs are left over that the
    other kernels, with seven instead of five products but lists of any length, are faster.
    """
    half = tiles // 2
    together = min(programs // half, pairs)
    if together == 0:
        return []
    longest_list = -(-pairs // together) * (tiles + 1)
    if 5 * longest_list > 7 * max(tiles, pairs * half * (tiles + 1) / programs):
        return []
    return [
        [2 * len(assigned), *(number for pair in assigned for tile in (p, tiles - 1 - p) for number in (tile, pair))]
        for assigned in (range(first, pairs, together) for first in range(together))
        for p in range(half)
    ]


def _table(lists: list[list[int]], device: torch.device) -> Tensor:
    width = max(len(entries) for entries in lists)
    table = torch.tensor([entries + [0] * (width - len(entries)) for entries in lists], dtype=torch.int32)
    return table.to(device)  # synchronizes, once per shape, since later calls may use the table on other streams


def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=512)
def paired_tile_order(tiles: int, pairs: int, device: torch.device) -> Tensor | None:
    """Return `pair_tiles` as `tile_order` does; None if that is empty."""
    lists = pair_tiles(tiles, pairs, num_multiprocessors(device))
    return _table(lists, device) if lists else None


@lru_cache(maxsize=512)
def tile_order(
    by_keys: bool, queries: int, keys: int, rows: int, columns: int, causal: bool, pairs: int, together: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Return `balance_tiles` for a shape as an int32 tensor on the device: a row per program, at most one per SM."""
    visits = (query_tiles_per_key_tile if by_keys else key_tiles_per_query_tile)(queries, keys, rows, columns, causal)
    lists = balance_tiles(visits, pairs, together, min(len(visits) * pairs, num_multiprocessors(device)))
    return _table(lists, device)


def concurrent_heads(heads: int, bytes_per_head: int, causal: bool) -> int:
    """Return how many heads to process concurrently: several if causal, to balance tiles of different length."""
    return heads * max(1, L2_BUDGET_BYTES // bytes_per_head) if causal else 1
