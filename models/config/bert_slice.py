"""Resolved configuration of a BERT, derived once from its keys."""

from __future__ import annotations

from dataclasses import dataclass

from .bert import BertKeys
from .position_slices import BOUNDED_POSITION_TYPES
from .slices import StackSlice, resolve_vocab_sizes, stack_slice


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSlice:
    """Bidirectional encoder with a masked-language-model head.

    Attributes:
        stack: the bidirectional stack.
        learned_positions: rows of the learned position embedding, None without one.
        positions_by_document: positions may restart at each document of a packed sequence.
        max_positions: longest supported sequence, None if unlimited.
        token_types: rows of the token type embedding, 0 without one.
        embedding_norm: apply a norm to the sum of the embeddings.
        embedding_dropout: dropout probability of the embeddings.
        mlm_transform: apply a linear layer, GELU and a norm before the head.
        vocab_size: vocabulary size without padding.
        padded_vocab_size: rows of token embedding and output head.
        tied: the output head shares the token embedding.
        head_bias: add a bias to the logits.
        embedding_std: standard deviation of the initial token embeddings.
        label_smoothing: share of the target spread over the other tokens in training.
        seed: seed of the initialization.
        compile: compile each layer; None decides by device.
    """

    stack: StackSlice
    learned_positions: int | None
    positions_by_document: bool
    max_positions: int | None
    token_types: int
    embedding_norm: bool
    embedding_dropout: float
    mlm_transform: bool
    vocab_size: int
    padded_vocab_size: int
    tied: bool
    head_bias: bool
    embedding_std: float
    label_smoothing: float
    seed: int
    compile: bool | None

    @property
    def stacks(self) -> tuple[StackSlice]:
        """All stacks: the only one."""
        return (self.stack,)


def bert_slice(keys: BertKeys, *, vocab_size: int) -> BertSlice:
    """Resolve the keys of a BERT for a tokenizer of `vocab_size` tokens.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    real_vocab, padded_vocab = resolve_vocab_sizes(keys, vocab_size)
    kind = keys.position_embedding_type
    positions = max(keys.encoder_seq_length, keys.max_position_embeddings or 0)
    return BertSlice(
        stack=stack_slice(keys, causal=False, positions=positions),
        learned_positions=positions if kind.startswith("learned_") else None,
        positions_by_document=kind == "learned_absolute",
        max_positions=positions if kind in BOUNDED_POSITION_TYPES else None,
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
        seed=keys.seed,
        compile=keys.compile,
    )
