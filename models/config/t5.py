"""The keys of a T5: two stacks, each with all its keys, and the embeddings and head around them."""

from __future__ import annotations

from pydantic import Field

from .key_block import own
from .model_keys import ModelKeys
from .stack import StackKeys


class DecoderKeys(StackKeys):
    """`model.decoder.*`: the stack of the decoder, whose keys of attention count for its cross-attention too."""

    relative_position_bias_self_attention_only: bool = True
    """With `relative`: no bias in cross-attention; False: one table more, for cross-attention, of both directions."""


class T5Keys(ModelKeys):
    """What `model.*` holds for `model.family: t5`, besides batching, data and optimisation."""

    encoder: StackKeys = StackKeys.model_validate({})
    """The stack of the encoder, which sees a whole sample at once."""
    decoder: DecoderKeys = DecoderKeys.model_validate({})
    """The stack of the decoder."""
    seq_length: int = Field(512, ge=1)
    """Tokens in a sample of the encoder; those of the decoder are `data.seq_length_dec`."""
    max_position_embeddings: int | None = Field(None, ge=1)
    """Rows of the learned position table of each stack; null: the longer of its samples."""
    share_token_embeddings: bool = True
    """One table of token embeddings for encoder and decoder."""
    share_decoder_tokens_head_embeddings: bool = True
    """Tie the output head to the decoder's token embeddings."""
    tokens_head_bias: bool = True
    """A bias on the logits."""
    scale_tied_logits: bool = own(False)
    """Multiply the decoder's output with hidden_size ** -0.5 before the tied head (Hugging Face's T5 v1.0)."""
