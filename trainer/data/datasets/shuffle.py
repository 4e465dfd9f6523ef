"""Random permutations generated in chunks, so that memory use does not grow with their size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

CHUNK_SIZE = 1 << 22
"""Indices that are sorted at once; a chunk with its intermediate arrays needs about 0.5 GB."""
_READ = 1 << 20


def shuffled_indices(
    make_rng: Callable[[], np.random.Philox], count: int, chunk_size: int = CHUNK_SIZE
) -> Iterator[NDArray[np.int64]]:
    """Yield a random permutation of 0 to `count - 1` in chunks.

    The permutation sorts independent random words, one per index, which makes it uniform. The range of the words is
    divided into equal intervals of about `chunk_size` words each; each interval is sorted separately, and the words are
    generated again for each, which is much faster than storing them. The chunk size does not change the order.

    Args:
        make_rng: returns the random generator at its initial state.
        chunk_size: approximate number of indices sorted at once.

    Yields:
        int64 arrays, which together contain each index once.
    """
    intervals = -(-count // chunk_size)
    for interval in range(intervals):
        low, high = (interval << 64) // intervals, ((interval + 1 << 64) // intervals) - 1
        rng = make_rng()
        keys: list[NDArray[np.uint64]] = []
        indices: list[NDArray[np.int64]] = []
        for first in range(0, count, _READ):
            words = rng.random_raw(min(_READ, count - first))
            inside = np.flatnonzero((words >= np.uint64(low)) & (words <= np.uint64(high)))
            keys.append(words[inside])
            indices.append(inside + first)
        yield np.concatenate(indices)[np.argsort(np.concatenate(keys), kind="stable")]


def sequential_indices(count: int, chunk_size: int = CHUNK_SIZE) -> Iterator[NDArray[np.int64]]:
    """Yield 0 to `count - 1` in order, in chunks like those of `shuffled_indices`."""
    for first in range(0, count, chunk_size):
        yield np.arange(first, min(first + chunk_size, count))
