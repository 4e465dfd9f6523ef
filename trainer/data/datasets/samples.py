"""Samples as pure functions of their position: (seed, consumed samples) -> tokens and labels, without state to save.

Randomness comes from Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a counter-based
generator keyed by (seed, epoch) or (seed, sample). Only its raw 64-bit output is used, which numpy keeps stable across
versions; it gives no such guarantee for its shuffles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORE_INDEX = -100
"""Label excluded from the loss, as `ignore_index` in `torch.nn.functional.cross_entropy`."""

_WORD = 1 << 64


class Batch(NamedTuple):
    """A batch of samples.

    Attributes:
        tokens: int64 [B, S].
        labels: `labels[i, t]` is the token after `tokens[i, t]`, or `IGNORE_INDEX`; int64 [B, S].
        documents: document index within the sample of each token, from 0, int32 [B, S]; None if attention and positions
            cross document boundaries.
        padding: True for tokens, False for padding at the end of rows, bool [B, S]; None if it is not needed.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None
    padding: Tensor | None = None


TensorBatch = dict[str, Tensor]
"""A batch of a task whose fields `Batch` does not have: tensors by name."""
BatchT = TypeVar("BatchT", covariant=True)


class AnySamples(Protocol[BatchT]):
    """Random access to samples by position.

    Attributes:
        sequence_length: S, tokens in a sample; of the encoder for encoder-decoder models.
        samples: samples per epoch (training), or in total (evaluation).
    """

    @property
    def sequence_length(self) -> int: ...  # noqa: D102
    @property
    def samples(self) -> int: ...  # noqa: D102

    def batch(self, first: int, count: int) -> BatchT:
        """Return the samples at positions `first` to `first + count - 1`, independent of earlier calls."""
        ...


Samples = AnySamples[Batch]
DictSamples = AnySamples[TensorBatch]


def batch_tensors(batch: Batch | TensorBatch) -> TensorBatch:
    """Return the tensors of a batch by name, without optional fields that are None."""
    if isinstance(batch, Batch):
        return {name: tensor for name, tensor in batch._asdict().items() if tensor is not None}
    return batch


def concatenate_batches(batches: Sequence[Any], order: Tensor | None = None) -> Any:
    """Return the rows of several batches of one kind as one batch of that kind.

    Args:
        batches: at least one.
        order: index of each row of the result in the concatenated rows, int64 [B]; None keeps the order.
    """
    fields = [batch_tensors(batch) for batch in batches]
    joined: TensorBatch = {name: torch.cat([one[name] for one in fields]) for name in fields[0]}
    if order is not None:
        joined = {name: tensor[order] for name, tensor in joined.items()}
    return Batch(**joined) if isinstance(batches[0], Batch) else joined


class TrainingWindows:
    """Endless epochs of non-overlapping windows over a token stream, in random order.

    Every epoch shifts all windows by a random offset, so that window boundaries move, and uses each window once, in a
    new permutation. All epochs have the same number of windows, so the position alone determines epoch and window. The
    offset ranges over all tokens that the windows do not cover, so no token is excluded for good.

    Args:
        stream: token ids, [N] of any integer dtype; not copied.
        sequence_length: S, tokens in a sample; labels need one token more.
        seed: of offsets and permutations.

    Raises:
        ValueError: the stream has fewer than S + 1 tokens.
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
        """Return the first token of each window of an epoch, in sampling order; int64 [samples]."""
        cached = self._epoch
        if cached is not None and cached[0] == epoch:
            return cached[1]
        raw = philox_generator(self._seed, epoch).random_raw(self.samples + 1)
        offset = int(raw[-1]) % (self._slack + 1)
        # Sorting independent random words gives a uniform permutation.
        starts = np.argsort(raw[:-1], kind="stable") * self.sequence_length + offset
        self._epoch = epoch, starts
        return starts

    def batch(self, first: int, count: int) -> Batch:
        """Return the training samples at positions `first` to `first + count - 1`, counted from 0."""
        positions = position_range(first, count)
        epochs = positions // self.samples
        starts = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            starts[in_epoch] = self.starts(int(epoch))[positions[in_epoch] % self.samples]
        windows = self.stream[starts[:, None] + np.arange(self.sequence_length + 1)].astype(np.int64)
        return shift_labels(windows)


class EvaluationWindows:
    """Consecutive windows over a token stream: each token but the first is a label exactly once.

    The windows are in a fixed random order, so that the first k of them are a fair sample of the whole stream for any
    k. The order does not depend on the seed of the run, so that runs are compared on the same windows.

    Args:
        stream: token ids, [N] of any integer dtype; not copied.
        sequence_length: S, tokens in a sample.
        pad_id: pads the last window; its labels are ignored.

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
        self._order = np.argsort(philox_generator(0, 0).random_raw(self.samples), kind="stable")

    def batch(self, first: int, count: int) -> Batch:
        """Return the windows `first` to `first + count - 1`; positions past the end are padding with ignored labels.

        The fixed shape lets every rank run the same number of equal batches.
        """
        positions = position_range(first, count)
        starts = self._order[positions[positions < self.samples]] * self.sequence_length
        windows = [self.stream[start : start + self.sequence_length + 1] for start in starts.tolist()]
        return pad_windows(windows, count, self.sequence_length, self._pad_id)

    def first_labels(self, count: int) -> NDArray[Any]:
        """Return the labels of the first `count` windows, in stream order."""
        starts = np.sort(self._order[:count]) * self.sequence_length
        return np.concatenate([self.stream[start + 1 : start + self.sequence_length + 1] for start in starts])


class MockSamples:
    """Uniformly random tokens, a pure function of (seed, position); for any vocabulary size.

    Args:
        vocab_size: ids are 0 to vocab_size - 1.
        sequence_length: S, tokens in a sample.
        samples: positions repeat after this many.
        rng_stream: random stream of the split (0 train, 1 validation, 2 test).
    """

    def __init__(self, vocab_size: int, sequence_length: int, seed: int, samples: int, rng_stream: int = 0) -> None:
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.samples = samples
        self._seed = seed
        self._rng_stream = rng_stream

    def batch(self, first: int, count: int) -> Batch:
        """Return the samples at positions `first` to `first + count - 1`."""
        positions = position_range(first, count) % self.samples
        windows = random_tokens(self.vocab_size, positions, self.sequence_length + 1, self._seed, self._rng_stream)
        return shift_labels(windows)


class EodMaskedSamples:
    """Samples with the label after each end-of-document token masked, since it belongs to another document.

    Megatron's `eod_mask_loss`: the loss is masked where the input token ends a document.
    """

    def __init__(self, samples: Samples, eos_id: int) -> None:
        self.source = samples
        self.sequence_length = samples.sequence_length
        self.samples = samples.samples
        self._eos_id = eos_id

    def batch(self, first: int, count: int) -> Batch:
        """Return the samples at positions `first` to `first + count - 1`."""
        batch = self.source.batch(first, count)
        return batch._replace(labels=batch.labels.masked_fill(batch.tokens == self._eos_id, IGNORE_INDEX))


def random_tokens(
    vocab_size: int, positions: NDArray[np.int64], length: int, seed: int, stream: int
) -> NDArray[np.int64]:
    """Return uniformly random token ids, int64 [len(positions), length]; each row depends on its position."""
    rows = [philox_generator(seed, position, stream).random_raw(length) for position in positions.tolist()]
    return (np.stack(rows) % np.uint64(vocab_size)).astype(np.int64)


def philox_generator(seed: int, index: int, stream: int = 0) -> np.random.Philox:
    """Return an independent random generator for each (seed, index, stream)."""
    return np.random.Philox(key=np.array([seed % _WORD, index], np.uint64), counter=[0, 0, 0, stream])


def position_range(first: int, count: int) -> NDArray[np.int64]:
    """Return `first` to `first + count - 1`, int64 [count].

    Raises:
        ValueError: `first` is negative, or `count` is not positive.
    """
    if first < 0 or count < 1:
        raise ValueError(f"`first` ({first}) must not be negative and `count` ({count}) must be positive")
    return np.arange(first, first + count, dtype=np.int64)


def pad_windows(windows: Sequence[NDArray[Any]], rows: int, sequence_length: int, pad_id: int) -> Batch:
    """Split windows of up to S + 1 tokens into tokens and next-token labels; the rest of [rows, S] is padding."""
    tokens = np.full((rows, sequence_length), pad_id, np.int64)
    labels = np.full((rows, sequence_length), IGNORE_INDEX, np.int64)
    for row, window in enumerate(windows):
        tokens[row, : len(window) - 1] = window[:-1]
        labels[row, : len(window) - 1] = window[1:]
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))


def shift_labels(windows: NDArray[np.int64]) -> Batch:
    """Split windows of S + 1 tokens, [B, S + 1], into tokens and next-token labels."""
    tokens = torch.from_numpy(windows)
    # Not `contiguous()`: for a single sample both would be views of the same memory, and labels are masked in place.
    return Batch(
        tokens[:, :-1].clone(memory_format=torch.contiguous_format),
        tokens[:, 1:].clone(memory_format=torch.contiguous_format),
    )
