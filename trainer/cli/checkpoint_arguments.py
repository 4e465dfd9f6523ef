"""Command-line arguments that select a trained model and the device it runs on."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..utils.errors import UserError


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments common to all verbs that load a checkpoint; see `model_path`."""
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        nargs="?",
        help="a run directory, its checkpoints directory or one step of it; or a Hugging Face model folder "
        "(config.json, weights, tokenizer)",
    )
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="the same, as an option")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="device of the model (default: auto)"
    )
    parser.add_argument(
        "--base", metavar="DIR", type=Path, help="path of the base weights of an adapter, if they have moved"
    )
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights (exp_manager.ema)")


def model_path(args: argparse.Namespace) -> Path:
    """Return the model path, given as the positional argument or with --checkpoint.

    Raises:
        UserError: neither or both are given.
    """
    if args.folder is not None and args.checkpoint is not None:
        raise UserError(f"{args.folder} and --checkpoint {args.checkpoint} both give the model; leave one out")
    path: Path | None = args.folder or args.checkpoint
    if path is None:
        raise UserError("no model is given; pass its folder as DIR or --checkpoint DIR")
    return path
