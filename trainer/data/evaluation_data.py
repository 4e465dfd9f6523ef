"""Text or pairs that a trained model is evaluated on, made into samples as those of its own data were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..config.data_task import task_of
from ..config.schema.root import RootBlock
from ..utils.errors import UserError
from .datasets.document_chunks import TokenDocuments
from .datasets.seq2seq import AnySamples
from .sources.text_pairs import TextPairs, TokenPairs, read_jsonl
from .sources.text_sources import Corpus, read_text
from .sources.text_tokens import evaluation_windows, token_documents, token_stream
from .tasks.sft import FineTuning, held_out_examples
from .tasks.task_samples import TaskSamples
from .tokenizers.tokenizer import Tokenizer
from .tokenizers.vocabulary import bytes_of_ids, model_vocabulary


def evaluation_data(path: Path, root: RootBlock, tokenizer: Tokenizer) -> tuple[AnySamples, NDArray[np.int64], Corpus]:
    """Samples over a whole text file or folder, for a trained model, the bytes of each token id, and the text.

    They are made as those of the run's own data were.

    Raises:
        UserError: the text cannot be read or tokenized, or is too short to predict anything.
    """
    corpus = read_text(path, (0.0, 1.0, 0.0), named_by="--data-path", trains=False)
    task = task_of(root)
    make = TaskSamples(root, task, tokenizer)
    samples: AnySamples | None
    if make.takes_documents:
        samples = make.of_documents(TokenDocuments(token_documents(corpus, "validation", tokenizer)), training=False)
    else:
        windows = evaluation_windows(token_stream(corpus, "validation", tokenizer), task.window, tokenizer)
        samples = windows and make.of_windows(windows, training=False)
    if samples is None:
        raise UserError(f"{path} holds a single token: there is nothing to predict; use a longer text")
    return samples, bytes_of_ids(tokenizer, model_vocabulary(root, tokenizer)), corpus


def evaluation_examples(
    path: Path, root: RootBlock, tokenizer: Tokenizer
) -> tuple[AnySamples, NDArray[np.int64], FineTuning]:
    """Samples of all prompts with answers, or conversations, of a JSONL file or folder, the bytes of each token id, and
    what they were made of (as validation).

    Of a folder that holds `train.jsonl` they are those of its `validation.jsonl`.

    Raises:
        UserError: it cannot be read, or nothing in it can be predicted.
    """
    made = held_out_examples(path, root, task_of(root), tokenizer)
    samples = made.samples["validation"]
    if samples is None:
        raise UserError(f"--data-path: {path} holds nothing to evaluate on")
    return samples, bytes_of_ids(tokenizer, model_vocabulary(root, tokenizer)), made


def evaluation_pairs(
    path: Path, root: RootBlock, tokenizer: Tokenizer
) -> tuple[AnySamples, NDArray[np.int64], TextPairs]:
    """Samples of all pairs of a JSONL file or folder, the bytes of each token id, and the pairs (as validation).

    Of a folder that holds `train.jsonl` they are those of its `validation.jsonl`.

    Raises:
        UserError: it cannot be read, or holds no pair.
    """
    data = root.model.data
    texts = read_jsonl(path, (0.0, 1.0, 0.0), data.context_key, data.label_key, named_by="--data-path")
    make = TaskSamples(root, task_of(root), tokenizer)
    samples = make.of_pairs(TokenPairs(texts.pairs["validation"], tokenizer, make.shape), training=False)
    if samples is None:
        raise UserError(f"--data-path: {path} holds no pair to evaluate on")
    return samples, bytes_of_ids(tokenizer, model_vocabulary(root, tokenizer)), texts
