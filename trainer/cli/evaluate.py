"""`stoker evaluate`: held-out loss, perplexity and bits per byte of a checkpoint; for pairs also generation scores."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..distributed.placement import torchrun_ranks
from ..utils import environment
from ..utils.errors import EXIT_OK, UserError
from ..utils.progress import shown
from . import evaluate_tasks as tasks
from .common_arguments import add_checkpoint_arguments, add_pipeline_argument, model_path, positive_int
from .early_checks import check_model_path

if TYPE_CHECKING:
    from ..conversion.load_model import LoadedModel


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
        with shown(False):  # the harness has bars of its own
            return tasks.run(args, path)
    check_model_path(path)
    from ..conversion.load_model import load_model
    from ..distributed.inference_ranks import inference_ranks

    with inference_ranks(args.pipeline_parallel) as ranks:
        return _evaluate(args, load_model(path, args.device, args.base, ema=args.ema, ranks=ranks))


def _evaluate(args: argparse.Namespace, restored: LoadedModel) -> int:
    from ..evaluation.held_out_data import held_out_data, held_out_loss

    held_out = held_out_data(restored, args.split, args.data_path)
    name, batch_size = held_out.name, args.batch_size or restored.run.model.micro_batch_size
    result = held_out_loss(restored, held_out, batch_size, args.limit_batches)
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
    for name, value in result.metrics.items():
        print(f"{name:<13}  {value:.4f}")
    for line in scores.report_lines() if scores else ():
        print(line)
    return EXIT_OK
