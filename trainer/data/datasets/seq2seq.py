"""Batches for encoder-decoder models: pairs of token sequences, padded to fixed lengths or packed.

A batch is a dict of tensors (B rows, S encoder tokens, T decoder tokens):

    encoder_tokens     int64 [B, S]
    decoder_tokens     int64 [B, T]: the targets shifted right by one; padding is the start token, as in T5
    labels             int64 [B, T]: the targets, followed by `IGNORE_INDEX`
    encoder_padding    bool [B, S], True for tokens, False for padding; only if rows hold one pair each and may be short
    encoder_documents  int32 [B, S] and
    decoder_documents  int32 [B, T], only for packed rows: the index of the pair within its row, non-decreasing;
                       trailing padding gets its own index, the same on both sides
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .samples import IGNORE_INDEX, Samples, TensorBatch, philox_generator, position_range, random_tokens

PAIR_RNG_STREAM = 1 << 20
"""Random stream of the draws that make pairs, distinct from those that order samples; see `philox_generator`."""


class Pair(NamedTuple):
    """Token ids of the encoder input, [n], and the decoder target, [m], each with its EOS token."""

    encoder: NDArray[Any]
    decoder: NDArray[Any]


class PairShape(NamedTuple):
    """Size of every row.

    Attributes:
        encoder_length: S, tokens on the encoder side.
        decoder_length: T, tokens on the decoder side.
        pad_id: pads both sides; also the decoder's start token.
    """

    encoder_length: int
    decoder_length: int
    pad_id: int


def collate_full(encoder: NDArray[np.int64], targets: NDArray[np.int64], shape: PairShape) -> TensorBatch:
    """Build a batch of pairs that fill the encoder side without padding.

    Args:
        encoder: [B, S].
        targets: the decoder's targets, [B, up to T]; `IGNORE_INDEX` is excluded from the loss.
    """
    rows, length = targets.shape
    labels = np.full((rows, shape.decoder_length), IGNORE_INDEX, np.int64)
    labels[:, :length] = targets
    return _tensors(encoder_tokens=encoder, decoder_tokens=_shift_right(labels, shape.pad_id), labels=labels)


def collate_padded(pairs: Sequence[Pair | None], shape: PairShape) -> TensorBatch:
    """Build a batch of one padded pair per row; None gives a row that is excluded from the loss."""
    encoder = np.full((len(pairs), shape.encoder_length), shape.pad_id, np.int64)
    labels = np.full((len(pairs), shape.decoder_length), IGNORE_INDEX, np.int64)
    present = np.zeros(encoder.shape, np.bool_)
    for row, pair in enumerate(pairs):
        # An all-padding row would make the attention softmax undefined.
        present[row, : 1 if pair is None else len(pair.encoder)] = True
        if pair is not None:
            encoder[row, : len(pair.encoder)] = pair.encoder
            labels[row, : len(pair.decoder)] = pair.decoder
    return _tensors(
        encoder_tokens=encoder,
        decoder_tokens=_shift_right(labels, shape.pad_id),
        labels=labels,
        encoder_padding=present,
    )


def collate_packed(rows: Sequence[Sequence[Pair]], shape: PairShape) -> TensorBatch:
    """Build a batch of rows with several pairs each, concatenated on both sides."""
    encoder = np.full((len(rows), shape.encoder_length), shape.pad_id, np.int64)
    labels = np.full((len(rows), shape.decoder_length), IGNORE_INDEX, np.int64)
    decoder = np.full(labels.shape, shape.pad_id, np.int64)
    encoder_documents, decoder_documents = np.empty(encoder.shape, np.int32), np.empty(labels.shape, np.int32)
    for row, pairs in enumerate(rows):
        encoder_start, decoder_start = 0, 0
        for number, pair in enumerate(pairs):
            encoder_end, decoder_end = encoder_start + len(pair.encoder), decoder_start + len(pair.decoder)
            encoder[row, encoder_start:encoder_end] = pair.encoder
            labels[row, decoder_start:decoder_end] = pair.decoder
            decoder[row, decoder_start + 1 : decoder_end] = pair.decoder[:-1]
            encoder_documents[row, encoder_start:encoder_end] = decoder_documents[row, decoder_start:decoder_end] = (
                number
            )
            encoder_start, decoder_start = encoder_end, decoder_end
        encoder_documents[row, encoder_start:] = decoder_documents[row, decoder_start:] = len(pairs)
    return _tensors(
        encoder_tokens=encoder,
        decoder_tokens=decoder,
        labels=labels,
        encoder_documents=encoder_documents,
        decoder_documents=decoder_documents,
    )


def _shift_right(labels: NDArray[np.int64], pad_id: int) -> NDArray[np.int64]:
    """Return the decoder input of rows with one pair each: labels shifted right."""
    tokens = np.full(labels.shape, pad_id, np.int64)
    tokens[:, 1:] = np.where(labels[:, :-1] == IGNORE_INDEX, pad_id, labels[:, :-1])
    return tokens


def _tensors(**arrays: NDArray[Any]) -> TensorBatch:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# ---------------------------------------------------------------- pairs from windows of text


def window_tokens(windows: Samples, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of windows: their labels, since every token but the first is a label exactly once per epoch.

    Returns:
        Token ids, int64 [B, N], `IGNORE_INDEX` after the end of a short window; and the number of tokens of each
        window, int64 [B], 0 past the end of a split.
    """
    tokens = windows.batch(first, count).labels.numpy()
    return tokens, (tokens != IGNORE_INDEX).sum(axis=1)


class SplitWindows:
    """Windows of text, each split into one pair of variable lengths.

    Args:
        windows: of N tokens.
        split: splits a text, int64 [1 to N], into a pair, using a random generator; returns None if it is too short.
        shape: of the rows; each pair must fit.
        seed: of the random generator; for evaluation the same for all runs.
    """

    def __init__(
        self,
        windows: Samples,
        split: Callable[[NDArray[np.int64], np.random.Philox], Pair | None],
        shape: PairShape,
        seed: int,
    ) -> None:
        self.windows = windows
        self.shape = shape
        self.sequence_length = shape.encoder_length
        self.samples = windows.samples
        self._divide = split
        self._seed = seed

    def batch(self, first: int, count: int) -> TensorBatch:
        """Return the samples at positions `first` to `first + count - 1`."""
        texts = window_tokens(self.windows, first, count)
        pairs = [
            self._divide(tokens[:length], philox_generator(self._seed, int(position), PAIR_RNG_STREAM))
            if length
            else None
            for position, tokens, length in zip(position_range(first, count), *texts, strict=True)
        ]
        return collate_padded(pairs, self.shape)


class MockPairs:
    """Uniformly random tokens that fill both sides: for measuring speed.

    Args:
        vocab_size: ids are 0 to vocab_size - 1.
        samples: positions repeat after this many.
        rng_stream: random stream of the split (0 train, 1 validation, 2 test).
    """

    def __init__(self, vocab_size: int, shape: PairShape, seed: int, samples: int, rng_stream: int = 0) -> None:
        self.vocab_size = vocab_size
        self.shape = shape
        self.sequence_length = shape.encoder_length
        self.samples = samples
        self._seed = seed
        self._rng_stream = rng_stream

    def batch(self, first: int, count: int) -> TensorBatch:
        """Return the samples at positions `first` to `first + count - 1`."""
        length = self.shape.encoder_length + self.shape.decoder_length
        positions = position_range(first, count) % self.samples
        rows = random_tokens(self.vocab_size, positions, length, self._seed, self._rng_stream)
        return collate_full(rows[:, : self.shape.encoder_length], rows[:, self.shape.encoder_length :], self.shape)
