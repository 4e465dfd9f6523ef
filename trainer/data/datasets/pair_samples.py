"""Samples of encoder-decoder pairs: one per row, or several packed into one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .packing import Packing, one_pair_per_row, pack_pairs
from .samples import TensorBatch, philox_generator, position_range
from .seq2seq import PAIR_RNG_STREAM, Pair, PairShape, collate_packed, collate_padded


class Pairs(Protocol):
    """Random access to pairs by index."""

    def __len__(self) -> int: ...

    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the maximum tokens of each pair on the encoder and decoder side."""
        ...

    def pair(self, number: int, rng: np.random.Philox) -> Pair:
        """Return a pair; all randomness comes from `rng`."""
        ...


class EpochRow(NamedTuple):
    """A row in an epoch: the indices of its pairs or examples."""

    epoch: int
    members: list[int]


class RowShuffle:
    """Map positions to rows, with a new permutation every epoch.

    Args:
        packing: the rows.
        seed: of the permutations; None for evaluation: a single pass in the same order for all runs.
        rng_stream: random stream of the dataset in a blend.
    """

    def __init__(self, packing: Packing, seed: int | None, rng_stream: int = 0) -> None:
        self._packing = packing
        self._seed = seed
        self._rng_stream = rng_stream
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def row_at(self, position: int) -> EpochRow:
        """Return the row at a position; an empty one past the end of an evaluation."""
        epoch, index = divmod(position, self._packing.rows)
        if self._seed is None and epoch > 0:
            return EpochRow(0, [])
        if self._epoch is None or self._epoch[0] != epoch:
            words = philox_generator(self._seed or 0, epoch, 2 * self._rng_stream).random_raw(self._packing.rows)
            self._epoch = epoch, np.argsort(words, kind="stable")
        return EpochRow(epoch, self._packing.row(int(self._epoch[1][index])).tolist())


class PairSamples:
    """Rows of one or several pairs, by position.

    The assignment of pairs to rows is fixed. Training uses a new permutation of the rows and new random draws every
    epoch; evaluation is a single pass in an order that is the same for all runs.

    Args:
        pairs: at least one; each fits into a row.
        seed: of permutations and random draws; None for evaluation.
        rng_stream: random stream of the dataset in a blend.
    """

    def __init__(
        self, pairs: Pairs, shape: PairShape, seed: int | None, *, pack_rows: bool, rng_stream: int = 0
    ) -> None:
        if not len(pairs):
            raise ValueError("`pairs` must hold at least one")
        self.pairs = pairs
        self.shape = shape
        self.packing = (
            pack_pairs(*pairs.lengths(), (shape.encoder_length, shape.decoder_length))
            if pack_rows
            else one_pair_per_row(len(pairs))
        )
        self.sequence_length = shape.encoder_length
        self.samples = self.packing.rows
        self._packs = pack_rows
        self._seed = seed
        self._rng_stream = rng_stream
        self._order = RowShuffle(self.packing, seed, rng_stream)

    def batch(self, first: int, count: int) -> TensorBatch:
        """Return the samples at positions `first` to `first + count - 1`."""
        rows: list[list[Pair]] = []
        for position in position_range(first, count).tolist():
            epoch, members = self._order.row_at(position)
            rows.append([self._pair(number, epoch) for number in members])
        if self._packs:
            return collate_packed(rows, self.shape)
        return collate_padded([row[0] if row else None for row in rows], self.shape)

    def _pair(self, number: int, epoch: int) -> Pair:
        index = epoch * len(self.pairs) + number
        return self.pairs.pair(number, philox_generator(self._seed or 0, index, PAIR_RNG_STREAM + 1 + self._rng_stream))
