"""Decoder-only GPT: its keys, and what they resolve to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from .model import SingleStackKeys, SingleStackSlice, single_stack_fields


class GPTKeys(SingleStackKeys):
    """`model.*` for `model.family: gpt`, except batching, data and optimization."""

    apply_embedding_scaling: bool = False
    """Multiply the embeddings by sqrt(hidden_size) (Gemma)."""
    logits_soft_cap: float | None = Field(None, gt=0)
    """Softcap of the logits, cap * tanh(logit / cap) (Gemma 2); null: none."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output head to the token embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSlice(SingleStackSlice):
    """Decoder-only GPT.

    Attributes:
        seq_length: sequence length in training.
        embedding_scale: factor of the embeddings.
        logits_softcap: softcap of the logits, cap * tanh(logit / cap); 0 for none.
    """

    seq_length: int
    embedding_scale: float
    logits_softcap: float


def gpt_slice(keys: GPTKeys, *, vocab_size: int) -> GPTSlice:
    """Resolve the keys of a GPT for a tokenizer of `vocab_size` tokens.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    return GPTSlice(
        **single_stack_fields(keys, vocab_size, causal=True),
        seq_length=keys.encoder_seq_length,
        embedding_scale=math.sqrt(keys.hidden_size) if keys.apply_embedding_scaling else 1.0,
        logits_softcap=keys.logits_soft_cap or 0.0,
        tied=keys.share_embeddings_and_output_weights,
    )
