"""`stoker generate`: generate text with a trained model, streamed to stdout."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..utils import environment
from ..utils.errors import EXIT_OK, UserError
from ..utils.progress import Progress
from ..utils.text import one_line, truncate_lines
from .common_arguments import (
    add_checkpoint_arguments,
    add_pipeline_argument,
    model_path,
    number_type,
    parse_float,
    parse_int,
    positive_int,
)
from .early_checks import check_model_path

if TYPE_CHECKING:
    from ..conversion.load_model import LoadedModel
    from ..generation.beam_search import BeamSearchConfig
    from ..generation.text_generator import Generator

_MAX_PROBLEMS = 10
_MAX_FILE = 256 << 20
"""Bytes of a file of prompts."""
_MAX_PROMPT = 4 << 20
"""Characters of a prompt: a tokenizer can need 100 times its size in memory, and minutes for 64 MiB."""
_TOO_LONG = f"has more than {_MAX_PROMPT:,} characters, the limit of a prompt"
_MORE_PROMPTS = "and {:,} prompts more"
_MAX_TOKENS = 1_000_000
_MAX_BEAMS = 1024
_BATCHES_PER_GROUP = 16
"""Batches of prompts that are sorted by length and printed together."""

_token_count = number_type(
    parse_int, lambda value: 1 <= value <= _MAX_TOKENS, f"a whole number from 1 to {_MAX_TOKENS}"
)
_beam_count = number_type(parse_int, lambda value: 1 <= value <= _MAX_BEAMS, f"a whole number from 1 to {_MAX_BEAMS}")
_seed = number_type(parse_int, lambda value: 0 <= value < 1 << 63, "a whole number from 0 to 2**63 - 1")
_temperature = number_type(
    parse_float, lambda value: 0 <= value < math.inf, "a finite number of at least 0; 0 is greedy"
)
_probability = number_type(parse_float, lambda value: 0 < value <= 1, "above 0 and at most 1")
_positive = number_type(parse_float, lambda value: 0 < value < math.inf, "a finite number above 0")
_number = number_type(parse_float, math.isfinite, "a finite number")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stoker generate`."""
    add_checkpoint_arguments(parser)
    add_pipeline_argument(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        default=[],
        help="text to continue (default: the start of a document); for a T5 the encoder input, with <extra_id_0> "
        "for a missing span if it was trained on those; may be repeated",
    )
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="file with the text to continue")
    prompt.add_argument(
        "--prompts-file",
        metavar="FILE",
        type=Path,
        help='JSON lines with a "prompt" each, or "messages" with --chat; prints them as JSON lines with a "text"',
    )
    parser.add_argument(
        "--chat", action="store_true", help="treat each prompt as a user message and apply the model's chat template"
    )
    parser.add_argument("--max-new-tokens", metavar="N", type=_token_count, default=256, help="default: %(default)s")
    parser.add_argument(
        "--temperature", metavar="T", type=_temperature, help="0 is greedy (default: 0.8, without --num-beams)"
    )
    parser.add_argument("--top-k", metavar="K", type=positive_int, help="sample from the K most probable tokens")
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=_probability,
        help="nucleus sampling: the fewest tokens whose probabilities sum to P",
    )
    parser.add_argument(
        "--repetition-penalty",
        metavar="R",
        type=_positive,
        help="above 1: make tokens that already occur less probable",
    )
    parser.add_argument(
        "--num-beams",
        metavar="N",
        type=_beam_count,
        default=1,
        help="beam search with N beams (default: 1, no search)",
    )
    parser.add_argument(
        "--length-penalty", metavar="X", type=_number, help="for beam search: above 0 favours long texts (default: 1)"
    )
    parser.add_argument(
        "--early-stopping",
        action="store_true",
        help="for beam search: stop when N hypotheses are finished, even if a better one may follow",
    )
    parser.add_argument("--seed", metavar="S", type=_seed, help="random seed (default: 0)")
    parser.add_argument(
        "--stop",
        metavar="STRING",
        type=_stop,
        action="append",
        default=[],
        help="stop before this string; may be repeated",
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=positive_int, default=32, help="prompts per batch (default: %(default)s)"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile the model first, which takes a minute and speeds up long texts",
    )


class _Prompt(NamedTuple):
    """A prompt.

    Attributes:
        text: text of the prompt; None for messages.
        line: the JSON object of --prompts-file it comes from.
    """

    text: str | None
    messages: Sequence[Any] | None = None
    line: Mapping[str, Any] = MappingProxyType({})


def run(args: argparse.Namespace) -> int:
    """Generate and print the texts, for continuations with the prompt in front.

    Raises:
        UserError: conflicting options, invalid prompts, or a model that cannot generate.
    """
    path = model_path(args)
    prompts = _prompts(args)
    _check_options(args)
    check_model_path(path)
    environment.prepare_process()
    from ..conversion.load_model import load_model
    from ..distributed.inference_ranks import inference_ranks

    with inference_ranks(args.pipeline_parallel) as ranks:
        return _generate(args, prompts, load_model(path, args.device, args.base, ema=args.ema, ranks=ranks))


def _generate(args: argparse.Namespace, prompts: list[_Prompt], restored: LoadedModel) -> int:
    from ...models.t5 import T5
    from ..generation.prompts import build_generator, encode_prompts, stop_strings
    from ..generation.sampling import SamplingParams
    from ..generation.text_generator import StoppingCriteria

    is_t5 = isinstance(restored.model, T5)
    generator = build_generator(restored)
    given = [(prompt.text or "") if prompt.messages is None else prompt.messages for prompt in prompts]
    read = encode_prompts(restored, given, chat=args.chat)
    _check_lengths(generator, read, args.num_beams)
    if args.compile:
        generator.compile()
    limits = StoppingCriteria(args.max_new_tokens, stop_strings(restored, args.stop, chat=args.chat))
    sampling = SamplingParams(
        0.8 if args.temperature is None else args.temperature, args.top_k, args.top_p, args.repetition_penalty or 1.0
    )
    seed = args.seed or 0
    if len(prompts) == 1 and args.prompts_file is None and args.num_beams == 1:
        if not (is_t5 or args.chat):
            _print(prompts[0].text or "")
        for _, piece in generator.stream(read, limits, sampling, [seed]):
            _print(piece)
        _print("\n")
        return EXIT_OK
    search = _beam_search(args)
    group_size = args.batch_size * _BATCHES_PER_GROUP
    with Progress("generating", len(prompts), "texts") as progress:
        for first in range(0, len(prompts), group_size):
            part = slice(first, first + group_size)
            if search is None:
                outputs = generator.generate(read[part], limits, sampling, [seed] * len(read[part]), args.batch_size)
            else:
                outputs = generator.beam_search(read[part], limits, search, args.batch_size * search.beams)
            texts = [output.text for output in outputs]
            progress.hide()
            for number, (prompt, text) in enumerate(zip(prompts[part], texts, strict=True), first + 1):
                _print(_format_output(prompt, text, args, number, len(prompts), with_prompt=not (is_t5 or args.chat)))
    return EXIT_OK


def _format_output(
    prompt: _Prompt, text: str, args: argparse.Namespace, number: int, count: int, *, with_prompt: bool
) -> str:
    """Format one of several generated texts for printing.

    Args:
        number: number of the prompt, from 1.
    """
    if args.prompts_file is not None:
        return json.dumps({**prompt.line, "text": text}, ensure_ascii=False) + "\n"
    title = f"[{number}/{count}]\n" if count > 1 else ""
    return f"{title}{(prompt.text or '') if with_prompt else ''}{text}\n"


# ---------------------------------------------------------------- prompts


def _prompts(args: argparse.Namespace) -> list[_Prompt]:
    """Read the prompts given by the options.

    Raises:
        UserError: a file cannot be read; lists every invalid line.
    """
    if args.prompt_file is not None:
        text = _read(args.prompt_file, "--prompt-file")
        if len(text) > _MAX_PROMPT:
            raise UserError(f"--prompt-file: {args.prompt_file} {_TOO_LONG}")
        return [_Prompt(text)]
    if args.prompts_file is None:
        return [_Prompt(text) for text in args.prompt] or [_Prompt("")]
    prompts: list[_Prompt] = []
    problems: list[str] = []
    for number, line in enumerate(_read(args.prompts_file, "--prompts-file").split("\n"), 1):
        if not line.strip():
            continue
        try:
            if len(line) > _MAX_PROMPT:
                raise ValueError(_TOO_LONG)
            prompts.append(_prompt_of(line, chat=args.chat))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    if problems:
        shown = truncate_lines(problems, _MAX_PROBLEMS, more="and {:,} lines more", indent="  ")
        raise UserError([f"--prompts-file {args.prompts_file} cannot be read:", *shown])
    if not prompts:
        raise UserError(f"--prompts-file {args.prompts_file} holds no prompt")
    return prompts


def _prompt_of(line: str, *, chat: bool) -> _Prompt:
    """Parse a prompt from a line of JSON.

    Raises:
        ValueError: the line is not a valid prompt.
    """
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({one_line(error, 80)})") from None
    if isinstance(document, dict) and chat and isinstance(document.get("messages"), list):
        return _Prompt(None, document["messages"], document)
    if isinstance(document, dict) and isinstance(document.get("prompt"), str):
        return _Prompt(document["prompt"], line=document)
    wanted = 'a string "prompt"' + (' or a list "messages"' if chat else "")
    raise ValueError(f"must be a JSON object with {wanted}")


def _check_lengths(generator: Generator, read: Sequence[Sequence[int]], beams: int) -> None:
    """Print which prompts of a GPT are truncated on the left.

    Raises:
        UserError: prompts that fill the context, where beam search has to stop.
    """
    context = generator.context
    if context is None:
        return
    if beams > 1:
        full = [
            f"prompt {number:,} has {len(tokens):,} tokens and fills the context of {context:,}, where beam "
            "search stops; shorten it, or leave out --num-beams"
            for number, tokens in enumerate(read, 1)
            if len(tokens) >= context
        ]
        if full:
            raise UserError(truncate_lines(full, _MAX_PROBLEMS, more=_MORE_PROMPTS))
    notes = [
        f"note: prompt {number:,} has {len(tokens):,} tokens, the context is {context:,}: the first "
        f"{len(tokens) - context:,} are dropped"
        for number, tokens in enumerate(read, 1)
        if len(tokens) > context
    ]
    for line in truncate_lines(notes, _MAX_PROBLEMS, more=_MORE_PROMPTS):
        print(line, file=sys.stderr)


# ---------------------------------------------------------------- options


def _check_options(args: argparse.Namespace) -> None:
    """Reject options that have no effect.

    Raises:
        UserError: lists all of them.
    """
    problems: list[str] = []
    if args.chat and args.prompts_file is None and args.prompt_file is None and not any(args.prompt):
        problems.append("--chat needs a user message: give it with --prompt")
    sampling_options = {"--top-k": args.top_k, "--top-p": args.top_p, "--seed": args.seed}
    if args.num_beams > 1:
        sampling_options = {
            "--temperature": args.temperature or None,
            **sampling_options,
            "--repetition-penalty": args.repetition_penalty,
        }
        useless = [name for name, value in sampling_options.items() if value is not None]
        if useless:
            problems.append(
                f"--num-beams ({args.num_beams}) is beam search, without sampling: leave out {', '.join(useless)}"
            )
    else:
        beam_options = {"--length-penalty": args.length_penalty is not None, "--early-stopping": args.early_stopping}
        problems += [
            f"{name} has no effect without --num-beams 2 or more" for name, is_given in beam_options.items() if is_given
        ]
        if args.temperature == 0:
            useless = [name for name, value in sampling_options.items() if value is not None]
            problems += [f"{name} has no effect with --temperature 0, which is greedy" for name in useless]
    if problems:
        raise UserError(problems)


def _beam_search(args: argparse.Namespace) -> BeamSearchConfig | None:
    from ..generation.beam_search import BeamSearchConfig

    if args.num_beams == 1:
        return None
    penalty = 1.0 if args.length_penalty is None else args.length_penalty
    return BeamSearchConfig(args.num_beams, penalty, args.early_stopping)


def replace_control_characters(text: str) -> str:
    """Replace control characters, which could affect the terminal, by U+FFFD; tabs and line breaks are kept."""
    return "".join(c if c in "\n\t" or not _is_control(c) else "\ufffd" for c in text)


def _is_control(character: str) -> bool:
    return ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0


def _print(text: str) -> None:
    if sys.stdout.isatty():
        text = replace_control_characters(text)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _read(path: Path, option: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise UserError(f"{option}: {path} is larger than {_MAX_FILE >> 20} MiB; split it")
        return data.decode("utf-8")
    except OSError as error:
        raise UserError(f"{option}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: {path} is not UTF-8 text: bad byte at offset {error.start}") from None


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' must be a text of at least one character")
    return text
