"""The keys of a BERT: one stack that sees both ways, its embeddings and the head that fills in masked tokens."""

from __future__ import annotations

from pydantic import Field

from .key_block import Block, own
from .model_keys import ModelKeys
from .stack import StackKeys


class BertBlock(Block):
    """`model.bert.*`: what BERT has around its stack."""

    token_types: int = own(2, ge=0)
    """Rows of the table of token types, which is added to the embeddings; all tokens are of type 0 unless a caller says
    otherwise. 0: there is none."""
    embedding_norm: bool = own(True)
    """A norm over the sum of the embeddings."""
    mlm_transform: bool = own(True)
    """A linear layer, GELU and a norm before the head."""
    head_bias: bool = own(True)
    """A bias on the logits."""


class BertKeys(ModelKeys, StackKeys):
    """What `model.*` holds for `model.family: bert`, besides batching, data and optimisation."""

    encoder_seq_length: int = Field(512, ge=1)
    """Tokens in a sample."""
    max_position_embeddings: int | None = Field(None, ge=1)
    """Rows of the learned position table; null: `encoder_seq_length`."""
    share_embeddings_and_output_weights: bool = True
    """Tie the output head to the token embedding."""
    bert: BertBlock = BertBlock()
    """What BERT has around its stack."""
