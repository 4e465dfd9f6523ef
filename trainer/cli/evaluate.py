"""`stoker evaluate`: held-out loss, perplexity and bits per byte of a checkpoint; for pairs also generation scores."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..distributed.placement import torchrun_ranks
from ..utils import environment
from ..utils.errors import EXIT_OK, UserError
from . import evaluate_tasks as tasks
from .common_arguments import add_checkpoint_arguments, add_pipeline_argument, model_path, positive_int
from .early_checks import check_model_path

if TYPE_CHECKING:
    from ..conversion.load_model import LoadedModel
    from ..data.build_datasets import Data
    from ..data.evaluation_data import EvaluationData


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stoker evaluate`."""
    add_checkpoint_arguments(parser)
    add_pipeline_argument(parser)
    parser.add_argument(
        "--split",
        choices=["validation", "test"],
        default="validation",
        help="split of the run's own data (default: %(default)s)",
    )
    parser.add_argument("--data-path", metavar="FILE", type=Path, help="evaluate on this text file or folder instead")
    parser.add_argument(
        "--limit-batches",
        metavar="N",
        type=positive_int,
        help="evaluate only the first N batches, which are a fair sample (default: all)",
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=positive_int, help="samples per batch (default: the run's micro batch size)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    tasks.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the metrics."""
    path = model_path(args)
    environment.prepare_process()
    if tasks.has_tasks(args):
        if torchrun_ranks(environment.snapshot())[1] > 1:
            raise UserError("the tasks of the harness run in one process; start stoker evaluate without torchrun")
        return tasks.run(args, path)
    check_model_path(path)
    from ..conversion.load_model import load_model
    from ..distributed.inference_ranks import inference_ranks

    with inference_ranks(args.pipeline_parallel) as ranks:
        return _evaluate(args, load_model(path, args.device, args.base, ema=args.ema, ranks=ranks))


def _evaluate(args: argparse.Namespace, restored: LoadedModel) -> int:
    from ..evaluation.held_out_loss import evaluate, loss_function

    held_out = _held_out(restored, args.split, args.data_path)
    name, batch_size = held_out.name, args.batch_size or restored.run.model.micro_batch_size
    result = evaluate(
        loss_function(restored.model, restored.precision, restored.device),
        held_out.samples,
        token_bytes=held_out.token_bytes,
        batch_size=batch_size,
        limit_batches=args.limit_batches,
        device=restored.device,
    )
    scores = None
    limit = None if args.limit_batches is None else args.limit_batches * batch_size
    if held_out.pairs is not None:
        from ..evaluation.answer_scores import score_pairs

        scores = score_pairs(restored, held_out.pairs, batch_size, limit)
    elif held_out.examples is not None:
        from ..evaluation.answer_scores import score_examples

        scores = score_examples(restored, held_out.examples, batch_size, limit)
    if args.json:
        document = {"checkpoint": str(restored.path), "step": restored.state.step, "data": name}
        print(json.dumps(document | result.to_dict() | (scores.to_dict() if scores else {})))
        return EXIT_OK
    print(f"checkpoint     {restored.path} (step {restored.state.step:,})")
    print(f"data           {name}")
    print(f"loss           {result.loss:.4f} nats/token over {result.tokens:,} tokens")
    print(f"perplexity     {result.perplexity:.4f}")
    if result.bits_per_byte is not None:
        print(f"bits per byte  {result.bits_per_byte:.4f} over {result.bytes:,} bytes")
    for line in scores.report_lines() if scores else ():
        print(line)
    return EXIT_OK


def _held_out(restored: LoadedModel, split: Literal["validation", "test"], path: Path | None) -> EvaluationData:
    from ..data.build_datasets import build_data
    from ..data.datasets.sft_examples import flatten_examples
    from ..data.evaluation_data import EvaluationData, evaluation_data

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
