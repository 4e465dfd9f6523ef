"""`stoker convert`: convert Hugging Face models to stoker checkpoints, and checkpoints to Hugging Face models."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..utils import environment
from ..utils.errors import EXIT_OK, UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?")
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
    from ..checkpoint.hf_files import is_peft_folder
    from ..conversion.output_folder import check_is_apart, check_target

    # Before the imports below, which take seconds.
    check_target(args.target, overwrite=args.overwrite)
    for given in (Path(args.source), *filter(None, [args.base])):
        check_is_apart(args.target, given)
    if not is_peft_folder(Path(args.source)):
        _format_not_of(Path(args.source), args.source)
    environment.prepare_process()
    from ..conversion.convert_adapters import convert_adapter, is_adapter
    from ..conversion.from_hf import convert_to_stoker
    from ..conversion.tensor_source import DTYPES
    from ..conversion.to_hf import convert_to_hf

    source = Path(args.source)
    dtype = DTYPES[args.dtype] if args.dtype else None
    options = {"dtype": dtype, "tokenizer": args.tokenizer, "model_type": args.model_type, "ema": args.ema}
    options["overwrite"] = args.overwrite
    if source.is_dir() and is_adapter(source):
        if args.ignore_field:
            raise UserError(
                "--ignore-field applies to the config.json of a whole Hugging Face model, not of an adapter"
            )
        lines = convert_adapter(source, args.target, merge=args.merge, to=args.to, base=args.base, **options)
    elif _target_format(source, args) == "hf":
        if args.ignore_field:
            raise UserError("--ignore-field applies to the config.json of a Hugging Face model")
        lines = convert_to_hf(source, args.target, **options)
    else:
        if args.ema:
            raise UserError(f"--ema: {args.source} is a Hugging Face model, which has no moving average")
        if args.model_type:
            raise UserError("--model-type applies to --to hf; config.json gives the type of SOURCE")
        if not source.exists():
            from ..conversion.hub import download

            source = download(args.source)
        lines = convert_to_stoker(
            source,
            args.target,
            dtype=dtype,
            tokenizer=args.tokenizer,
            ignored=args.ignore_field,
            overwrite=args.overwrite,
        )
    print("\n".join(lines))
    return EXIT_OK


def _target_format(source: Path, args: argparse.Namespace) -> str:
    """Return the format a whole model is converted to, `hf` or `stoker`.

    Raises:
        UserError: SOURCE is neither a Hugging Face model nor a stoker checkpoint, or an option does not apply to it.
    """
    adapter_options = {"--merge": args.merge, f"--base {args.base}": args.base}
    if options := [name for name, value in adapter_options.items() if value]:
        if not source.exists():
            raise UserError(f"{args.source}: there is no such folder")
        raise UserError(
            f"{', '.join(options)}: {args.source} is not an adapter; leave {'it' if len(options) == 1 else 'them'} out"
        )
    to = _format_not_of(source, args.source)
    if args.to not in (None, to):
        raise UserError(f"--to {args.to}: {args.source} already has that format")
    return to


def _format_not_of(source: Path, typed: str) -> str:
    if not source.exists():
        if _HUB_ID.fullmatch(typed):
            return "stoker"
        raise UserError(f"{typed}: there is no such folder")
    if source.suffix == ".gguf" and source.is_file():
        return "stoker"
    if not source.is_dir():
        raise UserError(f"{typed} is neither a folder nor a .gguf file")
    from ..checkpoint.hf_files import CONFIG, has_checkpoints, is_hf_folder

    if has_checkpoints(source):
        return "hf"
    if is_hf_folder(source):
        return "stoker"
    raise UserError(f"{typed} holds neither a {CONFIG} with weights nor a stoker checkpoint")
