"""`stoker convert`: models of Hugging Face's in, and checkpoints of stoker's out for transformers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ..utils import environment
from ..utils.errors import EXIT_DONE, UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?")
_DTYPES = ("fp64", "fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `stoker convert`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder of Hugging Face's (config.json, weights, tokenizer), its id on the hub (org/name, "
        "org/name@revision), a GGUF file of a Llama, or a stoker run directory or checkpoint",
    )
    parser.add_argument("target", metavar="TARGET", type=Path, help="the new folder")
    parser.add_argument(
        "--merge", action="store_true", help="SOURCE is an adapter: write one model of it and the weights it belongs to"
    )
    parser.add_argument(
        "--base",
        metavar="FOLDER",
        type=Path,
        help="SOURCE is an adapter: where its frozen weights are now (default: where they were in training, or what "
        "adapter_config.json names)",
    )
    parser.add_argument("--ema", action="store_true", help="SOURCE is stoker's: take the moving average of its weights")
    parser.add_argument(
        "--to", choices=["hf", "stoker"], help="what to write (default: the one that SOURCE is not, as it is found)"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: each as it is)")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="the folder of the tokenizer's files, or byte-level (default: the tokenizer of SOURCE)",
    )
    parser.add_argument(
        "--model-type",
        metavar="NAME",
        help="to hf: the architecture, such as llama or mistral (default: the first that holds the model)",
    )
    parser.add_argument(
        "--ignore-field",
        metavar="NAME",
        action="append",
        default=[],
        help="to stoker: a field of config.json that you know to change no results; may be given several times",
    )


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done.

    Raises:
        UserError: SOURCE is nothing that can be converted, with every reason; or TARGET cannot be written.
    """
    environment.prepare_process()
    from ..conversion.casting import DTYPES
    from ..conversion.output_folder import check_new

    check_new(args.target)
    source = Path(args.source)
    if source.is_dir() and (lines := _adapter(source, args)) is not None:
        print("\n".join(lines))
        return EXIT_DONE
    given = {"--merge": args.merge, f"--base {args.base}": args.base}
    if named := [name for name, value in given.items() if value]:
        if not source.exists():
            raise UserError(f"{args.source}: there is no such folder")
        raise UserError(
            f"{', '.join(named)}: {args.source} is not an adapter; leave {'it' if len(named) == 1 else 'them'} out"
        )
    to = _direction(source, args.source)
    if args.to not in (None, to):
        raise UserError(f"--to {args.to}: {args.source} is of that kind already")
    dtype = DTYPES[args.dtype] if args.dtype else None
    if to == "hf":
        if args.ignore_field:
            raise UserError("--ignore-field is about the config.json of a model of Hugging Face's")
        from ..conversion.to_hf import convert_to_hf

        lines = convert_to_hf(
            source,
            args.target,
            dtype=dtype,
            tokenizer=args.tokenizer,
            model_type=args.model_type,
            average=args.ema,
        )
    else:
        if args.ema:
            raise UserError(f"--ema: {args.source} is a model of Hugging Face's, which holds no moving average")
        if args.model_type:
            raise UserError("--model-type is for --to hf; config.json says what SOURCE is")
        if not source.exists():
            from ..conversion.hub import download

            source = download(args.source)
        from ..conversion.from_hf import convert_to_stoker

        lines = convert_to_stoker(source, args.target, dtype=dtype, tokenizer=args.tokenizer, ignored=args.ignore_field)
    print("\n".join(lines))
    return EXIT_DONE


def _adapter(source: Path, args: argparse.Namespace) -> list[str] | None:
    """Convert an adapter; None where SOURCE is none."""
    from ..conversion.casting import DTYPES
    from ..conversion.convert_adapters import convert_adapter, is_adapter

    if not is_adapter(source):
        return None
    if args.ignore_field:
        raise UserError("--ignore-field is about the config.json of a whole model of Hugging Face's, not an adapter's")
    return convert_adapter(
        source,
        args.target,
        merge=args.merge,
        to=args.to,
        base=args.base,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        tokenizer=args.tokenizer,
        model_type=args.model_type,
        average=args.ema,
    )


def _direction(source: Path, typed: str) -> str:
    """What SOURCE can become.

    Raises:
        UserError: it is neither a model of Hugging Face's nor one of stoker's.
    """
    if not source.exists():
        if _HUB_ID.fullmatch(typed):
            return "stoker"
        raise UserError(f"{typed}: there is no such folder")
    if source.suffix == ".gguf" and source.is_file():
        return "stoker"
    if not source.is_dir():
        raise UserError(f"{typed} is neither a folder nor a .gguf file")
    from ..conversion.hf_folder import CONFIG, has_weights, read_object

    is_ours = (source / "manifest.json").exists() or (source / "checkpoints").is_dir() or any(source.glob("step-*"))
    if is_ours:
        return "hf"
    if has_weights(source) or "model_type" in (read_object(source, CONFIG) or {}):
        return "stoker"
    raise UserError(f"{typed} holds neither a {CONFIG} with weights nor a stoker checkpoint")
