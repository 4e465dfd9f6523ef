"""Which model a command asks, and on which device: the arguments of those that read a trained one."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..utils.errors import UserError


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every command that reads a checkpoint needs; `checkpoint_of` reads which."""
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=Path,
        nargs="?",
        help="a run directory, its checkpoints directory, or one step in it; or a folder of Hugging Face's "
        "(config.json, weights, tokenizer)",
    )
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="the same, as an option")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="where the model runs (default: auto)"
    )
    parser.add_argument(
        "--base", metavar="DIR", type=Path, help="where the frozen weights of an adapter are, if they have moved"
    )
    parser.add_argument(
        "--ema", action="store_true", help="take the moving average of the weights (exp_manager.ema) that was trained"
    )


def checkpoint_of(args: argparse.Namespace) -> Path:
    """The model that the user names, bare or with --checkpoint.

    Raises:
        UserError: not once.
    """
    if args.folder is not None and args.checkpoint is not None:
        raise UserError(f"{args.folder} and --checkpoint {args.checkpoint} both name the model; leave one out")
    named: Path | None = args.folder or args.checkpoint
    if named is None:
        raise UserError("no model is named; give its folder: DIR, or --checkpoint DIR")
    return named
