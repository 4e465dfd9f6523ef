"""Samples as pure functions of their position: (seed, consumed samples) -> tokens and labels, with no state to save.

Randomness comes from Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a counter-based
generator keyed by (seed, epoch) or (seed, sample). Only its raw 64-bit stream is used, which numpy keeps stable between
versions, while it does not promise that for its shuffles.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED_LABEL = -100
"""Label of a position that does not count, as in `torch.nn.functional.cross_entropy`."""

_WORD = 1 << 64


class Batch(NamedTuple):
    """Some samples.

    Attributes:
        tokens: int64 [count, s].
        labels: `labels[i, t]` is the token after `tokens[i, t]`, or `IGNORED_LABEL`; int64 [count, s].
        documents: the number of the document within its sample that each token belongs to, from 0, int32 [count, s];
            None where documents are not kept apart.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None


class Samples(Protocol):
    """Samples by position.

    Attributes:
        sequence_length: s, tokens in a sample.
        samples: how many there are before they repeat (training) or end (evaluation).
    """

    @property
    def sequence_length(self) -> int: ...  # noqa: D102
    @property
    def samples(self) -> int: ...  # noqa: D102

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions `first` to `first + count - 1`, whatever was asked for before."""
        ...


class TrainingWindows:
    """Endless epochs over a token stream, each of non-overlapping windows in random order.

    Every epoch shifts all windows by a random offset, so that the cuts between windows move, and visits each window
    once, in an order of its own. The number of windows is the same in every epoch, so a position alone says which epoch
    and window it is; the offset ranges over all tokens the windows leave over, so no token is left out for ever.

    Args:
        stream: token ids, [n] of any integer dtype; not copied.
        sequence_length: s, tokens in a sample; labels need one token more.
        seed: chooses offsets and orders.

    Raises:
        ValueError: the stream has fewer than s + 1 tokens.
    """

    def __init__(self, stream: NDArray[Any], sequence_length: int, seed: int) -> None:
        tokens = len(stream)
        if tokens < sequence_length + 1:
            raise ValueError(f"`sequence_length` ({sequence_length}) must be below the number of tokens ({tokens})")
        self.stream = stream
        self.sequence_length = sequence_length
        self.samples = max(1, tokens // sequence_length - 1)
        self._slack = tokens - 1 - self.samples * sequence_length
        self._seed = seed
        self._epoch: tuple[int, NDArray[np.int64]] | None = None

    def starts(self, epoch: int) -> NDArray[np.int64]:
        """First token of each window of an epoch, in the order of visit; int64 [samples]."""
        cached = self._epoch
        if cached is not None and cached[0] == epoch:
            return cached[1]
        raw = philox(self._seed, epoch).random_raw(self.samples + 1)
        offset = int(raw[-1]) % (self._slack + 1)
        # The rank of independent random words is a uniform permutation.
        starts = np.argsort(raw[:-1], kind="stable") * self.sequence_length + offset
        self._epoch = epoch, starts
        return starts

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions `first` to `first + count - 1` of training, counted from 0."""
        positions = positions_of(first, count)
        epochs = positions // self.samples
        starts = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts[here] = self.starts(int(epoch))[positions[here] % self.samples]
        windows = self.stream[starts[:, None] + np.arange(self.sequence_length + 1)].astype(np.int64)
        return shifted(windows)


class EvaluationWindows:
    """A token stream cut into consecutive windows: each token but the first is a label exactly once.

    The order of the windows is shuffled once and for all, so that the first k of them are a fair sample of the whole
    stream for any k; it does not depend on the seed of a run, so that runs are compared on the same windows.

    Args:
        stream: token ids, [n] of any integer dtype; not copied.
        sequence_length: s, tokens in a sample.
        pad_id: fills the last window; its labels are ignored.

    Raises:
        ValueError: the stream has fewer than 2 tokens.
    """

    def __init__(self, stream: NDArray[Any], sequence_length: int, pad_id: int = 0) -> None:
        if len(stream) < 2:
            raise ValueError(f"`stream` ({len(stream)} tokens) must have at least 2 tokens")
        self.stream = stream
        self.sequence_length = sequence_length
        self.samples = -(-(len(stream) - 1) // sequence_length)
        self._pad_id = pad_id
        self._order = np.argsort(philox(0, 0).random_raw(self.samples), kind="stable")

    def batch(self, first: int, count: int) -> Batch:
        """The windows `first` to `first + count - 1`; positions past the end give rows of ignored padding.

        The fixed shape lets every rank run the same number of equal batches.
        """
        positions = positions_of(first, count)
        tokens = np.full((count, self.sequence_length), self._pad_id, np.int64)
        labels = np.full((count, self.sequence_length), IGNORED_LABEL, np.int64)
        for row, position in enumerate(positions[positions < self.samples]):
            start = int(self._order[position]) * self.sequence_length
            window = self.stream[start : start + self.sequence_length + 1]
            tokens[row, : len(window) - 1] = window[:-1]
            labels[row, : len(window) - 1] = window[1:]
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))

    def first_labels(self, count: int) -> NDArray[Any]:
        """The tokens that the first `count` windows predict, in the order of the stream."""
        starts = np.sort(self._order[:count]) * self.sequence_length
        return np.concatenate([self.stream[start + 1 : start + self.sequence_length + 1] for start in starts])


class MockSamples:
    """Uniformly random tokens, a pure function of (seed, position): no file, any size of vocabulary.

    Args:
        vocab_size: ids are 0 to vocab_size - 1.
        sequence_length: s, tokens in a sample.
        seed: chooses the tokens.
        samples: positions repeat after this many.
        part: keeps the splits apart (0 train, 1 validation, 2 test).
    """

    def __init__(self, vocab_size: int, sequence_length: int, seed: int, samples: int, part: int = 0) -> None:
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.samples = samples
        self._seed = seed
        self._part = part

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions `first` to `first + count - 1`."""
        positions = positions_of(first, count)
        windows = np.empty((count, self.sequence_length + 1), np.int64)
        for row, position in enumerate(positions):
            raw = philox(self._seed, int(position) % self.samples, self._part).random_raw(self.sequence_length + 1)
            windows[row] = raw % np.uint64(self.vocab_size)
        return shifted(windows)


class EndOfDocumentMasked:
    """Samples whose labels after an end of document do not count: what follows it is another text.

    Megatron's `eod_mask_loss`: the loss is masked where the input token is the end of a document.

    Args:
        samples: the samples.
        eos_id: the token that ends a document.
    """

    def __init__(self, samples: Samples, eos_id: int) -> None:
        self.unmasked = samples
        self._eos_id = eos_id

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample."""
        return self.unmasked.sequence_length

    @property
    def samples(self) -> int:
        """How many there are before they repeat or end."""
        return self.unmasked.samples

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions `first` to `first + count - 1`."""
        batch = self.unmasked.batch(first, count)
        return batch._replace(labels=batch.labels.masked_fill(batch.tokens == self._eos_id, IGNORED_LABEL))


def philox(seed: int, index: int, part: int = 0) -> np.random.Philox:
    """An independent random stream for each (seed, index, part)."""
    return np.random.Philox(key=np.array([seed % _WORD, index], np.uint64), counter=[0, 0, 0, part])


def positions_of(first: int, count: int) -> NDArray[np.int64]:
    """`first` to `first + count - 1`, int64 [count].

    Raises:
        ValueError: a negative position, or no sample.
    """
    if first < 0 or count < 1:
        raise ValueError(f"`first` ({first}) must not be negative and `count` ({count}) must be positive")
    return np.arange(first, first + count, dtype=np.int64)


def shifted(windows: NDArray[np.int64]) -> Batch:
    """Windows of s + 1 tokens, [count, s + 1], as tokens and the labels one further on."""
    whole = torch.from_numpy(windows)
    # Not `contiguous`: of a single sample it would give two views of the same memory, and labels are masked in place.
    return Batch(
        whole[:, :-1].clone(memory_format=torch.contiguous_format),
        whole[:, 1:].clone(memory_format=torch.contiguous_format),
    )
