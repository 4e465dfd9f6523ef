"""Normal numbers of which any rows and columns can be drawn alone: each tile of a matrix has a random stream.

The values depend on key, row and column only, not on the rows drawn, on threads or on the version of torch. The streams
are NumPy's SFC64 and ziggurat in fp32, which have not changed since NumPy 1.17; a test holds them to their values.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

TILE = (128, 256)
"""Rows and columns of a tile: many, since its stream takes microseconds to start; few, since all of it is drawn."""


def draw_normal(
    key: int, shape: tuple[int, int], rows: Iterable[tuple[int, int]], columns: tuple[int, int] | None = None
) -> Tensor:
    """Return some rows and columns of a matrix of standard normal numbers, (rows, columns) fp32 on the CPU.

    Args:
        key: seed of the matrix.
        shape: rows and columns of the full matrix.
        rows: ranges (first, size) of its rows.
        columns: range (first, size) of its columns; None for all.
    """
    rows = list(rows)
    left, width = columns or (0, shape[1])
    drawn = np.empty((sum(size for _, size in rows), width), dtype=np.float32)
    start = 0
    for first, size in rows:
        for row, above, height in _tiles(first, size, TILE[0], shape[0]):
            own = slice(max(first - above, 0), first + size - above)
            into = slice(start + max(above - first, 0), start + min(above + height - first, size))
            for column, before, extent in _tiles(left, width, TILE[1], shape[1]):
                stream = np.random.Generator(np.random.SFC64(np.random.SeedSequence(key, spawn_key=(row, column))))
                tile = stream.standard_normal((height, extent), dtype=np.float32)
                drawn[into, max(before - left, 0) : before + extent - left] = tile[
                    own, max(left - before, 0) : left + width - before
                ]
        start += size
    return torch.from_numpy(drawn)


def _tiles(first: int, size: int, step: int, end: int) -> Iterable[tuple[int, int, int]]:
    """Yield number, first index and size of the tiles that cover `size` indices from `first`, of `end` in all."""
    for number in range(first // step, -(-(first + size) // step) if size else first // step):
        yield number, number * step, min(step, end - number * step)
