"""Samples out of numbered pairs: one in each row, or several packed into one."""

from __future__ import annotations

from typing import Protocol

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
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

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
            epoch, place = divmod(position, self.samples)
            if self._seed is None and epoch > 0:
                rows.append([])
                continue
            numbers = self.packing.row(int(self._order(epoch)[place]))
            rows.append([self._pair(int(number), epoch) for number in numbers])
        if self._packs:
            return packed(rows, self.shape)
        return padded([row[0] if row else None for row in rows], self.shape)

    def _pair(self, number: int, epoch: int) -> Pair:
        draw = epoch * len(self.pairs) + number
        return self.pairs.pair(number, philox(self._seed or 0, draw, PAIR_PART + 1 + self._part))

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self._epoch is None or self._epoch[0] != epoch:
            words = philox(self._seed or 0, epoch, 2 * self._part).random_raw(self.samples)
            self._epoch = epoch, np.argsort(words, kind="stable")
        return self._epoch[1]
