"""Pieces of documents: texts that never hold two documents, for span corruption that respects their borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..tasks.span_corruption import Corruptor
from .samples import philox
from .seq2seq import Pair


class Documents(Protocol):
    """Token ids by document."""

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, without an end token."""
        ...

    def read(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """Tokens `begin` to `end - 1` of a document."""
        ...


class TokenDocuments:
    """Documents in memory.

    Args:
        documents: the token ids of each, without an end token.
    """

    def __init__(self, documents: Sequence[NDArray[Any]]) -> None:
        self._documents = documents

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.array([len(document) for document in self._documents], np.int64)

    def read(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """Tokens `begin` to `end - 1` of a document."""
        return self._documents[document][begin:end]


class CorruptedPieces:
    """Pieces of documents under span corruption: `Pairs`.

    A document is cut into pieces of `longest` tokens, the last one of what is left; with `short_share`, each piece has
    a random length from 2 tokens on with that probability (NeMo's `short_seq_prob`). A piece of one token, which leaves
    nothing to corrupt, is left out.

    Args:
        documents: what is cut.
        corruptor: makes a pair of a piece.
        longest: tokens of a piece.
        short_share: probability of a shorter piece.
    """

    def __init__(self, documents: Documents, corruptor: Corruptor, longest: int, short_share: float = 0.0) -> None:
        self.documents = documents
        self.corruptor = corruptor
        lengths = documents.lengths()
        if short_share:
            cuts = [_cuts(number, int(length), longest, short_share) for number, length in enumerate(lengths)]
            counts = np.array([len(of_one) - 1 for of_one in cuts], np.int64)
            begins = np.concatenate([np.array(of_one[:-1], np.int64) for of_one in cuts] or [np.empty(0, np.int64)])
            ends = np.concatenate([np.array(of_one[1:], np.int64) for of_one in cuts] or [np.empty(0, np.int64)])
            self._document = np.repeat(np.arange(len(lengths)), counts)
        else:
            counts = -(-lengths // longest)
            self._document = np.repeat(np.arange(len(lengths)), counts)
            number = np.arange(len(self._document)) - np.repeat(counts.cumsum() - counts, counts)
            begins = number * longest
            ends = np.minimum(begins + longest, lengths[self._document])
        kept = ends - begins > 1
        self._document, self._begins, self._ends = self._document[kept], begins[kept], ends[kept]

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self._document)

    def lengths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The most tokens each pair has on both sides."""
        lengths = self._ends - self._begins
        longest = int(lengths.max(initial=2))
        sides = np.array([(0, 0), (0, 0), *(self.corruptor.lengths(length) for length in range(2, longest + 1))])
        return sides[lengths, 0], sides[lengths, 1]

    def pair(self, number: int, source: np.random.Philox) -> Pair:
        """Both sides of a piece."""
        text = self.documents.read(int(self._document[number]), int(self._begins[number]), int(self._ends[number]))
        pair = self.corruptor.pair(text.astype(np.int64), source)
        assert pair is not None
        return pair


def _cuts(document: int, length: int, longest: int, short_share: float) -> list[int]:
    """Where a document is cut, from 0 to its length: the same in every run."""
    source = philox(0, document, 1)
    cuts = [0]
    while cuts[-1] < length:
        is_short = int(source.random_raw()) < short_share * 2**64
        piece = 2 + int(source.random_raw()) % (longest - 1) if is_short else longest
        cuts.append(min(cuts[-1] + piece, length))
    return cuts
