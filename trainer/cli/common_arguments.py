"""Command-line arguments common to several verbs: configuration, trained model, numbers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..utils.errors import UserError

if TYPE_CHECKING:
    from ..config.draft import Draft
    from ..config.run_config import RunConfig

Number = TypeVar("Number", int, float)


CFG_PARTS = ("job", "hydra", "all")
INFO_PARTS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def add_config_arguments(parser: argparse.ArgumentParser, default_name: str = "train") -> None:
    """Add the arguments of all verbs that compose a configuration; see `load_config` and `shows_composition`."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config groups and key values")
    parser.add_argument(
        "-cd", "--config-dir", type=Path, metavar="D", help="folder with your own configuration files, before ./conf"
    )
    parser.add_argument(
        "-cp",
        "--config-path",
        type=Path,
        metavar="P",
        help="folder of the primary file, in place of ./conf; relative to the current folder",
    )
    parser.add_argument(
        "-cn", "--config-name", metavar="N", help=f"the primary file, without .yaml (default: {default_name})"
    )
    parser.add_argument("-c", "--cfg", choices=CFG_PARTS, help="print the composed YAML and exit")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    parser.add_argument("-p", "--package", metavar="KEY", help="with --cfg: only the block at this key")
    parser.add_argument(
        "-i",
        "--info",
        nargs="?",
        const="all",
        metavar="PART",
        help=f"print how the configuration is composed and exit: {', '.join(INFO_PARTS)} (default: all)",
    )


def shows_composition(args: argparse.Namespace) -> bool:
    """Return True if the verb prints the composition in place of its own work.

    Raises:
        UserError: options that need each other, or an unknown part.
    """
    if args.info is not None and args.info not in INFO_PARTS:
        if "=" not in args.info:
            raise UserError(f"--info {args.info}: must be one of {', '.join(INFO_PARTS)}")
        args.overrides = [args.info, *args.overrides]  # argparse takes the word after `--info` for its value
        args.info = "all"
    for option, given in (("--resolve", args.resolve), ("--package", args.package is not None)):
        if given and args.cfg is None:
            raise UserError(f"{option} acts with --cfg only; write --cfg job {option}")
    return args.cfg is not None or args.info is not None


def add_finetune_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--finetune`, of verbs that describe a run."""
    parser.add_argument(
        "--finetune",
        action="store_true",
        help="resolve as `stoker finetune` does: model keys come from model.restore_from_path",
    )


def load_config(args: argparse.Namespace, apply_options: Callable[[Draft], None] | None = None) -> RunConfig:
    """Compose and validate the configuration, with `args.finetune` as `stoker finetune` does.

    `apply_options` sets keys that options of the verb give, after the overrides.

    Raises:
        UserError: it is invalid.
    """
    from ..config.load import load_run_config
    from ..conversion.finetune_defaults import load_finetune_config

    load = load_finetune_config if args.finetune else load_run_config
    return load(
        args.config_name, args.config_dir, args.overrides, config_path=args.config_path, apply_options=apply_options
    )


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


def add_pipeline_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--pipeline-parallel`, of verbs whose processes share a model under torchrun."""
    parser.add_argument(
        "--pipeline-parallel",
        metavar="P",
        type=positive_int,
        default=1,
        help="under torchrun: distribute the layers over P stages, a part of the processes each; the processes of a "
        "stage share each of its layers (default: 1)",
    )


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


def number_type(
    parse: Callable[[str], Number], accepts: Callable[[Number], bool], rule: str
) -> Callable[[str], Number]:
    """Return an argparse type of the numbers that `accepts` is true for; `rule` follows "must be" in its error."""

    def convert(text: str) -> Number:
        value = parse(text)
        if not accepts(value):
            raise argparse.ArgumentTypeError(f"{text!r} must be {rule}")
        return value

    return convert


def parse_int(text: str) -> int:
    """Parse a non-negative integer of at most 19 digits; -1 for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1


def parse_float(text: str) -> float:
    """Parse a number; NaN, which lies in no range, for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


positive_int = number_type(parse_int, lambda value: value >= 1, "a whole number of at least 1")
"""Argparse type of a positive integer."""
