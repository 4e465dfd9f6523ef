"""Evaluation data for a trained model, given by `--data-path`, processed in the same way as its own data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..config.data_task import task_from_config
from ..config.schema.root import RootBlock
from ..utils.errors import UserError
from .datasets.document_chunks import InMemoryDocuments
from .datasets.samples import AnySamples
from .sources.text_pairs import TextPairs, TokenPairs, read_text_pairs
from .sources.text_sources import Corpus, read_text
from .sources.text_tokens import evaluation_windows, token_stream, tokenize_documents
from .tasks.sft import SFTData, build_sft_evaluation_data
from .tasks.task_samples import SampleFactory
from .tokenizers.tokenizer import Tokenizer
from .tokenizers.vocabulary import model_vocab_size, padded_byte_counts


def evaluation_data(path: Path, root: RootBlock, tokenizer: Tokenizer) -> tuple[AnySamples, NDArray[np.int64], Corpus]:
    """Return samples over a whole text file or folder, the bytes per token id, and the text.

    The samples are built in the same way as those of the run's own data.

    Raises:
        UserError: the text cannot be read or tokenized, or is too short to predict anything.
    """
    corpus = read_text(path, (0.0, 1.0, 0.0), named_by="--data-path", for_training=False)
    task = task_from_config(root)
    make = SampleFactory(root, task, tokenizer)
    samples: AnySamples | None
    if make.uses_documents:
        samples = make.from_documents(
            InMemoryDocuments(tokenize_documents(corpus, "validation", tokenizer)), training=False
        )
    else:
        windows = evaluation_windows(token_stream(corpus, "validation", tokenizer), task.window, tokenizer)
        samples = windows and make.from_windows(windows, training=False)
    if samples is None:
        raise UserError(f"{path} holds a single token: there is nothing to predict; use a longer text")
    return samples, padded_byte_counts(tokenizer, model_vocab_size(root, tokenizer)), corpus


def evaluation_examples(
    path: Path, root: RootBlock, tokenizer: Tokenizer
) -> tuple[AnySamples, NDArray[np.int64], SFTData]:
    """Return samples of all prompts with answers, or conversations, of a JSONL file or folder.

    If the folder has a `train.jsonl`, only its `validation.jsonl` is used.

    Returns:
        The samples, the bytes per token id, and the examples (as validation split).

    Raises:
        UserError: it cannot be read, or has no token to predict.
    """
    sft = build_sft_evaluation_data(path, root, task_from_config(root), tokenizer)
    samples = sft.samples["validation"]
    if samples is None:
        raise UserError(f"--data-path: {path} holds nothing to evaluate on")
    return samples, padded_byte_counts(tokenizer, model_vocab_size(root, tokenizer)), sft


def evaluation_pairs(
    path: Path, root: RootBlock, tokenizer: Tokenizer
) -> tuple[AnySamples, NDArray[np.int64], TextPairs]:
    """Return samples of all pairs of a JSONL file or folder.

    If the folder has a `train.jsonl`, only its `validation.jsonl` is used.

    Returns:
        The samples, the bytes per token id, and the pairs (as validation split).

    Raises:
        UserError: it cannot be read, or has no pair.
    """
    data = root.model.data
    texts = read_text_pairs(path, (0.0, 1.0, 0.0), data.context_key, data.label_key, named_by="--data-path")
    make = SampleFactory(root, task_from_config(root), tokenizer)
    samples = make.from_pairs(TokenPairs(texts.pairs["validation"], tokenizer, make.shape), training=False)
    if samples is None:
        raise UserError(f"--data-path: {path} holds no pair to evaluate on")
    return samples, padded_byte_counts(tokenizer, model_vocab_size(root, tokenizer)), texts
