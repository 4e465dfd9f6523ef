"""Configuration keys shared by all families besides their stacks: vocabulary, embeddings, loss, seed, compilation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .key_block import Block, own

Family = Literal["gpt", "t5", "bert"]
FAMILIES: tuple[Family, ...] = ("gpt", "t5", "bert")


class ModelKeys(Block):
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
    seed: int = Field(1234, ge=0)
    """Seed of initialization, data order and dropout."""
    compile: bool | None = own(None)
    """Apply torch.compile to each layer; null: on a GPU only, and not with dropout in PyTorch versions that compile
    wrong dropout masks."""
