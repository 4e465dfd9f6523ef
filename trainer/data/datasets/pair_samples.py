"""Samples out of numbered pairs: one in each row, or several packed into one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .packing import one_each, pack
from .samples import philox, positions_of
from .seq2seq import PAIR_PART, NamedTensors, Pair, Shape, packed, padded


class Pairs(Protocol):
    """Pairs by number."""

    def __len__(self) -> int: ...

    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The most tokens each pair has on the encoder's and the decoder's side."""
        ...

    def pair(self, number: int, source: np.random.Philox) -> Pair:
        """A pair; what is random in it is a function of the words of `source`."""
        ...


class Visit(NamedTuple):
    """A row, in some epoch."""

    epoch: int
    row: int


class RowOrder:
    """Which row lies at a position: all of them, in an order of its own every epoch.

    Args:
        rows: how many there are.
        seed: chooses the orders; None: evaluation, which goes through them once, in the same order in all runs.
        part: keeps the sets of a blend apart.
    """

    def __init__(self, rows: int, seed: int | None, part: int = 0) -> None:
        self._rows = rows
        self._seed = seed
        self._part = part
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def at(self, position: int) -> Visit | None:
        """The row at a position; None past the end of an evaluation."""
        epoch, place = divmod(position, self._rows)
        if self._seed is None and epoch > 0:
            return None
        if self._epoch is None or self._epoch[0] != epoch:
            words = philox(self._seed or 0, epoch, 2 * self._part).random_raw(self._rows)
            self._epoch = epoch, np.argsort(words, kind="stable")
        return Visit(epoch, int(self._epoch[1][place]))


class PairSamples:
    """Rows of pairs, by position.

    Which pairs share a row is fixed. Training goes through all rows in an order of its own every epoch, and draws anew
    what is random in a pair; evaluation goes through them once, in an order that is the same for all runs.

    Args:
        pairs: at least one; each fits into a row.
        shape: of the rows.
        seed: chooses orders and draws; None: evaluation.
        packs: several pairs in a row.
        part: keeps the sets of a blend apart.
    """

    def __init__(self, pairs: Pairs, shape: Shape, seed: int | None, *, packs: bool, part: int = 0) -> None:
        if not len(pairs):
            raise ValueError("`pairs` must hold at least one")
        self.pairs = pairs
        self.shape = shape
        self.packing = pack(*pairs.lengths(), (shape.encoder, shape.decoder)) if packs else one_each(len(pairs))
        self._packs = packs
        self._seed = seed
        self._part = part
        self._order = RowOrder(self.packing.rows, seed, part)

    @property
    def sequence_length(self) -> int:
        """Tokens on the encoder's side."""
        return self.shape.encoder

    @property
    def samples(self) -> int:
        """Rows in an epoch."""
        return self.packing.rows

    def batch(self, first: int, count: int) -> NamedTensors:
        """The samples at positions `first` to `first + count - 1`."""
        rows: list[list[Pair]] = []
        for position in positions_of(first, count).tolist():
            found = self._order.at(position)
            numbers = [] if found is None else self.packing.row(found.row).tolist()
            rows.append([self._pair(number, found.epoch if found else 0) for number in numbers])
        if self._packs:
            return packed(rows, self.shape)
        return padded([row[0] if row else None for row in rows], self.shape)

    def _pair(self, number: int, epoch: int) -> Pair:
        draw = epoch * len(self.pairs) + number
        return self.pairs.pair(number, philox(self._seed or 0, draw, PAIR_PART + 1 + self._part))
