"""Samples of span corruption: encoder inputs and decoder targets made from texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config.span_lengths import Corruption, corrupted_lengths, noise_counts
from ...utils.errors import UserError
from ..datasets.samples import IGNORE_INDEX, Samples, TensorBatch, philox_generator, position_range
from ..datasets.seq2seq import PAIR_RNG_STREAM, Pair, PairShape, collate_full, window_tokens
from .noise_spans import (
    Mask,
    SpanLengthDistribution,
    SpanMask,
    apply_span_mask,
    ngram_span_mask,
    random_span_mask,
    unit_boundaries,
)


class NgramSpanConfig(NamedTuple):
    """Parameters of NeMo's spans.

    Attributes:
        word_edges: `token_word_edges` of the tokenizer for whole word masking; None masks tokens.
    """

    lengths: SpanLengthDistribution
    word_edges: tuple[Mask, Mask] | None


@dataclass(frozen=True, eq=False)
class SpanCorruptor:
    """Corrupt texts of any length into pairs.

    Attributes:
        corruption: noise density and mean span length.
        ngrams: parameters of NeMo's spans; None draws T5's.
        sentinels: ids of <extra_id_0>, <extra_id_1>, ...
        eos_id: ends both sides.
        max_length: maximum tokens of a text.

    Raises:
        UserError: there are too few sentinels for a text of maximum length.
    """

    corruption: Corruption
    ngrams: NgramSpanConfig | None
    sentinels: NDArray[np.int64]
    eos_id: int
    max_length: int
    decoder_length: int

    def __post_init__(self) -> None:
        needed = noise_counts(self.max_length, self.corruption)[1] if self.ngrams is None else 1
        if len(self.sentinels) < needed:
            raise UserError(
                f"span corruption of {self.max_length:,} tokens has {needed} spans, and the tokenizer "
                f"{len(self.sentinels)} sentinels; set `model.tokenizer.num_sentinel_tokens={needed}`, or longer spans "
                "(`model.data.mean_ngram_size`)"
            )

    def pair(self, text: NDArray[np.int64], rng: np.random.Philox) -> Pair | None:
        """Return both sides of a text, int64 [N]; None for a single token, which cannot be corrupted.

        Args:
            rng: random generator; the pair is a function of it and the text.
        """
        if len(text) < 2:
            return None
        if self.ngrams is None:
            words = rng.random_raw(len(text) - 2)[None]
            mask = random_span_mask(words, len(text), self.corruption)
        else:
            units = unit_boundaries(text, self.ngrams.word_edges)
            budget = noise_counts(len(text), self.corruption)[0]
            # Noise, sentinels and EOS must fit on the decoder side.
            budget = min(budget, self.decoder_length - 2)
            max_spans = min(len(self.sentinels), self.decoder_length - 1 - budget)
            spans = ngram_span_mask(rng, units, self.ngrams.lengths, budget, max_spans)
            mask = SpanMask(spans.noise[None], spans.starts[None])
        encoder, decoder = apply_span_mask(text[None], mask, self.sentinels)
        return Pair(np.append(encoder, self.eos_id), np.append(decoder, self.eos_id))

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the maximum tokens on both sides for a text of `length` tokens."""
        if self.ngrams is None:
            return corrupted_lengths(length, self.corruption)
        noise = noise_counts(length, self.corruption)[0]
        return length + 1, min(2 * noise + 1, self.decoder_length)


class CorruptedWindows:
    """Windows of text under T5's span corruption; every row fills the encoder side without padding.

    A window truncated by the end of a split is excluded from the loss.

    Args:
        windows: of N tokens; `corrupted_lengths(N)` are the lengths of both sides.
        corruptor: draws T5's spans.
        seed: of the spans; for evaluation the same for all runs.
    """

    def __init__(self, windows: Samples, corruptor: SpanCorruptor, shape: PairShape, seed: int) -> None:
        self.windows = windows
        self.corruptor = corruptor
        self.shape = shape
        self.sequence_length = shape.encoder_length
        self.samples = windows.samples
        self._seed = seed

    def batch(self, first: int, count: int) -> TensorBatch:
        """Return the samples at positions `first` to `first + count - 1`."""
        tokens, lengths = window_tokens(self.windows, first, count)
        length = tokens.shape[1]
        words = np.stack(
            [
                philox_generator(self._seed, int(position), PAIR_RNG_STREAM).random_raw(length - 2)
                for position in position_range(first, count)
            ]
        )
        mask = random_span_mask(words, length, self.corruptor.corruption)
        encoder, decoder = (
            _append_eos(side.reshape(count, -1), self.corruptor.eos_id)
            for side in apply_span_mask(tokens, mask, self.corruptor.sentinels)
        )
        short = lengths < length
        encoder[short] = self.shape.pad_id
        decoder[short] = IGNORE_INDEX
        return collate_full(encoder, decoder, self.shape)


def _append_eos(rows: NDArray[np.int64], eos_id: int) -> NDArray[np.int64]:
    return np.pad(rows, ((0, 0), (0, 1)), constant_values=eos_id)
