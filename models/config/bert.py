"""Configuration keys of BERT: one bidirectional stack, its embeddings and the masked-language-model head."""

from __future__ import annotations

from pydantic import Field

from .key_block import Block, own
from .model_keys import ModelKeys
from .stack import StackKeys


class BertBlock(Block):
    """`model.bert.*`: embeddings and head of BERT."""

    token_types: int = own(2, ge=0)
    """Rows of the token type (segment) embedding; tokens have type 0 unless the caller passes others. 0: none."""
    embedding_norm: bool = own(True)
    """Apply a norm to the sum of the embeddings."""
    mlm_transform: bool = own(True)
    """Apply a linear layer, GELU and a norm before the output head."""
    head_bias: bool = own(True)
    """Add a bias to the logits."""


class BertKeys(ModelKeys, StackKeys):
    """`model.*` for `model.family: bert`, except batching, data and optimization."""

    encoder_seq_length: int = Field(512, ge=1)
    """Sequence length in tokens."""
    max_position_embeddings: int | None = Field(None, ge=1)
    """Rows of the learned position embedding; null: `encoder_seq_length`."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output head to the token embedding."""
    bert: BertBlock = BertBlock()
    """Embeddings and head."""
