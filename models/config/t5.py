"""Configuration keys of T5: encoder and decoder stack, embeddings and output head."""

from __future__ import annotations

from pydantic import Field

from .key_block import own
from .model_keys import ModelKeys
from .stack import StackKeys


class DecoderKeys(StackKeys):
    """`model.decoder.*`: the decoder stack, whose attention keys apply to its cross-attention too."""

    relative_position_bias_self_attention_only: bool = True
    """With `relative`: no bias in cross-attention; False: a separate bidirectional bias for cross-attention."""


class T5Keys(ModelKeys):
    """`model.*` for `model.family: t5`, except batching, data and optimization."""

    encoder: StackKeys = StackKeys.model_validate({})
    """The encoder stack, bidirectional."""
    decoder: DecoderKeys = DecoderKeys.model_validate({})
    """The decoder stack, causal."""
    seq_length: int = Field(512, ge=1)
    """Sequence length of the encoder in tokens; that of the decoder is `data.seq_length_dec`."""
    max_position_embeddings: int | None = Field(None, ge=1)
    """Rows of the learned position embedding of each stack; null: its sequence length."""
    share_token_embeddings: bool = True
    """Share the token embedding between encoder and decoder."""
    share_decoder_tokens_head_embeddings: bool = True
    """Tie the output head to the decoder's token embedding."""
    tokens_head_bias: bool = True
    """Add a bias to the logits."""
    scale_tied_logits: bool = own(False)
    """Multiply the decoder's output by hidden_size ** -0.5 before the tied head (Hugging Face's T5 v1.0)."""
