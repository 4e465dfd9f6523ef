"""What the parts of a BERT need to know, derived once from its keys."""

from __future__ import annotations

from dataclasses import dataclass

from .bert import BertKeys
from .position_slices import BOUNDED
from .slices import StackSlice, stack_slice, vocabulary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSlice:
    """An encoder with a head that fills in masked tokens.

    Attributes:
        stack: the stack, which sees both ways.
        learned_positions: rows of the learned position table, None without one.
        positions_by_document: whether that table may be read by the position within a document.
        max_positions: the longest sequence it can take, None for any.
        token_types: rows of the table of token types, 0 without one.
        embedding_norm: a norm over the sum of the embeddings.
        embedding_dropout: dropout of the embeddings.
        mlm_transform: a linear layer, GELU and a norm before the head.
        vocab_size: real tokens.
        padded_vocab_size: rows of the embedding table and of the head.
        tied: the head is the embedding table.
        head_bias: a bias on the logits.
        embedding_std: deviation of the initial token embeddings.
        label_smoothing: share of a label that the other tokens get, in training.
        seed: of the initialisation.
        compile: compile each layer; None leaves it to the device.
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
        """The stack alone."""
        return (self.stack,)


def bert_slice(keys: BertKeys, *, vocab_size: int) -> BertSlice:
    """The BERT the keys describe, for a tokenizer of `vocab_size` tokens.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    real_vocab, padded_vocab = vocabulary_of(keys, vocab_size)
    kind = keys.position_embedding_type
    positions = max(keys.encoder_seq_length, keys.max_position_embeddings or 0)
    return BertSlice(
        stack=stack_slice(keys, causal=False, positions=positions),
        learned_positions=positions if kind.startswith("learned_") else None,
        positions_by_document=kind == "learned_absolute",
        max_positions=positions if kind in BOUNDED else None,
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
