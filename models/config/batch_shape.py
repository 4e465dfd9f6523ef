"""Shape of the samples that a model is built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Shape of the samples of training and evaluation.

    Attributes:
        length: sequence length in tokens, for T5 that of the encoder.
        decoder_length: sequence length of a T5's decoder, 0 in other families.
        packed: a sequence packs several documents, which do not attend to each other.
        restart: position ids restart at 0 with each document.
        padded: sequences may end in padding, which is masked out in attention.
    """

    length: int
    decoder_length: int = 0
    packed: bool = False
    restart: bool = False
    padded: bool = False
