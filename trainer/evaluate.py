"""`stoker evaluate`: loss, perplexity and bits per byte of a checkpoint on held-out text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from . import environment
from .errors import EXIT_DONE, UserError
from .generate import add_checkpoint_arguments, positive_int

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .data.samples import Samples
    from .restore import Restored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stoker evaluate`."""
    add_checkpoint_arguments(parser)
    parser.add_argument(
        "--split",
        choices=["validation", "test"],
        default="validation",
        help="part of the run's own data (default: %(default)s)",
    )
    parser.add_argument("--data-path", metavar="FILE", type=Path, help="evaluate on this text file or folder instead")
    parser.add_argument(
        "--limit-batches", metavar="N", type=positive_int, help="stop after N batches, a fair sample (default: all)"
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=positive_int, help="samples at once (default: the run's micro batch size)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the figures."""
    environment.prepare_process()
    from .evaluation import evaluate, summed_loss
    from .restore import restore

    restored = restore(args.checkpoint, args.device)
    name, samples, token_bytes = _held_out(restored, args.split, args.data_path)
    result = evaluate(
        summed_loss(restored.model, restored.precision, restored.device),
        samples,
        token_bytes=token_bytes,
        batch_size=args.batch_size or restored.config.root.model.micro_batch_size,
        limit_batches=args.limit_batches,
        device=restored.device,
    )
    if args.json:
        document = {"checkpoint": str(restored.checkpoint.path), "step": restored.checkpoint.state.step, "data": name}
        print(json.dumps(document | result.to_document()))
        return EXIT_DONE
    print(f"checkpoint     {restored.checkpoint.path} (step {restored.checkpoint.state.step:,})")
    print(f"data           {name}")
    print(f"loss           {result.loss:.4f} nats/token over {result.tokens:,} tokens")
    print(f"perplexity     {result.perplexity:.4f}")
    if result.bits_per_byte is not None:
        print(f"bits per byte  {result.bits_per_byte:.4f} over {result.bytes:,} bytes")
    return EXIT_DONE


def _held_out(restored: Restored, split: str, path: Path | None) -> tuple[str, Samples, NDArray[np.int64]]:
    """Name of the data, its samples, and the bytes of each token id."""
    from .data.build import build_data, evaluation_data

    if path is not None:
        return str(path), *evaluation_data(path, restored.config.root, restored.tokenizer)
    data = build_data(restored.config.root, restored.tokenizer)
    trained_on = restored.checkpoint.state.data_fingerprint
    if data.fingerprint != trained_on:
        raise UserError(_other_data(restored, data.fingerprint, trained_on))
    samples = data.validation if split == "validation" else data.test
    if samples is None:
        raise UserError(
            f"--split {split} is empty (`model.data.splits_string={restored.config.root.model.data.splits_string}`); "
            "choose the other split, or give a text with --data-path"
        )
    return f"{split} split of {data.description.partition(':')[0]}", samples, data.token_bytes


def _other_data(restored: Restored, found: str, trained_on: str) -> list[str]:
    data = restored.config.root.model.data
    if data.data_impl == "pystd":
        trained = restored.checkpoint.state.versions.get("python", "another version")
        why = f"it was trained on the standard library of Python {trained}, and this Python has other files"
        fix = "run it with that Python, or give a text with --data-path"
    elif data.data_impl == "text":
        why = f"the text at `model.data.path` ({data.path}) has changed since it was trained"
        fix = "bring that text back, or give one with --data-path"
    else:
        why = f"what `model.data.data_impl={data.data_impl}` reads has changed since it was trained"
        fix = "bring those data back, or give a text with --data-path"
    return [
        f"the data of checkpoint {restored.checkpoint.path} are not here: {why}, "
        "so parts of this split may have been trained on",
        f"fingerprint of the run {trained_on[:12]}, found {found[:12]}; {fix}",
    ]
