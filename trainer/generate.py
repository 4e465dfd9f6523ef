"""`stoker generate`: sample text from a checkpoint, printed as it appears: how a prompt goes on, or a T5's answer."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from . import environment
from .errors import EXIT_DONE, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stoker generate`."""
    add_checkpoint_arguments(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        default="",
        help="text to continue (default: the start of a document); what a T5 reads and answers, with <extra_id_0> "
        "for a missing span if it learnt those",
    )
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="file whose text is continued")
    parser.add_argument("--max-new-tokens", metavar="N", type=positive_int, default=256, help="default: %(default)s")
    parser.add_argument(
        "--temperature", metavar="T", type=_temperature, default=0.8, help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument("--top-k", metavar="K", type=positive_int, help="keep the K most probable tokens")
    parser.add_argument(
        "--top-p", metavar="P", type=_share, help="keep the fewest tokens whose probabilities sum to P (nucleus)"
    )
    parser.add_argument(
        "--seed", metavar="S", type=_seed, default=0, help="same seed, same text (default: %(default)s)"
    )
    parser.add_argument(
        "--stop", metavar="STRING", action="append", default=[], help="end before this text; may be given several times"
    )


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every command that reads a checkpoint needs."""
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        required=True,
        help="a run directory, its checkpoints directory, or one step in it",
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="where the model runs (default: auto)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation; of a T5 the answer alone.

    Raises:
        UserError: no prompt for a T5, or a model that writes no text.
    """
    prompt = _read_prompt(args.prompt_file) if args.prompt_file else args.prompt
    environment.prepare_process()
    from ..models.bert import BERT
    from ..models.t5 import T5
    from .answers import answering
    from .data.sentinels import sentinel_ids, sentinel_name
    from .restore import restore
    from .sampling import generate_text

    restored = restore(args.checkpoint, args.device)
    model, tokenizer = restored.model, restored.tokenizer
    if isinstance(model, BERT):
        raise UserError("stoker generate: a BERT fills in hidden tokens and writes no text; use a GPT or a T5")
    logits, context, start = restored.logits, restored.context, None
    names: dict[int, str] = {}
    if isinstance(model, T5):
        if not prompt:
            raise UserError("stoker generate: a T5 answers a text; give one with --prompt or --prompt-file")
        logits = answering(model, tokenizer, prompt, restored.precision, restored.device)
        context, start = model.max_positions[1] or args.max_new_tokens + 1, [tokenizer.pad_id]
        names = {int(token): sentinel_name(number) for number, token in enumerate(sentinel_ids(tokenizer))}
    pieces = generate_text(
        logits,
        tokenizer,
        prompt,
        start=start,
        names=names,
        context=context,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
        device=restored.device,
    )
    if start is None:
        _print(prompt)
    for piece in pieces:
        _print(piece)
    _print("\n")
    return EXIT_DONE


def printable(text: str) -> str:
    """The text with control characters, which could steer a terminal, shown as U+FFFD; tabs and line breaks stay."""
    return "".join(c if c in "\n\t" or not _is_control(c) else "\ufffd" for c in text)


def _is_control(character: str) -> bool:
    return ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0


def _print(text: str) -> None:
    if sys.stdout.isatty():
        text = printable(text)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _read_prompt(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"--prompt-file: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file: {path} is not UTF-8 text: bad byte at offset {error.start}") from None


def positive_int(text: str) -> int:
    """Read an option that counts something."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return value


def _seed(text: str) -> int:
    value = _whole(text)
    if not 0 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 0 to 2**63 - 1")
    return value


def _temperature(text: str) -> float:
    value = _float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number of at least 0; 0 is greedy")
    return value


def _share(text: str) -> float:
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0 and at most 1")
    return value


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
