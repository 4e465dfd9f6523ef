"""The tokenizer that `model.tokenizer` names, and the vocabulary of the model: its own, or a larger one."""

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
    """The tokenizer that `model.tokenizer` asks for; the characters are those of all splits."""
    match root.model.tokenizer.library:
        case "byte-level":
            return ByteTokenizer()
        case "char":
            return CharTokenizer.of_texts([text for texts in corpus.documents.values() for text in texts])
        case _:
            from .tokenizer_files import tokenizer_of_keys

            return tokenizer_of_keys(root.model.tokenizer)


def named_tokenizer(root: RootBlock) -> Tokenizer | None:
    """The tokenizer that `model.tokenizer` names; None where it has its default, which says nothing about the data.

    Raises:
        UserError: it is made from the training text, and there is none.
    """
    match root.model.tokenizer.library:
        case "byte-level":
            return None
        case "char":
            raise UserError(
                f"`model.tokenizer.library` (char) is made from text, which `model.data.data_impl="
                f"{root.model.data.data_impl}` has none of; use the tokenizer that made the data"
            )
        case _:
            from .tokenizer_files import tokenizer_of_keys

            return tokenizer_of_keys(root.model.tokenizer)


def with_chat(root: RootBlock, tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, with the chat template of `model.tokenizer.chat_template` where that is given.

    Raises:
        UserError: it names a file that cannot be read, and the tokenizer of a checkpoint holds none either.
    """
    named = root.model.tokenizer.chat_template
    if named is not None:
        try:
            tokenizer.chat = template_of_key(named, tokenizer)
        except UserError:
            if tokenizer.chat is None:
                raise
    return tokenizer


def model_vocabulary(root: RootBlock, tokenizer: Tokenizer) -> int:
    """Token ids that the model has: those of its tokenizer, or `model.override_vocab_size`.

    Raises:
        UserError: that is too few.
    """
    override = root.model.override_vocab_size
    if override is not None and override < tokenizer.vocab_size:
        raise UserError(
            f"`model.override_vocab_size` ({override}) must not be below the {tokenizer.vocab_size} tokens of the "
            f"tokenizer; leave it null or use {tokenizer.vocab_size} or more"
        )
    return override or tokenizer.vocab_size


def bytes_of_ids(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.int64]:
    """UTF-8 bytes that each id of the model stands for, int64 [vocab_size]; see `Tokenizer.token_bytes`.

    A sentinel stands for none: as a label it is no text, whatever its name is.
    """
    token_bytes = tokenizer.token_bytes()
    token_bytes[sentinel_ids(tokenizer)] = 0
    return np.concatenate([token_bytes, np.zeros(vocab_size - len(token_bytes), np.int64)])
