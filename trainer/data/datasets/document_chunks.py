"""Chunks of documents: texts that never cross a document boundary, for span corruption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..tasks.span_corruption import SpanCorruptor
from .samples import philox_generator
from .seq2seq import Pair


class Documents(Protocol):
    """Random access to the token ids of documents."""

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each document, without EOS."""
        ...

    def read(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """Return tokens `begin` to `end - 1` of a document."""
        ...


class InMemoryDocuments:
    """Documents in memory.

    Args:
        documents: the token ids of each, without EOS.
    """

    def __init__(self, documents: Sequence[NDArray[Any]]) -> None:
        self._documents = documents

    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each document."""
        return np.array([len(document) for document in self._documents], np.int64)

    def read(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """Return tokens `begin` to `end - 1` of a document."""
        return self._documents[document][begin:end]


class CorruptedChunks:
    """Span-corrupted chunks of documents; implements `Pairs`.

    A document is cut into chunks of `max_length` tokens and a remainder. With probability `short_seq_prob`, a chunk has
    a random length from 2 tokens on instead (as in NeMo). Chunks of a single token cannot be corrupted and are skipped.
    """

    def __init__(
        self, documents: Documents, corruptor: SpanCorruptor, max_length: int, short_seq_prob: float = 0.0
    ) -> None:
        self.documents = documents
        self.corruptor = corruptor
        lengths = documents.lengths()
        if short_seq_prob:
            cuts = [
                _chunk_boundaries(document, int(length), max_length, short_seq_prob)
                for document, length in enumerate(lengths)
            ]
            counts = np.array([len(bounds) - 1 for bounds in cuts], np.int64)
            begins = np.concatenate([np.array(bounds[:-1], np.int64) for bounds in cuts] or [np.empty(0, np.int64)])
            ends = np.concatenate([np.array(bounds[1:], np.int64) for bounds in cuts] or [np.empty(0, np.int64)])
            self._document = np.repeat(np.arange(len(lengths)), counts)
        else:
            counts = -(-lengths // max_length)
            self._document = np.repeat(np.arange(len(lengths)), counts)
            chunk_index = np.arange(len(self._document)) - np.repeat(counts.cumsum() - counts, counts)
            begins = chunk_index * max_length
            ends = np.minimum(begins + max_length, lengths[self._document])
        kept = ends - begins > 1
        self._document, self._begins, self._ends = self._document[kept], begins[kept], ends[kept]

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._document)

    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the maximum tokens of each pair on both sides."""
        lengths = self._ends - self._begins
        max_length = int(lengths.max(initial=2))
        sides = np.array([(0, 0), (0, 0), *(self.corruptor.lengths(length) for length in range(2, max_length + 1))])
        return sides[lengths, 0], sides[lengths, 1]

    def pair(self, number: int, rng: np.random.Philox) -> Pair:
        """Return both sides of a chunk."""
        text = self.documents.read(int(self._document[number]), int(self._begins[number]), int(self._ends[number]))
        pair = self.corruptor.pair(text.astype(np.int64), rng)
        assert pair is not None
        return pair


def _chunk_boundaries(document: int, length: int, max_length: int, short_seq_prob: float) -> list[int]:
    """Return the chunk boundaries of a document, from 0 to its length; the same in every run."""
    rng = philox_generator(0, document, 1)
    cuts = [0]
    while cuts[-1] < length:
        is_short = int(rng.random_raw()) < short_seq_prob * 2**64
        chunk = 2 + int(rng.random_raw()) % (max_length - 1) if is_short else max_length
        cuts.append(min(cuts[-1] + chunk, length))
    return cuts
