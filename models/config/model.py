"""Keys and slices shared by the model families besides stacks: vocabulary, embeddings, loss, seed, compilation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from .fp8 import Fp8Keys
from .key_block import Finding, NonEmptyText, extension_field
from .position_rules import window_masks_nothing, xpos_needs_causal_mask
from .positions import BOUNDED_POSITION_TYPES, MAX_POSITIONS
from .stack import StackKeys, StackSlice, stack_rules, stack_slice

Family = Literal["gpt", "t5", "bert"]
FAMILIES: tuple[Family, ...] = ("gpt", "t5", "bert")


class ModelKeys(Fp8Keys):
    """`model.*` in every family."""

    make_vocab_size_divisible_by: int = Field(128, ge=1)
    """Pad the embedding table to a multiple of this; the extra logits are masked."""
    override_vocab_size: int | None = Field(None, ge=1)
    """Vocabulary size to use instead of the tokenizer's, at least as large."""
    embedding_dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout on the embeddings; null: `hidden_dropout` of their stack."""
    embedding_init_method_std: float | None = Field(None, gt=0)
    """Standard deviation of the initial token embeddings; null: `init_method_std` (T5: that of the encoder)."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread evenly over the other tokens in the training loss; not used in validation."""
    loss: NonEmptyText | None = extension_field(None)
    """Training loss of your own, by name (docs/extend.md), in place of the cross-entropy; it gets all logits at once.
    Validation reports the cross-entropy. null: cross-entropy, without materializing all logits."""
    seed: int = Field(1234, ge=0)
    """Seed of initialization, data order and dropout."""
    compile: bool | None = extension_field(None)
    """Apply torch.compile to each layer; null: on a GPU only, and not with attention dropout of
    PyTorch's kernels, in PyTorch versions that compile wrong random numbers."""


class SingleStackKeys(ModelKeys, StackKeys):
    """`model.*` of a family with one stack."""

    encoder_seq_length: int = Field(512, ge=1, le=MAX_POSITIONS)
    """Sequence length in tokens."""
    max_position_embeddings: int | None = Field(None, ge=1, le=MAX_POSITIONS)
    """Rows of the learned position embedding; null: `encoder_seq_length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSlice:
    """Slice common to the models of all families.

    Attributes:
        vocab_size: vocabulary size without padding.
        padded_vocab_size: rows of token embeddings and output head.
        tied: the output head shares the token embedding, in T5 that of the decoder.
        embedding_std: standard deviation of the initial token embeddings.
        label_smoothing: share of the target spread over the other tokens in training.
        own_loss: the training loss is a function of the user's own, which gets all logits.
        seed: seed of the initialization.
        compile: compile each layer; None decides by device.
    """

    vocab_size: int
    padded_vocab_size: int
    tied: bool
    embedding_std: float
    label_smoothing: float
    own_loss: bool
    seed: int
    compile: bool | None


@dataclass(frozen=True, kw_only=True)  # without slots, which a second base class must not have
class EmbeddedStackSlice:
    """Stack with its embeddings.

    Attributes:
        stack: the stack.
        learned_positions: rows of its learned position embedding, None without one.
        positions_by_document: positions may restart at each document of a packed sequence.
        max_positions: longest supported sequence, None if unlimited.
        embedding_dropout: dropout probability of its embeddings.
    """

    stack: StackSlice
    learned_positions: int | None
    positions_by_document: bool
    max_positions: int | None
    embedding_dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleStackSlice(ModelSlice, EmbeddedStackSlice):
    """Model with one stack."""

    @property
    def stacks(self) -> tuple[StackSlice]:
        """All stacks: the only one."""
        return (self.stack,)


def embedded_stack(stack: StackKeys, keys: ModelKeys, *, causal: bool, positions: int) -> EmbeddedStackSlice:
    """Resolve the keys of a stack and of its embeddings, for sequences of up to `positions` tokens."""
    kind, dropout = stack.position_embedding_type, keys.embedding_dropout
    return EmbeddedStackSlice(
        stack=stack_slice(stack, keys, causal=causal, positions=positions),
        learned_positions=positions if kind.startswith("learned_") else None,
        positions_by_document=kind == "learned_absolute",
        max_positions=positions if kind in BOUNDED_POSITION_TYPES else None,
        embedding_dropout=stack.hidden_dropout if dropout is None else dropout,
    )


def model_fields(keys: ModelKeys, stack: StackKeys, vocab_size: int) -> dict[str, Any]:
    """Return the fields of `ModelSlice` but `tied`, for a tokenizer of `vocab_size` tokens; `stack` is the first one.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    real_vocab, padded_vocab = resolve_vocab_sizes(keys, vocab_size)
    return {
        "vocab_size": real_vocab,
        "padded_vocab_size": padded_vocab,
        "embedding_std": keys.embedding_init_method_std or stack.init_method_std,
        "label_smoothing": keys.label_smoothing,
        "own_loss": keys.loss is not None,
        "seed": keys.seed,
        "compile": keys.compile,
    }


def single_stack_fields(keys: SingleStackKeys, vocab_size: int, *, causal: bool) -> dict[str, Any]:
    """Return the fields of `SingleStackSlice` but `tied`; otherwise as `model_fields`."""
    stack = embedded_stack(keys, keys, causal=causal, positions=_positions(keys))
    return model_fields(keys, keys, vocab_size) | vars(stack)


def _positions(keys: SingleStackKeys) -> int:
    return max(keys.encoder_seq_length, keys.max_position_embeddings or 0)


def resolve_vocab_sizes(keys: ModelKeys, vocab_size: int) -> tuple[int, int]:
    """Return the vocabulary size without and with padding, for a tokenizer of `vocab_size` tokens.

    Raises:
        ValueError: `override_vocab_size` is smaller than the tokenizer's vocabulary.
    """
    real_vocab = keys.override_vocab_size or vocab_size
    if real_vocab < vocab_size:
        raise ValueError(
            f"`override_vocab_size` ({real_vocab}) must not be smaller than the tokenizer's vocabulary; "
            f"use {vocab_size} or more, or null."
        )
    divisor = keys.make_vocab_size_divisible_by
    return real_vocab, -(-real_vocab // divisor) * divisor


def single_stack_rules(keys: SingleStackKeys, *, causal: bool) -> Iterator[Finding]:
    """All cross-field checks for a model with one stack; paths are relative to `model`."""
    yield from stack_rules(keys, causal=causal)
    if not causal:
        yield from xpos_needs_causal_mask(keys)
    yield from position_table_covers_sample(keys)
    yield from window_is_shorter_than_sequences(keys, causal=causal)


def position_table_covers_sample(keys: SingleStackKeys) -> Iterator[Finding]:
    """A learned position embedding needs a row for each token of a sample."""
    rows, tokens, kind = keys.max_position_embeddings, keys.encoder_seq_length, keys.position_embedding_type
    bounded = kind in BOUNDED_POSITION_TYPES
    if rows is None or rows == tokens:
        return
    if kind.startswith("learned_") and rows < tokens:
        yield Finding.error(
            ("max_position_embeddings", "encoder_seq_length"),
            f"`max_position_embeddings` ({rows}) must not be smaller than `encoder_seq_length` ({tokens}) with "
            f"`position_embedding_type` ({kind}).",
            f"use max_position_embeddings={tokens} or null, or encoder_seq_length={rows}",
        )
    elif not bounded or rows < tokens:
        yield Finding.warning(
            ("max_position_embeddings", "position_embedding_type"),
            f"`max_position_embeddings` ({rows}) has no effect with `position_embedding_type` ({kind})"
            + ("." if not bounded else f" and a longer `encoder_seq_length` ({tokens})."),
            "use max_position_embeddings=null",
        )


def window_is_shorter_than_sequences(keys: SingleStackKeys, *, causal: bool) -> Iterator[Finding]:
    """A window as long as the longest sequence masks nothing."""
    longest = _positions(keys) if keys.position_embedding_type in BOUNDED_POSITION_TYPES else None
    if window_masks_nothing(keys, causal=causal, longest=longest):
        yield Finding.warning(
            ("window_size", "encoder_seq_length", "max_position_embeddings"),
            f"`window_size` ({keys.window_size}) has no effect: no sequence of this model is longer than {longest} "
            "tokens (`encoder_seq_length`, `max_position_embeddings`).",
            "use window_size=null",
        )
