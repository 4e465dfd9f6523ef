"""Span corruption (T5, arXiv 1910.10683): sentinels replace spans of a text, and the decoder predicts the spans.

    text      Thank you for inviting me to your party last week
    encoder   Thank you <extra_id_0> me to your party <extra_id_1> week </s>
    decoder   <extra_id_0> for inviting <extra_id_1> last </s>

Spans are drawn in one of two ways. T5 draws a fixed number of spans with a fixed total length, so that texts of equal
length give equal lengths on both sides. NeMo draws the length of each span, in words or tokens, so lengths vary.
All draws are functions of raw 64-bit random words, which `numpy` keeps stable across versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config.span_lengths import Corruption, noise_counts

Mask = NDArray[np.bool_]


class SpanMask(NamedTuple):
    """Noise tokens and span starts; spans may be adjacent.

    Attributes:
        noise: bool, shape of the tokens; True for noise.
        starts: bool, same shape; True for the first token of each span.
    """

    noise: Mask
    starts: Mask


# ---------------------------------------------------------------- T5's spans


def random_span_mask(words: NDArray[np.uint64], length: int, corruption: Corruption) -> SpanMask:
    """Draw T5's `random_spans_noise_mask`: alternating kept and noise spans, from a kept one to a noise one.

    The lengths of the noise spans are a uniformly random composition of their sum into positive parts; so are the
    lengths of the kept spans between them.

    Args:
        words: random words, [B, length - 2].
        length: tokens of each text.
        corruption: noise density and mean span length.

    Returns:
        Masks [B, length].
    """
    noise, spans = noise_counts(length, corruption)
    rows = len(words)
    kept_lengths = _random_composition(words[:, : length - noise - 1], length - noise, spans)
    noise_lengths = _random_composition(words[:, length - noise - 1 :], noise, spans)
    ends = np.stack([kept_lengths, noise_lengths], axis=2).reshape(rows, 2 * spans).cumsum(axis=1)
    row = np.arange(rows)[:, None]
    starts = np.zeros((rows, length), np.bool_)
    starts[row, ends[:, :-1:2]] = True
    boundaries = np.zeros((rows, length), np.int32)
    boundaries[row, ends[:, :-1]] = 1
    return SpanMask(boundaries.cumsum(axis=1) % 2 == 1, starts)


def _random_composition(words: NDArray[np.uint64], total: int, parts: int) -> NDArray[np.int64]:
    """Split `total` into positive parts, each way equally likely; [B, parts] from words [B, total - 1]."""
    rows = len(words)
    # The positions of the smallest words are a uniformly random set of cuts.
    cuts = np.sort(np.argsort(words, axis=1, kind="stable")[:, : parts - 1], axis=1) + 1
    bounds = np.concatenate([np.zeros((rows, 1), np.int64), cuts, np.full((rows, 1), total)], axis=1)
    return np.diff(bounds, axis=1)


# ---------------------------------------------------------------- NeMo's spans


class SpanLengthDistribution(NamedTuple):
    """Length distribution of NeMo's spans, in words for whole word masking, else in tokens.

    Attributes:
        cdf: cumulative distribution function at 1, 2, ..., float64 [longest].
    """

    cdf: NDArray[np.float64]

    @classmethod
    def geometric(cls, max_length: int, mean: float) -> SpanLengthDistribution:
        """Build SpanBERT's distribution (arXiv 1907.10529, 3.1): geometric with this mean, clipped to `max_length`.

        The mean after clipping is `span_lengths.clipped_geometric_mean`.
        """
        bounds = 1 - np.full(max_length, 1 - 1 / mean).cumprod()
        return cls(np.append(bounds[:-1], 1.0))

    @classmethod
    def harmonic(cls, max_length: int, *, longer_first: bool) -> SpanLengthDistribution:
        """Build the distribution with p(n) proportional to 1 / n; `longer_first` reverses it."""
        probability = 1 / np.arange(1, max_length + 1)
        probability = (probability[::-1] if longer_first else probability) / probability.sum()
        return cls(np.append(probability.cumsum()[:-1], 1.0))

    def draw(self, word: np.uint64) -> int:
        """Return the length for a random word."""
        return int(np.searchsorted(self.cdf, _fraction(word), side="right")) + 1


def ngram_span_mask(
    rng: np.random.Philox,
    units: NDArray[np.int64],
    lengths: SpanLengthDistribution,
    budget: int,
    max_spans: int,
    protected: Mask | None = None,
) -> SpanMask:
    """Draw spans as NeMo's `create_masked_lm_predictions` does.

    Units are tried in random order. Each starts a span of random length, shortened until it fits into the remaining
    budget and contains no protected token; a unit for which no length fits, or which overlaps an earlier span, is
    skipped.

    Args:
        units: the first token of each unit (word or token), and the length of the text at the end, [n + 1].
        lengths: distribution of span lengths, in units.
        budget: maximum number of noise tokens; at least 1.
        max_spans: maximum number of spans; at least 1.
        protected: True for tokens that are never noise, [length], not all True; None for none.

    Returns:
        Masks [length]. If no unit fits into the budget, one token is noise.
    """
    length = int(units[-1])
    protected = np.zeros(length, np.bool_) if protected is None else protected
    noise, starts = np.zeros(length, np.bool_), np.zeros(length, np.bool_)
    order = np.argsort(rng.random_raw(len(units) - 1), kind="stable")
    remaining = budget
    for first in order.tolist():
        if remaining == 0 or max_spans == 0:
            break
        begin = int(units[first])
        last = min(first + lengths.draw(_word(rng)), len(units) - 1)
        while last > first and (units[last] - begin > remaining or protected[begin : units[last]].any()):
            last -= 1
        end = int(units[last])
        if end == begin or noise[begin:end].any():
            continue
        noise[begin:end], starts[begin] = True, True
        remaining -= end - begin
        max_spans -= 1
    if remaining == budget:
        places = np.flatnonzero(~protected)
        place = places[int(_fraction(_word(rng)) * len(places))]
        noise[place] = starts[place] = True
    return SpanMask(noise, starts)


def unit_boundaries(tokens: NDArray[Any], edges: tuple[Mask, Mask] | None) -> NDArray[np.int64]:
    """Return the first token of each word, and the number of tokens at the end; without `edges` every token is a word.

    Args:
        tokens: [N].
        edges: output of `token_word_edges`: for each token id whether its first, and its last, byte is a word
            character.
    """
    if edges is None:
        return np.arange(len(tokens) + 1)
    begins, ends = edges
    continues = begins[tokens[1:]] & ends[tokens[:-1]]
    return np.append(np.flatnonzero(np.append(True, ~continues)), len(tokens))


def token_word_edges(pieces: Iterator[bytes] | list[bytes]) -> tuple[Mask, Mask]:
    """Return for each token whether its first, and its last, byte is a word character.

    Word characters are letters, digits, the underscore and every byte of a non-ASCII character. A token continues the
    word of the previous one if that ends and this one begins with such a byte, for any tokenizer.

    Args:
        pieces: the bytes of each token id.

    Returns:
        Two masks, bool [V].
    """
    is_word_byte = np.zeros(256, np.bool_)
    is_word_byte[0x80:] = True
    is_word_byte[np.frombuffer(b"_0123456789", np.uint8)] = True
    is_word_byte[ord("a") : ord("z") + 1] = is_word_byte[ord("A") : ord("Z") + 1] = True
    edges = [(bool(piece) and is_word_byte[piece[0]], bool(piece) and is_word_byte[piece[-1]]) for piece in pieces]
    begins, ends = np.array(edges, np.bool_).reshape(-1, 2).T
    return begins, ends


def _word(rng: np.random.Philox) -> np.uint64:
    return np.uint64(rng.random_raw())


def _fraction(word: np.uint64) -> float:
    """Map a random word to [0, 1)."""
    return int(word >> np.uint64(11)) / (1 << 53)


# ---------------------------------------------------------------- both


def apply_span_mask(
    tokens: NDArray[Any], mask: SpanMask, sentinels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Build the encoder and decoder side of each text, without EOS tokens.

    Args:
        tokens: [B, N].
        mask: its noise, [B, N].
        sentinels: ids of <extra_id_0>, <extra_id_1>, ...; as many as any row has spans.

    Returns:
        Both sides, each with its rows concatenated. In the encoder's, each span is replaced by its sentinel; in the
        decoder's, each span follows its sentinel.
    """
    number = np.maximum(mask.starts.cumsum(axis=1) - 1, 0)
    sentinel = sentinels[number]
    encoder = np.where(mask.noise, sentinel, tokens)[~mask.noise | mask.starts]
    # The first token of each span is duplicated; its first copy is then overwritten with the sentinel.
    copies = (mask.noise.astype(np.int8) + mask.starts).reshape(-1)
    decoder = np.repeat(np.asarray(tokens, np.int64).reshape(-1), copies)
    offsets = np.cumsum(copies) - copies
    span_starts = np.flatnonzero(mask.starts)
    decoder[offsets[span_starts]] = sentinel.reshape(-1)[span_starts]
    return encoder, decoder
