"""Build the tokenizer of `model.tokenizer`, and determine the vocabulary size of the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...config.schema.root import RootBlock
from ...utils.errors import UserError
from ..sources.text_sources import Corpus
from ..tasks.chat_files import template_of_key
from ..tasks.sentinels import sentinel_ids
from .tokenizer import ByteTokenizer, CharTokenizer, Tokenizer


def tokenizer_of_text(root: RootBlock, corpus: Corpus) -> Tokenizer:
    """Return the tokenizer of `model.tokenizer`; a char tokenizer covers the characters of all splits."""
    match root.model.tokenizer.library:
        case "byte-level":
            return ByteTokenizer()
        case "char":
            return CharTokenizer.of_texts([text for texts in corpus.documents.values() for text in texts])
        case _:
            from .tokenizer_files import tokenizer_of_keys

            return tokenizer_of_keys(root.model.tokenizer)


def named_tokenizer(root: RootBlock) -> Tokenizer | None:
    """Return the tokenizer of `model.tokenizer`; None for the default, which does not describe existing token ids.

    Raises:
        UserError: it is built from the training text, and there is none.
    """
    match root.model.tokenizer.library:
        case "byte-level":
            return None
        case "char":
            raise UserError(
                f"`model.tokenizer.library` (char) is built from text, but `model.data.data_impl="
                f"{root.model.data.data_impl}` has none; use the tokenizer that made the data"
            )
        case _:
            from .tokenizer_files import tokenizer_of_keys

            return tokenizer_of_keys(root.model.tokenizer)


def with_chat(root: RootBlock, tokenizer: Tokenizer) -> Tokenizer:
    """Set the tokenizer's chat template to `model.tokenizer.chat_template`, if that is given.

    Raises:
        UserError: the template cannot be read, and the tokenizer (of a checkpoint) has none either.
    """
    template = root.model.tokenizer.chat_template
    if template is not None:
        try:
            tokenizer.chat = template_of_key(template, tokenizer)
        except UserError:
            if tokenizer.chat is None:
                raise
    return tokenizer


def model_vocabulary(root: RootBlock, tokenizer: Tokenizer) -> int:
    """Return the vocabulary size of the model: that of its tokenizer, or `model.override_vocab_size`.

    Raises:
        UserError: `model.override_vocab_size` is too small.
    """
    override = root.model.override_vocab_size
    if override is not None and override < tokenizer.vocab_size:
        raise UserError(
            f"`model.override_vocab_size` ({override}) must not be below the {tokenizer.vocab_size} tokens of the "
            f"tokenizer; leave it null or use {tokenizer.vocab_size} or more"
        )
    return override or tokenizer.vocab_size


def bytes_of_ids(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.int64]:
    """Return the number of UTF-8 bytes of each id of the model, int64 [V]; see `Tokenizer.token_bytes`.

    Sentinels and padding of the vocabulary count 0.
    """
    token_bytes = tokenizer.token_bytes()
    token_bytes[sentinel_ids(tokenizer)] = 0
    return np.concatenate([token_bytes, np.zeros(vocab_size - len(token_bytes), np.int64)])
