"""Sequence lengths of span corruption: T5's arithmetic, which fills sequences of fixed length without padding."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple


class Corruption(NamedTuple):
    """Amount of span corruption.

    Attributes:
        noise_density: fraction of the tokens that are noise, `model.data.masked_lm_prob`.
        mean_span_length: mean tokens per span, `model.data.mean_ngram_size`; for NeMo's spans the mean before clipping.
    """

    noise_density: float
    mean_span_length: float


def clipped_geometric_mean(mean: float, max_length: int) -> float:
    """Return the mean of a geometric distribution with `mean` after clipping to `max_length`."""
    return mean * (1 - (1 - 1 / mean) ** max_length)


def noise_counts(length: int, corruption: Corruption) -> tuple[int, int]:
    """Return the number of noise tokens and noise spans, as T5's `random_spans_noise_mask` counts them.

    At least one token is noise and one is not; every span has a noise token, and a kept token before it.

    Raises:
        ValueError: the text has less than 2 tokens.
    """
    if length < 2:
        raise ValueError(f"`length` ({length}) must be at least 2: there is nothing to corrupt")
    noise = min(max(round(length * corruption.noise_density), 1), length - 1)
    spans = max(round(noise / corruption.mean_span_length), 1)
    return noise, min(spans, noise, length - noise)


def corrupted_lengths(length: int, corruption: Corruption) -> tuple[int, int]:
    """Return the tokens on the encoder and decoder side of a text of `length` tokens, each including EOS."""
    noise, spans = noise_counts(length, corruption)
    return length - noise + spans + 1, noise + spans + 1


def window_length(encoder_length: int, corruption: Corruption, decoder_length: int | None = None) -> int:
    """Return the maximum number of text tokens that fill an encoder side of `encoder_length` tokens exactly.

    This is T5's `compute_input_and_target_lengths`, without its special case for a density of one half, which leaves
    one encoder position unused. One more text token lengthens the encoder side by one or leaves it as it is, so every
    length from 3 on can be filled; there are gaps only if there are more spans than kept tokens.

    Args:
        encoder_length: tokens on the encoder side, including EOS.
        corruption: amount of span corruption.
        decoder_length: maximum tokens on the decoder side; None for no limit.

    Raises:
        ValueError: no text length fills the encoder side and fits the decoder side.
    """
    if encoder_length < 3:
        raise ValueError(f"`encoder_length` ({encoder_length}) must be at least 3: a token, a sentinel and the end")
    length = bisect_right(range(1 << 62), encoder_length, 2, key=lambda n: corrupted_lengths(n, corruption)[0]) - 1
    encoder, decoder = corrupted_lengths(length, corruption)
    if encoder < encoder_length:
        raise ValueError(f"`encoder_length` ({encoder_length}) cannot be filled exactly; use {encoder}")
    if decoder_length is not None and decoder > decoder_length:
        raise ValueError(f"`decoder_length` ({decoder_length}) must be at least {decoder}")
    return length
