"""Masked language modeling (BERT, arXiv 1810.04805, 3.1): selected tokens are masked, and the model predicts them.

Of the selected tokens, 80 % become the mask token, 10 % a random token and 10 % are unchanged. Their labels are the
original tokens; all other labels are `IGNORE_INDEX`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..datasets.document_ids import document_ids
from ..datasets.samples import IGNORE_INDEX, Samples, TensorBatch, philox_generator, position_range
from ..datasets.seq2seq import PAIR_RNG_STREAM, window_tokens
from .noise_spans import ngram_span_mask, unit_boundaries
from .span_corruption import NgramSpanConfig


class MaskTokens(NamedTuple):
    """Special tokens and replacements of a tokenizer.

    Attributes:
        mask_id: the mask token.
        eos_id: ends documents; never selected.
        pad_id: pads short windows.
        replacement_ids: ids of random replacements, int64 [n].
    """

    mask_id: int
    eos_id: int
    pad_id: int
    replacement_ids: NDArray[np.int64]


class MaskedWindows:
    """Windows of text with masked tokens: `tokens` and `labels`, int64 [B, S].

    A window truncated by the end of a split is excluded from the loss.

    Args:
        windows: of S tokens.
        mask_prob: fraction of the tokens to select, `model.data.masked_lm_prob`; at least one in each window with any
            token but EOS.
        ngrams: NeMo's spans; None selects every token independently.
        seed: of the selection; for evaluation the same for all runs.
        with_document_ids: add `documents`, int32 [B, S]: the document index of each token.
    """

    def __init__(
        self,
        windows: Samples,
        mask_prob: float,
        ngrams: NgramSpanConfig | None,
        special: MaskTokens,
        seed: int,
        *,
        with_document_ids: bool = False,
    ) -> None:
        self.windows = windows
        self.sequence_length = windows.sequence_length
        self.samples = windows.samples
        self._mask_prob = mask_prob
        self._ngrams = ngrams
        self._special = special
        self._seed = seed
        self._numbers = with_document_ids

    def batch(self, first: int, count: int) -> TensorBatch:
        """Return the samples at positions `first` to `first + count - 1`."""
        texts, lengths = window_tokens(self.windows, first, count)
        tokens = np.where(texts == IGNORE_INDEX, self._special.pad_id, texts)
        labels = np.full(tokens.shape, IGNORE_INDEX, np.int64)
        documents = document_ids(torch.from_numpy(tokens), self._special.eos_id) if self._numbers else None
        for row, position in enumerate(position_range(first, count).tolist()):
            if lengths[row] == tokens.shape[1]:
                rng = philox_generator(self._seed, position, PAIR_RNG_STREAM)
                selected = self._select(tokens[row], rng)
                labels[row, selected] = tokens[row, selected]
                tokens[row, selected] = self._replacements(tokens[row, selected], rng)
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        return batch if documents is None else {**batch, "documents": documents}

    def _select(self, text: NDArray[np.int64], rng: np.random.Philox) -> NDArray[np.int64]:
        """Return the positions of the selected tokens."""
        is_eos = text == self._special.eos_id
        candidates = np.flatnonzero(~is_eos)
        if not len(candidates):
            return candidates
        count = max(1, round(len(candidates) * self._mask_prob))
        if self._ngrams is not None:
            units = unit_boundaries(text, self._ngrams.word_edges)
            return np.flatnonzero(ngram_span_mask(rng, units, self._ngrams.lengths, count, count, is_eos).noise)
        return candidates[np.argsort(rng.random_raw(len(candidates)), kind="stable")[:count]]

    def _replacements(self, tokens: NDArray[np.int64], rng: np.random.Philox) -> NDArray[np.int64]:
        """Return the replacements of the selected tokens."""
        draws = rng.random_raw(len(tokens)) % np.uint64(10)
        others = self._special.replacement_ids[
            rng.random_raw(len(tokens)) % np.uint64(len(self._special.replacement_ids))
        ]
        return np.where(draws < 8, self._special.mask_id, np.where(draws == 8, others, tokens))
