"""Held-out data of a trained model, and its loss on them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from ..conversion.load_model import LoadedModel
from ..data.build_datasets import Data, build_data
from ..data.datasets.sft_examples import flatten_examples
from ..data.evaluation_data import EvaluationData, evaluation_data
from ..utils.errors import UserError
from .held_out_loss import EvaluationResult, evaluate, loss_function
from .own_functions import measure_own_metrics


def held_out_data(restored: LoadedModel, split: Literal["validation", "test"], path: Path | None) -> EvaluationData:
    """Return the data to evaluate a model on: a split of those of its run, or a text file or folder.

    Raises:
        UserError: the data of the run have changed since it was trained, or the split is empty.
    """
    if path is not None:
        found = evaluation_data(path, restored.run.data, restored.tokenizer)
        if found.skipped_files:
            print(f"note: --data-path {path}: {found.skipped_files}", file=sys.stderr)
        return found
    data = build_data(restored.run.data, restored.tokenizer)
    trained_on = restored.state.data_fingerprint
    if trained_on and data.fingerprint != trained_on:
        raise UserError(_other_data(restored, data.fingerprint, trained_on))
    samples = data.validation if split == "validation" else data.test
    if samples is None:
        raise UserError(f"--split {split} is empty: {_why_empty(restored, data, split)}")
    pairs = None if data.pairs is None else data.pairs.pairs[split]
    examples = None if data.examples is None else flatten_examples(data.examples[split])
    name = f"{split} split of {data.description.partition(':')[0]}"
    return EvaluationData(name, samples, data.token_byte_counts, pairs, examples)


def held_out_loss(
    restored: LoadedModel, data: EvaluationData, batch_size: int | None = None, limit_batches: int | None = None
) -> EvaluationResult:
    """Return the loss of a model on held-out data, and the metrics of its run that are registered.

    Args:
        batch_size: samples per batch; None: the micro batch size of the run.
        limit_batches: maximum number of batches; None: all.
    """
    return evaluate(
        loss_function(restored.model, restored.precision, restored.device),
        data.samples,
        token_bytes=data.token_bytes,
        batch_size=batch_size or restored.run.model.micro_batch_size,
        limit_batches=limit_batches,
        device=restored.device,
        metrics=measure_own_metrics(restored),
    )


def _why_empty(restored: LoadedModel, data: Data, split: str) -> str:
    """Return the reason why a split is empty, and the remedy."""
    keys = restored.run.data.keys
    why = f"`model.data.splits_string={keys.splits_string}` of the run assigns it no data"
    if isinstance(keys.data_prefix, dict):
        why = f"`model.data.data_prefix` of the run has no dataset for it (data_prefix.{split})"
    elif data.has_predefined_splits:
        why = "the data of the run have separate files per split, and none for this one"
    return f"{why}; choose the other split, or give other text with --data-path"


def _other_data(restored: LoadedModel, found: str, trained_on: str) -> list[str]:
    data = restored.run.data.keys
    if data.data_impl in ("pystd", "pystd_docstring"):
        trained = restored.state.versions.get("python", "another version")
        why = f"it was trained on the standard library of Python {trained}, and this Python has other files"
        fix = "run it with that Python, or give other text with --data-path"
    elif data.data_impl in ("text", "jsonl"):
        why = f"the text at `model.data.path` ({data.path}) has changed since it was trained"
        fix = "restore that text, or give other text with --data-path"
    else:
        why = f"what `model.data.data_impl={data.data_impl}` reads has changed since it was trained"
        fix = "restore those data, or give other text with --data-path"
    return [
        f"the data of checkpoint {restored.path} are not available: {why}, so this split may overlap the training data",
        f"fingerprint of the run {trained_on[:12]}, found {found[:12]}; {fix}",
    ]
