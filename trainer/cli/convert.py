"""`stoker convert`: convert Hugging Face models to stoker checkpoints, and checkpoints to Hugging Face models."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..utils import environment
from ..utils.errors import EXIT_OK

_DTYPES = ("fp64", "fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `stoker convert`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a Hugging Face model folder (config.json, weights, tokenizer), a hub id (org/name, "
        "org/name@revision), a GGUF file of a Llama model, or a stoker run directory or checkpoint",
    )
    parser.add_argument("target", metavar="TARGET", type=Path, help="the output folder; a new one without --overwrite")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace TARGET, once the conversion has succeeded, if it is the output of an earlier one",
    )
    parser.add_argument("--merge", action="store_true", help="SOURCE is an adapter: merge it into its base weights")
    parser.add_argument(
        "--base",
        metavar="FOLDER",
        type=Path,
        help="SOURCE is an adapter: path of its base weights (default: their path at training time, or the one in "
        "adapter_config.json)",
    )
    parser.add_argument(
        "--ema", action="store_true", help="SOURCE is a checkpoint: use the moving average of its weights"
    )
    parser.add_argument("--to", choices=["hf", "stoker"], help="output format (default: the one that SOURCE is not)")
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: unchanged)")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="folder with the tokenizer files, or byte-level (default: the tokenizer of SOURCE)",
    )
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="with --to hf: the architecture, such as llama or mistral (default: the first that supports the model)",
    )
    parser.add_argument(
        "--ignore-field",
        metavar="NAME",
        action="append",
        default=[],
        help="with --to stoker: a field of config.json to ignore because it does not affect results; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Convert SOURCE and print a summary.

    Raises:
        UserError: SOURCE cannot be converted, with every reason; or TARGET cannot be written.
    """
    from ..conversion.convert import check_source_and_target, convert

    check_source_and_target(args.source, args.target, base=args.base, overwrite=args.overwrite)
    environment.prepare_process()
    lines = convert(
        args.source,
        args.target,
        to=args.to,
        dtype=args.dtype,
        tokenizer=args.tokenizer,
        model_type=args.model_type,
        merge=args.merge,
        base=args.base,
        ema=args.ema,
        ignored_fields=args.ignore_field,
        overwrite=args.overwrite,
    )
    print("\n".join(lines))
    return EXIT_OK
