"""Which tiles each program of a persistent grid computes: lists made on the host once per shape, balanced by length."""

from __future__ import annotations

import heapq
from functools import lru_cache

import torch
from torch import Tensor

# of the L2 cache: what the heads that are worked on at a time may take of it, so that its two halves hold it twice
CACHED_BYTES = 8 << 20
# what a tile costs beside its visits: its first loads, and its results
TILE_COST = 1.0


def visits_of_queries(queries: int, keys: int, rows: int, columns: int, causal: bool) -> list[int]:
    """How many tiles of `columns` keys each tile of `rows` queries visits."""
    ends = [min(keys, (tile + 1) * rows + keys - queries) if causal else keys for tile in range(-(-queries // rows))]
    return [max(1, -(-end // columns)) for end in ends]


def visits_of_keys(queries: int, keys: int, rows: int, columns: int, causal: bool) -> list[int]:
    """How many tiles of `columns` queries each tile of `rows` keys visits."""
    firsts = [max(0, tile * rows - (keys - queries)) // columns if causal else 0 for tile in range(-(-keys // rows))]
    return [max(0, -(-queries // columns) - first) for first in firsts]


def balanced(visits: list[int], pairs: int, together: int, programs: int) -> list[list[int]]:
    """Tiles of each program: [count, tile, pair, tile, pair, ...], in the order in which it computes them.

    The tiles go, the longest of each `together` pairs first, to the program that is done first.

    Args:
        visits: of each tile, the same for every pair.
        pairs: of sequence and head.
        together: pairs that are worked on at a time, because the L2 cache holds what they read.
        programs: of the grid.
    """
    falling = sorted(range(len(visits)), key=lambda tile: -visits[tile])
    lists: list[list[int]] = [[0] for _ in range(programs)]
    free = [(0.0, program) for program in range(programs)]
    for begin in range(0, pairs, together):
        for tile in falling:
            for pair in range(begin, min(begin + together, pairs)):
                load, program = free[0]
                heapq.heapreplace(free, (load + visits[tile] + TILE_COST, program))
                lists[program][0] += 1
                lists[program] += (tile, pair)
    return lists


@lru_cache(maxsize=512)
def tile_order(
    by_keys: bool, queries: int, keys: int, rows: int, columns: int, causal: bool, pairs: int, together: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """`balanced` for a shape as an int32 tensor on the device, one row per program; at most one per multiprocessor."""
    visits = (visits_of_keys if by_keys else visits_of_queries)(queries, keys, rows, columns, causal)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    lists = balanced(visits, pairs, together, min(len(visits) * pairs, processors))
    width = max(len(numbers) for numbers in lists)
    table = torch.tensor([numbers + [0] * (width - len(numbers)) for numbers in lists], dtype=torch.int32)
    return table.to(device)  # waits, once per shape: the next call that reads it may be on another stream


def together(heads: int, bytes_per_head: int, causal: bool) -> int:
    """How many heads to work on at a time: causal tiles differ in length and mix best over several heads."""
    return heads * max(1, CACHED_BYTES // bytes_per_head) if causal else 1
