"""Tokenize the text of `model.data`: document by document, or a whole split as one token stream."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...config.dataset_names import Split
from ...config.schema.trainer_and_data import DataBlock
from ...utils.environment import user_path
from ...utils.errors import UserError
from ..datasets.samples import EvaluationWindows
from ..tokenizers.tokenizer import TokenIds, Tokenizer
from .text_sources import Corpus, parse_proportions, read_pystd, read_text


def read_corpus(data: DataBlock) -> Corpus:
    """Read the text of `model.data`, split."""
    proportions = parse_proportions(data.splits_string)
    if data.data_impl == "pystd":
        return read_pystd(proportions)
    if data.path is None:
        raise UserError("`model.data.data_impl=text` needs `model.data.path`: a UTF-8 text file or a folder of them")
    return read_text(user_path(data.path, "model.data.path"), proportions)


def tokenize_documents(corpus: Corpus, split: Split, tokenizer: Tokenizer) -> list[TokenIds]:
    """Return the token ids of each document of a split, without EOS.

    Raises:
        UserError: a document cannot be tokenized; the message gives its number.
    """
    documents: list[TokenIds] = []
    for number, text in enumerate(corpus.documents[split]):
        try:
            documents.append(tokenizer.encode(text))
        except UserError as error:
            raise UserError(
                [f"{split} document {number + 1} of {corpus.name}: {error.lines[0]}", *error.lines[1:]]
            ) from None
    return documents


def token_stream(corpus: Corpus, split: Split, tokenizer: Tokenizer) -> NDArray[Any]:
    """Return all tokens of a split as one stream, [N], with EOS (if there is one) before, between and after documents.

    The leading EOS makes the first token of the first document a label too, so every byte of the text is predicted.

    Raises:
        UserError: as `tokenize_documents`.
    """
    documents = tokenize_documents(corpus, split, tokenizer)
    if not documents:
        return np.empty(0, np.uint16)
    if tokenizer.eos_id is None:
        return np.concatenate(documents)
    eos = np.array([tokenizer.eos_id], documents[0].dtype)
    return np.concatenate([eos, *(part for document in documents for part in (document, eos))])


def evaluation_windows(stream: NDArray[Any], length: int, tokenizer: Tokenizer) -> EvaluationWindows | None:
    """Return windows that cover a stream once, or None if there is nothing to predict."""
    return EvaluationWindows(stream, length, tokenizer.pad_id) if len(stream) > 1 else None
