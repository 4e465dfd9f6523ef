"""The keys of a decoder-only GPT: one stack, its embeddings and its head."""

from __future__ import annotations

from pydantic import Field

from .stack import StackKeys


class GPTKeys(StackKeys):
    """What `model.*` holds for `model.family: gpt`, besides batching, data and optimisation."""

    encoder_seq_length: int = Field(512, ge=1)
    """Tokens in a training sample."""
    max_position_embeddings: int | None = Field(None, ge=1)
    """Rows of the learned position table; null: `encoder_seq_length`."""
    make_vocab_size_divisible_by: int = Field(128, ge=1)
    """The embedding table is padded to a multiple of this; the extra logits are masked."""
    override_vocab_size: int | None = Field(None, ge=1)
    """Vocabulary size to use instead of the tokenizer's (never smaller than it)."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output head to the token embedding."""
    seed: int = Field(1234, ge=0)
    """Seeds the initialisation, the order of the data and dropout."""
    compile: bool | None = Field(None, json_schema_extra={"own": True})
    """torch.compile each layer; null: on a GPU yes (unless dropout and this torch do not agree), on a CPU no."""
