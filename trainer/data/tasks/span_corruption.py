"""Samples of span corruption: from texts to what T5's encoder reads and its decoder writes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config.span_lengths import Corruption, corrupted_lengths, noise_counts
from ...utils.errors import UserError
from ..datasets.samples import IGNORED_LABEL, Samples, philox, positions_of
from ..datasets.seq2seq import PAIR_PART, NamedTensors, Pair, Shape, filled, texts_of
from .noise_spans import Mask, SpanLengths, SpanMask, corrupt, ngram_spans, random_spans, units_of


class NgramSpans(NamedTuple):
    """NeMo's way to draw spans.

    Attributes:
        lengths: how long they are.
        inside: where words are kept whole: `word_edges` of the tokenizer; None masks tokens.
    """

    lengths: SpanLengths
    inside: tuple[Mask, Mask] | None


class Corruptor:
    """Makes a pair of a text of any length.

    Args:
        corruption: how much is noise.
        ngrams: NeMo's spans; None draws T5's.
        sentinels: ids of <extra_id_0>, <extra_id_1>, ...
        eos_id: ends both sides.
        longest: tokens of the longest text.
        decoder_length: tokens that fit on the decoder's side.

    Raises:
        UserError: there are too few sentinels for the longest text.
    """

    def __init__(
        self,
        corruption: Corruption,
        ngrams: NgramSpans | None,
        sentinels: NDArray[np.int64],
        eos_id: int,
        longest: int,
        decoder_length: int,
    ) -> None:
        self.corruption = corruption
        self.ngrams = ngrams
        self.sentinels = sentinels
        self.eos_id = eos_id
        self.decoder_length = decoder_length
        needed = noise_counts(longest, corruption)[1] if ngrams is None else 1
        if len(sentinels) < needed:
            raise UserError(
                f"span corruption of {longest:,} tokens has {needed} spans, and the tokenizer {len(sentinels)} "
                f"sentinels; set `model.tokenizer.num_sentinel_tokens={needed}`, or longer spans "
                "(`model.data.mean_ngram_size`)"
            )

    def pair(self, text: NDArray[np.int64], source: np.random.Philox) -> Pair | None:
        """Both sides of a text, int64 [n]; None where a single token leaves nothing to corrupt.

        Args:
            text: the tokens.
            source: random words; the pair is a function of them and the text.
        """
        if len(text) < 2:
            return None
        if self.ngrams is None:
            words = source.random_raw(len(text) - 2)[None]
            mask = random_spans(words, len(text), self.corruption)
        else:
            units = units_of(text, self.ngrams.inside)
            budget = noise_counts(len(text), self.corruption)[0]
            # Noise, sentinels and the end must fit on the decoder's side.
            budget = min(budget, self.decoder_length - 2)
            most = min(len(self.sentinels), self.decoder_length - 1 - budget)
            drawn = ngram_spans(source, units, self.ngrams.lengths, budget, most)
            mask = SpanMask(drawn.noise[None], drawn.starts[None])
        encoder, decoder = corrupt(text[None], mask, self.sentinels)
        return Pair(np.append(encoder, self.eos_id), np.append(decoder, self.eos_id))

    def lengths(self, length: int) -> tuple[int, int]:
        """The most tokens that the two sides of a text of `length` tokens have."""
        if self.ngrams is None:
            return corrupted_lengths(length, self.corruption)
        noise = noise_counts(length, self.corruption)[0]
        return length + 1, min(2 * noise + 1, self.decoder_length)


class CorruptedWindows:
    """Windows of text under T5's span corruption; every row fills the encoder's side to the token.

    A window that the end of a split cuts short gives a row in which nothing counts.

    Args:
        windows: of n tokens, of which `corrupted_lengths(n)` are the lengths of both sides.
        corruptor: draws T5's spans.
        shape: of the rows.
        seed: chooses the spans; for evaluation the same for all runs.
    """

    def __init__(self, windows: Samples, corruptor: Corruptor, shape: Shape, seed: int) -> None:
        self.windows = windows
        self.corruptor = corruptor
        self.shape = shape
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
        tokens, lengths = texts_of(self.windows, first, count)
        length = tokens.shape[1]
        words = np.stack(
            [
                philox(self._seed, int(position), PAIR_PART).random_raw(length - 2)
                for position in positions_of(first, count)
            ]
        )
        mask = random_spans(words, length, self.corruptor.corruption)
        encoder, written = (
            _ended(side.reshape(count, -1), self.corruptor.eos_id)
            for side in corrupt(tokens, mask, self.corruptor.sentinels)
        )
        short = lengths < length
        encoder[short] = self.shape.pad_id
        written[short] = IGNORED_LABEL
        return filled(encoder, written, self.shape)


def _ended(rows: NDArray[np.int64], eos_id: int) -> NDArray[np.int64]:
    return np.pad(rows, ((0, 0), (0, 1)), constant_values=eos_id)
