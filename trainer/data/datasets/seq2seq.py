"""Batches for models with an encoder and a decoder: pairs of token rows, padded to fixed lengths or packed.

A batch is a dict of tensors:

    encoder_tokens     int64 [rows, s]
    decoder_tokens     int64 [rows, t]: what is to be written, one place to the right; padding begins it, as in T5
    labels             int64 [rows, t]: what is to be written, `IGNORED_LABEL` behind its end
    encoder_padding    bool [rows, s], True for a token that is there; of rows that hold one pair each and may be short
    encoder_documents  int32 [rows, s] and
    decoder_documents  int32 [rows, t], of packed rows: the number of the pair within its row that a token belongs to;
                       it never falls, and the padding at the end has a number of its own, the same on both sides
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .samples import IGNORED_LABEL, Samples, philox, positions_of

NamedTensors = dict[str, Tensor]
PAIR_PART = 1 << 20
"""Keeps the draws that make pairs apart from those that order samples; see `philox`."""


class Pair(NamedTuple):
    """What the encoder reads and the decoder writes, token ids with their end tokens; [n] and [m]."""

    encoder: NDArray[Any]
    decoder: NDArray[Any]


class FieldSamples(Protocol):
    """Samples by position, as `Samples`, whose batches are tensors by name.

    Attributes:
        sequence_length: s, tokens in a sample; of the encoder where there are two sides.
        samples: how many there are before they repeat (training) or end (evaluation).
    """

    @property
    def sequence_length(self) -> int: ...  # noqa: D102
    @property
    def samples(self) -> int: ...  # noqa: D102

    def batch(self, first: int, count: int) -> NamedTensors:
        """The samples at positions `first` to `first + count - 1`, whatever was asked for before."""
        ...


class AnySamples(Protocol):
    """Samples by position, with batches of whatever kind their task needs: `Batch`, or tensors by name."""

    @property
    def sequence_length(self) -> int: ...  # noqa: D102
    @property
    def samples(self) -> int: ...  # noqa: D102

    def batch(self, first: int, count: int) -> Any:
        """The samples at positions `first` to `first + count - 1`, whatever was asked for before."""
        ...


class Shape(NamedTuple):
    """The size of every row.

    Attributes:
        encoder: s, tokens on the encoder's side.
        decoder: t, tokens on the decoder's side.
        pad_id: fills up both, and begins the decoder's.
    """

    encoder: int
    decoder: int
    pad_id: int


def filled(encoder: NDArray[np.int64], written: NDArray[np.int64], shape: Shape) -> NamedTensors:
    """A batch of pairs that fill the encoder's side.

    Args:
        encoder: [rows, s].
        written: what the decoder writes, [rows, up to t]; places of `IGNORED_LABEL` do not count.
        shape: of the rows.
    """
    rows, length = written.shape
    labels = np.full((rows, shape.decoder), IGNORED_LABEL, np.int64)
    labels[:, :length] = written
    return _tensors(encoder_tokens=encoder, decoder_tokens=_shifted(labels, shape.pad_id), labels=labels)


def padded(pairs: Sequence[Pair | None], shape: Shape) -> NamedTensors:
    """A batch of one pair in each row, with padding behind both sides; None gives a row in which nothing counts."""
    encoder = np.full((len(pairs), shape.encoder), shape.pad_id, np.int64)
    labels = np.full((len(pairs), shape.decoder), IGNORED_LABEL, np.int64)
    present = np.zeros(encoder.shape, np.bool_)
    for row, pair in enumerate(pairs):
        # A row without a single token would leave attention nothing to look at.
        present[row, : 1 if pair is None else len(pair.encoder)] = True
        if pair is not None:
            encoder[row, : len(pair.encoder)] = pair.encoder
            labels[row, : len(pair.decoder)] = pair.decoder
    return _tensors(
        encoder_tokens=encoder,
        decoder_tokens=_shifted(labels, shape.pad_id),
        labels=labels,
        encoder_padding=present,
    )


def packed(rows: Sequence[Sequence[Pair]], shape: Shape) -> NamedTensors:
    """A batch of rows that hold several pairs each, one behind the other on both sides."""
    encoder = np.full((len(rows), shape.encoder), shape.pad_id, np.int64)
    labels = np.full((len(rows), shape.decoder), IGNORED_LABEL, np.int64)
    decoder = np.full(labels.shape, shape.pad_id, np.int64)
    of_encoder, of_decoder = np.empty(encoder.shape, np.int32), np.empty(labels.shape, np.int32)
    for row, pairs in enumerate(rows):
        read, written = 0, 0
        for number, pair in enumerate(pairs):
            read_to, written_to = read + len(pair.encoder), written + len(pair.decoder)
            encoder[row, read:read_to] = pair.encoder
            labels[row, written:written_to] = pair.decoder
            decoder[row, written + 1 : written_to] = pair.decoder[:-1]
            of_encoder[row, read:read_to] = of_decoder[row, written:written_to] = number
            read, written = read_to, written_to
        of_encoder[row, read:] = of_decoder[row, written:] = len(pairs)
    return _tensors(
        encoder_tokens=encoder,
        decoder_tokens=decoder,
        labels=labels,
        encoder_documents=of_encoder,
        decoder_documents=of_decoder,
    )


def _shifted(labels: NDArray[np.int64], pad_id: int) -> NDArray[np.int64]:
    """The decoder's input of rows that hold one pair each."""
    tokens = np.full(labels.shape, pad_id, np.int64)
    tokens[:, 1:] = np.where(labels[:, :-1] == IGNORED_LABEL, pad_id, labels[:, :-1])
    return tokens


def _tensors(**arrays: NDArray[Any]) -> NamedTensors:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# ---------------------------------------------------------------- out of windows of text


class Texts(NamedTuple):
    """The text of some windows.

    Attributes:
        tokens: int64 [rows, n]; `IGNORED_LABEL` behind the end of a short window.
        lengths: tokens of each, int64 [rows]; 0 past the end of a split.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]


def texts_of(windows: Samples, first: int, count: int) -> Texts:
    """The text of windows: their labels, since every token but the first is a label exactly once per epoch."""
    tokens = windows.batch(first, count).labels.numpy()
    return Texts(tokens, (tokens != IGNORED_LABEL).sum(axis=1))


class DividedWindows:
    """Windows of text, each made into one pair of any lengths.

    Args:
        windows: of n tokens.
        divide: makes a pair of a text, int64 [1 to n], with random words; None of one that is too short.
        shape: of the rows; each pair must fit.
        seed: chooses the words; for evaluation the same for all runs.
    """

    def __init__(
        self,
        windows: Samples,
        divide: Callable[[NDArray[np.int64], np.random.Philox], Pair | None],
        shape: Shape,
        seed: int,
    ) -> None:
        self.windows = windows
        self.shape = shape
        self._divide = divide
        self._seed = seed

    @property
    def sequence_length(self) -> int:
        """Tokens on the encoder's side."""
        return self.shape.encoder

    @property
    def samples(self) -> int:
        """How many there are before they repeat or end."""
        return self.windows.samples

    def batch(self, first: int, count: int) -> NamedTensors:
        """The samples at positions `first` to `first + count - 1`."""
        texts = texts_of(self.windows, first, count)
        pairs = [
            self._divide(tokens[:length], philox(self._seed, int(position), PAIR_PART)) if length else None
            for position, tokens, length in zip(positions_of(first, count), *texts, strict=True)
        ]
        return padded(pairs, self.shape)


class MockPairs:
    """Uniformly random tokens on both sides, which fill them: for measuring speed.

    Args:
        vocab_size: ids are 0 to vocab_size - 1.
        shape: of the rows.
        seed: chooses the tokens.
        samples: positions repeat after this many.
        part: keeps the splits apart (0 train, 1 validation, 2 test).
    """

    def __init__(self, vocab_size: int, shape: Shape, seed: int, samples: int, part: int = 0) -> None:
        self.vocab_size = vocab_size
        self.shape = shape
        self.samples = samples
        self._seed = seed
        self._part = part

    @property
    def sequence_length(self) -> int:
        """Tokens on the encoder's side."""
        return self.shape.encoder

    def batch(self, first: int, count: int) -> NamedTensors:
        """The samples at positions `first` to `first + count - 1`."""
        both = self.shape.encoder + self.shape.decoder
        rows = np.empty((count, both), np.int64)
        for row, position in enumerate(positions_of(first, count)):
            raw = philox(self._seed, int(position) % self.samples, self._part).random_raw(both)
            rows[row] = raw % np.uint64(self.vocab_size)
        return filled(rows[:, : self.shape.encoder], rows[:, self.shape.encoder :], self.shape)
