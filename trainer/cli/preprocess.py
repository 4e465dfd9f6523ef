"""`stoker preprocess`: tokenize documents into Megatron's indexed dataset format."""

from __future__ import annotations

import argparse
import sys
import time
from types import FrameType

from ..data.preprocess.job import Job, PreprocessResult, preprocess, tokenizer_path
from ..data.preprocess.journal import parts_folder
from ..data.preprocess.read_documents import ReadOptions
from ..data.preprocess.train_tokenizer import MAX_VOCAB_SIZE, MIN_VOCAB_SIZE
from ..data.tokenizers.tokenizer_files import SpecialTokens, load_tokenizer
from ..utils.environment import available_cores, user_path
from ..utils.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, UserError
from ..utils.signals import handlers_set
from ..utils.text import pluralize

_MAX_WORKERS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `stoker preprocess`."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files (.txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet), folders and patterns of them, hf:NAME[:SPLIT]",
    )
    parser.add_argument("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx and P.json")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json, a SentencePiece .model, a folder of one or of GPT-2's vocab.json and merges.txt, "
        "or byte-level (default)",
    )
    which.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="N",
        help="train a byte-level BPE of N tokens on a sample of at most 128 MiB, written to P-tokenizer.json",
    )
    parser.add_argument("--json-key", default="text", metavar="K", help="key or column of the text (default: text)")
    parser.add_argument("--text-lines", action="store_true", help="each line of a .txt is a document, not each file")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-document token",
    )
    parser.add_argument("--eod-token", metavar="T", help="the end-of-document token, if it has an unusual name")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each core)")
    parser.add_argument(
        "--on-error",
        choices=("skip", "stop"),
        default="skip",
        help="what to do with an invalid line: skip and count it, or stop at the first",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files and partial results at P")


def run(args: argparse.Namespace) -> int:
    """Preprocess and print a summary."""
    job = _job(args)
    stopped_by: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM and the like as Ctrl-C, so that no worker process is left behind."""
        stopped_by.append(number)
        raise KeyboardInterrupt

    started = time.monotonic()
    try:
        with handlers_set(interrupt):
            outcome = preprocess(job, _log)
    except (KeyboardInterrupt, UserError) as error:
        if isinstance(error, UserError):
            raise
        folder = parts_folder(job.prefix)
        kept = f"; finished parts are kept in {folder}: the same command resumes from there" if folder.is_dir() else ""
        _log(f"interrupted{kept}")
        return EXIT_TERMINATED if stopped_by else EXIT_INTERRUPTED
    _report(job, outcome, time.monotonic() - started)
    return EXIT_OK


def _job(args: argparse.Namespace) -> Job:
    workers = args.workers if args.workers is not None else min(available_cores(), _MAX_WORKERS)
    if not 1 <= workers <= _MAX_WORKERS:
        raise UserError(f"--workers ({workers}) must be 1 to {_MAX_WORKERS}")
    size = args.train_tokenizer
    if size is not None and not MIN_VOCAB_SIZE <= size <= MAX_VOCAB_SIZE:
        raise UserError(f"--train-tokenizer ({size}) must be {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE:,} tokens")
    if size is not None and args.eod_token is not None:
        raise UserError("--eod-token names a token of --tokenizer; one that is trained has <|endoftext|>")
    if args.eod_token is not None and not args.append_eod:
        raise UserError("--eod-token has no effect with --no-append-eod; give one of the two")
    prefix = user_path(args.output_prefix, "--output-prefix")
    if not prefix.name or args.output_prefix.endswith("/") or prefix.is_dir():
        raise UserError(f"--output-prefix ({args.output_prefix}) is a folder; add a name for the files in it")
    return Job(
        inputs=args.inputs,
        prefix=prefix,
        tokenizer=None
        if size is not None
        else load_tokenizer(args.tokenizer or "byte-level", "--tokenizer", SpecialTokens(eos=args.eod_token)),
        vocab_size=size or 0,
        reading=ReadOptions(args.json_key, args.text_lines),
        append_eod=args.append_eod,
        workers=workers,
        stop_on_error=args.on_error == "stop",
        overwrite=args.overwrite,
    )


def _report(job: Job, outcome: PreprocessResult, seconds: float) -> None:
    summary = outcome.summary
    if outcome.already_done:
        print(f"{job.prefix}: nothing to do, this command is already finished")
    size = summary["bytes"]
    speed = (
        ""
        if outcome.already_done or outcome.resumed_parts
        else f" in {seconds:,.1f} s ({size / seconds / 1e6:.1f} MB/s)"
    )
    print(
        f"{job.prefix}: {pluralize(summary['documents'], 'document')}, {pluralize(summary['tokens'], 'token')}, "
        f"{size:,} bytes of text{speed}"
    )
    if summary["skipped"]:
        print(f"skipped {sum(summary['skipped'].values()):,}")
        for line in outcome.rejection_summary or [f"{kind}: {count:,}" for kind, count in summary["skipped"].items()]:
            print(f"  {line}")
    if job.vocab_size:
        print(f"tokenizer: {tokenizer_path(job.prefix)}")


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
