"""Build the tokenizer of `model.tokenizer`, and determine the vocabulary size of the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...config.resolved_run import DataSpec
from ...utils.errors import UserError
from ..sources.text_sources import Corpus
from ..tasks.chat_files import chat_template_from_config, get_chat_template
from ..tasks.sentinels import sentinel_ids
from .tokenizer import ByteTokenizer, CharTokenizer, Tokenizer


def tokenizer_for_corpus(spec: DataSpec, corpus: Corpus) -> Tokenizer:
    """Return the tokenizer of `model.tokenizer`; a char tokenizer covers the characters of all splits."""
    if spec.tokenizer.library == "char":
        return CharTokenizer.from_texts([text for texts in corpus.documents.values() for text in texts])
    return configured_tokenizer(spec)


def configured_tokenizer(spec: DataSpec) -> Tokenizer:
    """Return the tokenizer of `model.tokenizer`.

    Raises:
        UserError: it is built from the training text, and there is none.
    """
    match spec.tokenizer.library:
        case "byte-level":
            return ByteTokenizer()
        case "char":
            raise UserError(
                f"`model.tokenizer.library` (char) is built from text, but `model.data.data_impl="
                f"{spec.keys.data_impl}` has none; use the tokenizer that made the data"
            )
        case _:
            from .tokenizer_files import tokenizer_from_config

            return tokenizer_from_config(spec.tokenizer)


def with_chat_template(spec: DataSpec, tokenizer: Tokenizer) -> Tokenizer:
    """Set the tokenizer's chat template to `model.tokenizer.chat_template`, if that is given; for conversations without
    any to the default, which is stored and exported like any other.

    Raises:
        UserError: the template cannot be read, and the tokenizer (of a checkpoint) has none either; or there is no
            EOS token for the default.
    """
    template = spec.tokenizer.chat_template
    if template is not None:
        try:
            tokenizer.chat_template = chat_template_from_config(template, tokenizer)
        except UserError:
            if tokenizer.chat_template is None:
                raise
    elif spec.keys.chat:
        tokenizer.chat_template = get_chat_template(tokenizer)
    return tokenizer


def model_vocab_size(override: int | None, tokenizer: Tokenizer) -> int:
    """Return the vocabulary size of the model: that of its tokenizer, or `model.override_vocab_size`.

    Raises:
        UserError: `model.override_vocab_size` is too small.
    """
    if override is not None and override < tokenizer.vocab_size:
        raise UserError(
            f"`model.override_vocab_size` ({override}) must not be below the {tokenizer.vocab_size} tokens of the "
            f"tokenizer; leave it null or use {tokenizer.vocab_size} or more"
        )
    return override or tokenizer.vocab_size


def padded_byte_counts(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.int64]:
    """Return the number of UTF-8 bytes of each id of the model, int64 [V]; see `Tokenizer.token_byte_counts`.

    Sentinels and padding of the vocabulary count 0.
    """
    token_bytes = tokenizer.token_byte_counts()
    token_bytes[sentinel_ids(tokenizer)] = 0
    return np.concatenate([token_bytes, np.zeros(vocab_size - len(token_bytes), np.int64)])
