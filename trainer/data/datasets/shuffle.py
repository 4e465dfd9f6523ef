"""Random orders that are made piece by piece: memory does not grow with what is put in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

PIECE = 1 << 22
"""Numbers that are put in order at once; a piece of them, with what is made of it, needs about 0.5 GB."""
_READ = 1 << 20


def shuffled(words: Callable[[], np.random.Philox], count: int, piece: int = PIECE) -> Iterator[NDArray[np.int64]]:
    """The numbers 0 to `count - 1` in random order, as rows one after the other.

    The order is that of independent random words, one for each number: the rank of such words is a uniform permutation.
    The range of the words is cut into equal parts of about `piece` numbers; each part is sorted for itself, and the
    words are drawn anew for each, which is far quicker than keeping them. The size of the pieces does not change the
    order.

    Args:
        words: the random stream, from its beginning, whenever it is called.
        count: how many numbers.
        piece: about how many are sorted at once.

    Yields:
        int64 rows, which together hold each number once.
    """
    parts = -(-count // piece)
    for part in range(parts):
        low, high = (part << 64) // parts, ((part + 1 << 64) // parts) - 1
        stream = words()
        found: list[NDArray[np.uint64]] = []
        numbers: list[NDArray[np.int64]] = []
        for first in range(0, count, _READ):
            drawn = stream.random_raw(min(_READ, count - first))
            inside = np.flatnonzero((drawn >= np.uint64(low)) & (drawn <= np.uint64(high)))
            found.append(drawn[inside])
            numbers.append(inside + first)
        yield np.concatenate(numbers)[np.argsort(np.concatenate(found), kind="stable")]


def in_order(count: int, piece: int = PIECE) -> Iterator[NDArray[np.int64]]:
    """The numbers 0 to `count - 1` as they are, in rows like those of `shuffled`."""
    for first in range(0, count, piece):
        yield np.arange(first, min(first + piece, count))
