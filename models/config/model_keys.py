"""The keys that every family of models has besides its stacks: vocabulary, embeddings, loss, seed, compilation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .key_block import Block, own

Family = Literal["gpt", "t5", "bert"]
FAMILIES: tuple[Family, ...] = ("gpt", "t5", "bert")


class ModelKeys(Block):
    """What `model.*` holds in every family."""

    make_vocab_size_divisible_by: int = Field(128, ge=1)
    """The embedding table is padded to a multiple of this; the extra logits are masked."""
    override_vocab_size: int | None = Field(None, ge=1)
    """Vocabulary size to use instead of the tokenizer's (never smaller than it)."""
    embedding_dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout on the embeddings; null: `hidden_dropout` (of the stack they go into)."""
    embedding_init_method_std: float | None = Field(None, gt=0)
    """Standard deviation of the initial token embeddings; null: `init_method_std` (T5: that of the encoder)."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of each label that the other tokens get, evenly, in the training loss; validation has none."""
    seed: int = Field(1234, ge=0)
    """Seeds the initialisation, the order of the data and dropout."""
    compile: bool | None = own(None)
    """torch.compile each layer; null: on a GPU yes (unless dropout and this torch do not agree), on a CPU no."""
