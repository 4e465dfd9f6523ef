"""Masked language modelling (BERT, arXiv 1810.04805, 3.1): some tokens are hidden, and the model says what they were.

Of the tokens that are chosen, 80 % become the mask, 10 % another token and 10 % stay; the labels are the tokens
themselves, and `IGNORED_LABEL` everywhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..datasets.document_ids import document_numbers
from ..datasets.samples import IGNORED_LABEL, Samples, philox, positions_of
from ..datasets.seq2seq import PAIR_PART, NamedTensors, texts_of
from .noise_spans import ngram_spans, units_of
from .span_corruption import NgramSpans


class MaskTokens(NamedTuple):
    """What the tokenizer offers.

    Attributes:
        mask_id: hides a token.
        eos_id: ends documents; it is never chosen.
        pad_id: fills up short windows.
        others: ids that a token may be replaced with, int64 [n].
    """

    mask_id: int
    eos_id: int
    pad_id: int
    others: NDArray[np.int64]


class MaskedWindows:
    """Windows of text in which tokens are hidden: `tokens` and `labels`, int64 [rows, s].

    A window that the end of a split cuts short gives a row in which nothing counts.

    Args:
        windows: of s tokens.
        share: part of the tokens that is chosen, `model.data.masked_lm_prob`; at least one in each window
            that has any but ends of documents.
        ngrams: NeMo's spans; None chooses every token for itself.
        special: tokens with a part to play.
        seed: chooses; for evaluation the same for all runs.
        numbers: add `documents`, int32 [rows, s]: the number of the document each token belongs to.
    """

    def __init__(
        self,
        windows: Samples,
        share: float,
        ngrams: NgramSpans | None,
        special: MaskTokens,
        seed: int,
        *,
        numbers: bool = False,
    ) -> None:
        self.windows = windows
        self._share = share
        self._ngrams = ngrams
        self._special = special
        self._seed = seed
        self._numbers = numbers

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample."""
        return self.windows.sequence_length

    @property
    def samples(self) -> int:
        """How many there are before they repeat or end."""
        return self.windows.samples

    def batch(self, first: int, count: int) -> NamedTensors:
        """The samples at positions `first` to `first + count - 1`."""
        texts, lengths = texts_of(self.windows, first, count)
        tokens = np.where(texts == IGNORED_LABEL, self._special.pad_id, texts)
        labels = np.full(tokens.shape, IGNORED_LABEL, np.int64)
        numbers = document_numbers(torch.from_numpy(tokens), self._special.eos_id) if self._numbers else None
        for row, position in enumerate(positions_of(first, count).tolist()):
            if lengths[row] == tokens.shape[1]:
                source = philox(self._seed, position, PAIR_PART)
                chosen = self._choose(tokens[row], source)
                labels[row, chosen] = tokens[row, chosen]
                tokens[row, chosen] = self._hidden(tokens[row, chosen], source)
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        return batch if numbers is None else {**batch, "documents": numbers}

    def _choose(self, text: NDArray[np.int64], source: np.random.Philox) -> NDArray[np.int64]:
        """The places that are chosen."""
        kept = text == self._special.eos_id
        places = np.flatnonzero(~kept)
        if not len(places):
            return places
        count = max(1, round(len(places) * self._share))
        if self._ngrams is not None:
            units = units_of(text, self._ngrams.inside)
            return np.flatnonzero(ngram_spans(source, units, self._ngrams.lengths, count, count, kept).noise)
        return places[np.argsort(source.random_raw(len(places)), kind="stable")[:count]]

    def _hidden(self, tokens: NDArray[np.int64], source: np.random.Philox) -> NDArray[np.int64]:
        """What stands in the place of the chosen tokens."""
        tenths = source.random_raw(len(tokens)) % np.uint64(10)
        others = self._special.others[source.random_raw(len(tokens)) % np.uint64(len(self._special.others))]
        return np.where(tenths < 8, self._special.mask_id, np.where(tenths == 8, others, tokens))
