"""Shape of the samples that a model is built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Shape of the samples of training and evaluation.

    Attributes:
        seq_length: sequence length in tokens, for T5 that of the encoder.
        decoder_seq_length: sequence length of a T5's decoder, 0 in other families.
        packed: a sequence packs several documents, which do not attend to each other.
        reset_position_ids: position ids restart at 0 with each document.
        padded: sequences may end in padding, which is masked out in attention.
    """

    seq_length: int
    decoder_seq_length: int = 0
    packed: bool = False
    reset_position_ids: bool = False
    padded: bool = False
