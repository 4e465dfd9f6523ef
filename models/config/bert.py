"""BERT: one bidirectional stack, its embeddings and the masked-language-model head; keys, and what they resolve to."""

from __future__ import annotations

from dataclasses import dataclass

from .key_block import ConfigBlock, extension_field
from .model import SingleStackKeys, SingleStackSlice, single_stack_fields


class BertBlock(ConfigBlock):
    """`model.bert.*`: embeddings and head of BERT."""

    token_types: int = extension_field(2, ge=0)
    """Rows of the token type (segment) embedding; tokens have type 0 unless the caller passes others. 0: none."""
    embedding_norm: bool = extension_field(True)
    """Apply a norm to the sum of the embeddings."""
    mlm_transform: bool = extension_field(True)
    """Apply a linear layer, GELU and a norm before the output head."""
    head_bias: bool = extension_field(True)
    """Add a bias to the logits."""


class BertKeys(SingleStackKeys):
    """`model.*` for `model.family: bert`, except batching, data and optimization."""

    share_embeddings_and_output_weights: bool = True
    """Tie the output head to the token embedding."""
    bert: BertBlock = BertBlock()
    """Embeddings and head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSlice(SingleStackSlice):
    """Bidirectional encoder with a masked-language-model head.

    Attributes:
        token_types: rows of the token type embedding, 0 without one.
        embedding_norm: apply a norm to the sum of the embeddings.
        mlm_transform: apply a linear layer, GELU and a norm before the head.
        head_bias: add a bias to the logits.
    """

    token_types: int
    embedding_norm: bool
    mlm_transform: bool
    head_bias: bool


def bert_slice(keys: BertKeys, *, vocab_size: int) -> BertSlice:
    """Resolve the keys of a BERT for a tokenizer of `vocab_size` tokens.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    return BertSlice(
        **single_stack_fields(keys, vocab_size, causal=False),
        token_types=keys.bert.token_types,
        embedding_norm=keys.bert.embedding_norm,
        mlm_transform=keys.bert.mlm_transform,
        tied=keys.share_embeddings_and_output_weights,
        head_bias=keys.bert.head_bias,
    )
