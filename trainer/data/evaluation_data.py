"""Evaluation data for a trained model, given by `--data-path`, processed in the same way as its own data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config.resolved_run import DataSpec
from ..utils.errors import UserError
from .datasets.document_chunks import InMemoryDocuments
from .datasets.samples import AnySamples
from .datasets.sft_examples import Example
from .sources.text_pairs import TextPair, TokenPairs, read_text_pairs
from .sources.text_sources import read_text
from .sources.text_tokens import evaluation_windows, token_stream, tokenize_documents
from .tasks.sft import build_sft_evaluation_data
from .tasks.task_samples import SampleFactory
from .tokenizers.tokenizer import Tokenizer
from .tokenizers.vocabulary import model_vocab_size, padded_byte_counts

_ALL = (0.0, 1.0, 0.0)
"""Everything is validation data."""


class EvaluationData(NamedTuple):
    """Data to evaluate a model on.

    Attributes:
        name: description for the report.
        samples: held-out samples.
        token_bytes: UTF-8 bytes per token id, [V].
        pairs: inputs and references, for a T5 trained on pairs.
        examples: prompts and answers, for a GPT trained on those.
        skipped_files: description of the skipped files of a folder; empty if there are none.
    """

    name: str
    samples: AnySamples
    token_bytes: NDArray[np.int64]
    pairs: Sequence[TextPair] | None = None
    examples: Sequence[Example] | None = None
    skipped_files: str = ""


def evaluation_data(path: Path, spec: DataSpec, tokenizer: Tokenizer) -> EvaluationData:
    """Return the data at `path`, made into samples in the same way as the run's own data.

    It is a text file or folder; for a model trained on pairs, prompts or conversations a JSONL file or folder. If such
    a folder has a `train.jsonl`, only its `validation.jsonl` is used.

    Raises:
        UserError: the data cannot be read or tokenized, or have nothing to predict.
    """
    task, make = spec.task, SampleFactory(spec, tokenizer)
    samples: AnySamples | None
    pairs, examples, skipped_files = None, None, ""
    if task.name == "seq2seq":
        keys = spec.keys
        texts = read_text_pairs(path, _ALL, keys.context_key, keys.label_key, named_by="--data-path")
        pairs = texts.pairs["validation"]
        samples = make.from_pairs(TokenPairs(pairs, tokenizer, make.shape), training=False)
        problem = f"--data-path: {path} holds no pair to evaluate on"
    elif task.name == "sft":
        sft = build_sft_evaluation_data(path, spec, tokenizer)
        samples, examples = sft.samples["validation"], sft.split_examples("validation")
        problem = f"--data-path: {path} holds nothing to evaluate on"
    else:
        corpus = read_text(path, _ALL, named_by="--data-path", for_training=False)
        skipped_files = corpus.skipped_files
        if make.uses_documents:
            documents = tokenize_documents(corpus, "validation", tokenizer)
            samples = make.from_documents(InMemoryDocuments(documents), training=False)
        else:
            windows = evaluation_windows(token_stream(corpus, "validation", tokenizer), task.window, tokenizer)
            samples = windows and make.from_windows(windows, training=False)
        problem = f"{path} holds a single token: there is nothing to predict; use a longer text"
    if samples is None:
        raise UserError(problem)
    token_bytes = padded_byte_counts(tokenizer, model_vocab_size(spec.vocab_size, tokenizer))
    return EvaluationData(str(path), samples, token_bytes, pairs, examples, skipped_files)
