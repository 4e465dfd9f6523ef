"""How long the two sides of span corruption are: T5's arithmetic, which fills rows of fixed length to the token."""

from __future__ import annotations

from typing import NamedTuple


class Corruption(NamedTuple):
    """How much of a text is corrupted.

    Attributes:
        density: part of the tokens that are noise, `model.data.masked_lm_prob`.
        mean_span: tokens in a span on average, `model.data.mean_ngram_size`; NeMo's before the longest are cut.
    """

    density: float
    mean_span: float


def cut_mean(mean: float, longest: int) -> float:
    """The mean of lengths from a geometric distribution with `mean` of which the longer ones are cut to `longest`."""
    return mean * (1 - (1 - 1 / mean) ** longest)


def noise_counts(length: int, corruption: Corruption) -> tuple[int, int]:
    """Noise tokens and noise spans of a text, as T5's `random_spans_noise_mask` counts them.

    At least one token is noise and one is not; every span has a token, and one before it that is not noise.

    Args:
        length: tokens of the text, at least 2.
        corruption: how much.

    Raises:
        ValueError: the text is too short.
    """
    if length < 2:
        raise ValueError(f"`length` ({length}) must be at least 2: there is nothing to corrupt")
    noise = min(max(round(length * corruption.density), 1), length - 1)
    spans = max(round(noise / corruption.mean_span), 1)
    return noise, min(spans, noise, length - noise)


def corrupted_lengths(length: int, corruption: Corruption) -> tuple[int, int]:
    """Tokens on the encoder's and the decoder's side of a text of `length` tokens, each with its end token."""
    noise, spans = noise_counts(length, corruption)
    return length - noise + spans + 1, noise + spans + 1


def window_length(encoder_length: int, corruption: Corruption, decoder_length: int | None = None) -> int:
    """The most tokens of text that fill an encoder side of `encoder_length` tokens exactly.

    This is T5's `compute_input_and_target_lengths`, without its exception for a density of one half, which leaves a
    place of the encoder's side empty. One token more of text makes that side one longer or leaves it as it is, so every
    length from 3 on can be filled; only with more spans than tokens that stay are there gaps.

    Args:
        encoder_length: with the end token.
        corruption: how much.
        decoder_length: what the decoder's side must fit into; None: anything.

    Raises:
        ValueError: no text fills the one side and fits into the other.
    """
    if encoder_length < 3:
        raise ValueError(f"`encoder_length` ({encoder_length}) must be at least 3: a token, a sentinel and the end")
    low, high = 2, 2
    while corrupted_lengths(high, corruption)[0] <= encoder_length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if corrupted_lengths(middle, corruption)[0] <= encoder_length:
            low = middle
        else:
            high = middle
    encoder, decoder = corrupted_lengths(low, corruption)
    if encoder < encoder_length:
        raise ValueError(f"`encoder_length` ({encoder_length}) is filled by no text; {encoder} is")
    if decoder_length is not None and decoder > decoder_length:
        raise ValueError(f"`decoder_length` ({decoder_length}) must be at least {decoder}")
    return low
