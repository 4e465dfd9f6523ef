"""Span corruption (T5, arXiv 1910.10683): spans of a text become sentinels, and the decoder writes out what they were.

    text      Thank you for inviting me to your party last week
    encoder   Thank you <extra_id_0> me to your party <extra_id_1> week </s>
    decoder   <extra_id_0> for inviting <extra_id_1> last </s>

Spans are drawn in one of two ways. T5's draws a fixed number of spans with a fixed number of tokens in them, so that
equal texts give equal lengths on both sides. NeMo's draws the length of each span, in words or tokens, so lengths vary.
All draws are functions of random words, `numpy`'s raw stream, which stays the same between its versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config.span_lengths import Corruption, noise_counts

Mask = NDArray[np.bool_]


class SpanMask(NamedTuple):
    """Which tokens are noise, and where spans begin; two spans may touch.

    Attributes:
        noise: bool, of the shape of the tokens.
        starts: the first token of each span, likewise.
    """

    noise: Mask
    starts: Mask


# ---------------------------------------------------------------- T5's spans


def random_spans(words: NDArray[np.uint64], length: int, corruption: Corruption) -> SpanMask:
    """T5's `random_spans_noise_mask`: a text begins with what stays and ends with noise, in turns.

    The lengths of the noise spans are a uniformly random way to write their sum in so many positive parts, and so are
    those of what stays between them.

    Args:
        words: random words, [rows, length - 2].
        length: tokens of each text.
        corruption: how much.

    Returns:
        Masks [rows, length].
    """
    noise, spans = noise_counts(length, corruption)
    rows = len(words)
    kept_lengths = _parts(words[:, : length - noise - 1], length - noise, spans)
    noise_lengths = _parts(words[:, length - noise - 1 :], noise, spans)
    ends = np.stack([kept_lengths, noise_lengths], axis=2).reshape(rows, 2 * spans).cumsum(axis=1)
    row = np.arange(rows)[:, None]
    starts = np.zeros((rows, length), np.bool_)
    starts[row, ends[:, :-1:2]] = True
    turns = np.zeros((rows, length), np.int32)
    turns[row, ends[:, :-1]] = 1
    return SpanMask(turns.cumsum(axis=1) % 2 == 1, starts)


def _parts(words: NDArray[np.uint64], total: int, parts: int) -> NDArray[np.int64]:
    """`total` as a sum of positive parts, each way equally likely; [rows, parts] from words [rows, total - 1]."""
    rows = len(words)
    # The places of the smallest words are a uniformly random choice of where to cut.
    cuts = np.sort(np.argsort(words, axis=1, kind="stable")[:, : parts - 1], axis=1) + 1
    bounds = np.concatenate([np.zeros((rows, 1), np.int64), cuts, np.full((rows, 1), total)], axis=1)
    return np.diff(bounds, axis=1)


# ---------------------------------------------------------------- NeMo's spans


class SpanLengths(NamedTuple):
    """How long NeMo's spans are, in words where words are kept whole, else in tokens.

    Attributes:
        bounds: probability that a span has at most 1, 2, ... of them, float64 [longest].
    """

    bounds: NDArray[np.float64]

    @classmethod
    def geometric(cls, longest: int, mean: float) -> SpanLengths:
        """SpanBERT's (arXiv 1907.10529, 3.1): geometric with that mean; longer ones are cut to the longest.

        What is left on average is `corruption.cut_mean`.
        """
        bounds = 1 - np.full(longest, 1 - 1 / mean).cumprod()
        return cls(np.append(bounds[:-1], 1.0))

    @classmethod
    def harmonic(cls, longest: int, *, longer_first: bool) -> SpanLengths:
        """A length n has probability in proportion to 1 / n; `longer_first` turns the order around."""
        chance = 1 / np.arange(1, longest + 1)
        chance = (chance[::-1] if longer_first else chance) / chance.sum()
        return cls(np.append(chance.cumsum()[:-1], 1.0))

    def draw(self, word: np.uint64) -> int:
        """A length from a random word."""
        return int(np.searchsorted(self.bounds, _fraction(word), side="right")) + 1


def ngram_spans(
    source: np.random.Philox,
    units: NDArray[np.int64],
    lengths: SpanLengths,
    budget: int,
    most_spans: int,
    kept: Mask | None = None,
) -> SpanMask:
    """Spans as NeMo's `create_masked_lm_predictions` draws them.

    Units are visited in random order. Each begins a span of a drawn length, made shorter until it fits into what is
    left of the budget and holds no token that is kept; one that does not fit at all, or touches a token that is taken,
    is skipped.

    Args:
        source: random words.
        units: the first token of each unit (word or token) and the length of the text behind them, [n + 1].
        lengths: of spans, in units.
        budget: tokens that may be noise; at least 1.
        most_spans: spans there may be; at least 1.
        kept: tokens that are never noise, [length], not all of them; None for none.

    Returns:
        Masks [length]. Where no unit fits into the budget, one token is noise.
    """
    length = int(units[-1])
    kept = np.zeros(length, np.bool_) if kept is None else kept
    noise, starts = np.zeros(length, np.bool_), np.zeros(length, np.bool_)
    order = np.argsort(source.random_raw(len(units) - 1), kind="stable")
    left = budget
    for first in order.tolist():
        if left == 0 or most_spans == 0:
            break
        begin = int(units[first])
        last = min(first + lengths.draw(_word(source)), len(units) - 1)
        while last > first and (units[last] - begin > left or kept[begin : units[last]].any()):
            last -= 1
        end = int(units[last])
        if end == begin or noise[begin:end].any():
            continue
        noise[begin:end], starts[begin] = True, True
        left -= end - begin
        most_spans -= 1
    if left == budget:
        places = np.flatnonzero(~kept)
        place = places[int(_fraction(_word(source)) * len(places))]
        noise[place] = starts[place] = True
    return SpanMask(noise, starts)


def units_of(tokens: NDArray[Any], inside: tuple[Mask, Mask] | None) -> NDArray[np.int64]:
    """The first token of each word, and the number of tokens behind them; each token is a word without `inside`.

    Args:
        tokens: [n].
        inside: for each token id whether it begins, and whether it ends, within a word: `word_edges`.
    """
    if inside is None:
        return np.arange(len(tokens) + 1)
    begins, ends = inside
    goes_on = begins[tokens[1:]] & ends[tokens[:-1]]
    return np.append(np.flatnonzero(np.append(True, ~goes_on)), len(tokens))


def word_edges(pieces: Iterator[bytes] | list[bytes]) -> tuple[Mask, Mask]:
    """For the bytes of each token, whether the first and the last of them are part of a word.

    Letters, digits, the underscore and every byte of a character beyond ASCII are. A token goes on with the word of
    the one before it where that ends and this one begins with such a byte, whatever the tokenizer.
    """
    part = np.zeros(256, np.bool_)
    part[0x80:] = True
    part[np.frombuffer(b"_0123456789", np.uint8)] = True
    part[ord("a") : ord("z") + 1] = part[ord("A") : ord("Z") + 1] = True
    edges = [(bool(piece) and part[piece[0]], bool(piece) and part[piece[-1]]) for piece in pieces]
    begins, ends = np.array(edges, np.bool_).reshape(-1, 2).T
    return begins, ends


def _word(source: np.random.Philox) -> np.uint64:
    return np.uint64(source.random_raw())


def _fraction(word: np.uint64) -> float:
    """A random word as a number from 0 to below 1."""
    return int(word >> np.uint64(11)) / (1 << 53)


# ---------------------------------------------------------------- both


def corrupt(
    tokens: NDArray[Any], mask: SpanMask, sentinels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Both sides of each text, without end tokens.

    Args:
        tokens: [rows, n].
        mask: its noise, [rows, n].
        sentinels: ids of <extra_id_0>, <extra_id_1>, ...; as many as any row has spans.

    Returns:
        The encoder's side, where each span is its sentinel, and the decoder's, where each span follows its sentinel;
        the rows of each one behind the other.
    """
    number = np.maximum(mask.starts.cumsum(axis=1) - 1, 0)
    sentinel = sentinels[number]
    encoder = np.where(mask.noise, sentinel, tokens)[~mask.noise | mask.starts]
    # The first token of a span is there twice; the first of the two becomes the sentinel.
    copies = (mask.noise.astype(np.int8) + mask.starts).reshape(-1)
    decoder = np.repeat(np.asarray(tokens, np.int64).reshape(-1), copies)
    places = np.cumsum(copies) - copies
    opening = np.flatnonzero(mask.starts)
    decoder[places[opening]] = sentinel.reshape(-1)[opening]
    return encoder, decoder
