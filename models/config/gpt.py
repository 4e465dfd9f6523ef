"""Configuration keys of a decoder-only GPT: one stack, its embeddings and its output head."""

from __future__ import annotations

from pydantic import Field

from .model_keys import ModelKeys
from .stack import StackKeys


class GPTKeys(ModelKeys, StackKeys):
    """`model.*` for `model.family: gpt`, except batching, data and optimization."""

    encoder_seq_length: int = Field(512, ge=1)
    """Sequence length in tokens."""
    max_position_embeddings: int | None = Field(None, ge=1)
    """Rows of the learned position embedding; null: `encoder_seq_length`."""
    apply_embedding_scaling: bool = False
    """Multiply the embeddings by sqrt(hidden_size) (Gemma)."""
    logits_soft_cap: float | None = Field(None, gt=0)
    """Softcap of the logits, cap * tanh(logit / cap) (Gemma 2); null: none."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output head to the token embedding."""
