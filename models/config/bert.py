"""BERT: one bidirectional stack, its embeddings and the masked-language-model head; keys, and what they resolve to."""

from __future__ import annotations

from dataclasses import dataclass

from .key_block import ConfigBlock, extension_field
from .model import SingleStackKeys, SingleStackSlice, max_sequence_length, resolve_vocab_sizes
from .stack import stack_slice


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
    real_vocab, padded_vocab = resolve_vocab_sizes(keys, vocab_size)
    kind = keys.position_embedding_type
    positions = max(keys.encoder_seq_length, keys.max_position_embeddings or 0)
    return BertSlice(
        stack=stack_slice(keys, keys, causal=False, positions=positions),
        learned_positions=positions if kind.startswith("learned_") else None,
        positions_by_document=kind == "learned_absolute",
        max_positions=max_sequence_length(keys),
        token_types=keys.bert.token_types,
        embedding_norm=keys.bert.embedding_norm,
        embedding_dropout=keys.hidden_dropout if keys.embedding_dropout is None else keys.embedding_dropout,
        mlm_transform=keys.bert.mlm_transform,
        vocab_size=real_vocab,
        padded_vocab_size=padded_vocab,
        tied=keys.share_embeddings_and_output_weights,
        head_bias=keys.bert.head_bias,
        embedding_std=keys.embedding_init_method_std or keys.init_method_std,
        label_smoothing=keys.label_smoothing,
        own_loss=keys.loss is not None,
        seed=keys.seed,
        compile=keys.compile,
    )
