"""What the samples of a run look like, as far as a model is built for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleForm:
    """The samples of training and evaluation.

    Attributes:
        length: tokens in a sample; of the encoder in a T5.
        decoder_length: tokens of the decoder in a T5, 0 in other families.
        packed: a row holds several documents, which do not see each other.
        restart: positions begin at 0 with each document of a row.
        padded: rows may end in padding, which no token sees.
    """

    length: int
    decoder_length: int = 0
    packed: bool = False
    restart: bool = False
    padded: bool = False
