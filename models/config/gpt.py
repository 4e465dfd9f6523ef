"""The keys of a decoder-only GPT: one stack, its embeddings and its head."""

from __future__ import annotations

from pydantic import Field

from .model_keys import ModelKeys
from .stack import StackKeys


class GPTKeys(ModelKeys, StackKeys):
    """What `model.*` holds for `model.family: gpt`, besides batching, data and optimisation."""

    encoder_seq_length: int = Field(512, ge=1)
    """Tokens in a training sample."""
    max_position_embeddings: int | None = Field(None, ge=1)
    """Rows of the learned position table; null: `encoder_seq_length`."""
    apply_embedding_scaling: bool = False
    """Multiply the embeddings with sqrt(hidden_size) (Gemma)."""
    logits_soft_cap: float | None = Field(None, gt=0)
    """Bound the logits to +-cap by cap * tanh(logit / cap) (Gemma 2); null: no bound."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output head to the token embedding."""
