"""The command line: `stoker VERB [--config-dir D] [--config-name N] [key=value ...]`.

Nothing here imports torch, and nothing at all is imported before it is needed: `--help`, `config` and every error of a
configuration come before torch.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils import environment
from ..utils.errors import (
    EXIT_BAD_INPUT,
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_IO,
    EXIT_TERMINATED,
    UserError,
    keep_trace,
)
from ..utils.redaction import words_without_secrets
from .argument_parser import Parser

if TYPE_CHECKING:
    from ..config.run_config import RunConfig
    from ..distributed.placement import Placement

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass(frozen=True, slots=True)
class Verb:
    """One command.

    Attributes:
        about: one line for the overview.
        composes: it is described by a composed configuration alone: `train`, `finetune`, `config`.
        takes_code: whether `--import` makes sense.
    """

    about: str
    composes: bool = False
    takes_code: bool = False


VERBS = {
    "train": Verb("train a model", composes=True, takes_code=True),
    "finetune": Verb(
        "train a model further from weights that are there, all of it or an adapter", composes=True, takes_code=True
    ),
    "config": Verb("show every effective value and where it comes from", composes=True, takes_code=True),
    "explain": Verb("say which attention a run would take, and why not the others", takes_code=True),
    "plan": Verb("say what memory and time a run will take, and what makes it fit", takes_code=True),
    "generate": Verb("continue a text with a trained model"),
    "evaluate": Verb("loss, perplexity and bits per byte of a trained model", takes_code=True),
    "convert": Verb("turn a model of Hugging Face's into a checkpoint, or a checkpoint into one of theirs"),
    "preprocess": Verb("turn text, JSON lines or tables into tokenized data"),
    "quickstart": Verb("train a small GPT on this machine in about a minute"),
    "doctor": Verb("what this machine has, and what it can do"),
}

_OVERVIEW = """usage: stoker VERB [options] [key=value ...]

{verbs}

A run is described by YAML: groups (model=gpt_125m data=text experiment=NAME) and keys (trainer.max_steps=1000).
`stoker VERB --help` explains a verb, `stoker config` shows the whole configuration, docs/configuration.md every key.
"""

_GROUPS = """A configuration is composed of files, one of each group: model=, data=, tokenizer=, optim=, peft=,
trainer=, experiment=.
Keys are set by key=value (+key=value and ++key=value mean the same), ~key goes back to the default.
Your own files go into ./conf, or any folder given with --config-dir."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and give the exit code; no exception leaves, but for what argparse raises to exit after `--help`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UserError as error:
        _say("\n".join(error.lines))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output (head, less) has gone; Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            _say(f"{error.filename or 'the disk'}: {error.strerror}")
            return EXIT_IO
        return _crash(error, arguments)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_OVERVIEW.format(verbs="\n".join(f"  {name:<11} {verb.about}" for name, verb in VERBS.items())))
        return EXIT_DONE if arguments else EXIT_BAD_INPUT
    name = arguments[0]
    if name == "--version":
        from importlib.metadata import version

        print(f"stoker {version('stoker')}")
        return EXIT_DONE
    if name not in VERBS:
        raise UserError(_no_verb(name))
    verb = VERBS[name]
    parser = Parser(
        arguments[1:],
        prog=f"stoker {name}",
        description=verb.about[0].upper() + verb.about[1:] + ".",
        epilog=_GROUPS if verb.composes else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments, run = _parts(name, verb)
    add_arguments(parser)
    if verb.takes_code:
        parser.add_argument(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="MODULE",
            help="import a module of your own first, which registers a data set; may be given several times",
        )
    args = parser.parse_intermixed_args(arguments[1:])
    if verb.takes_code and args.imports:
        from ..plugins.import_modules import import_modules

        import_modules(args.imports)
    return run(args)


def _no_verb(name: str) -> list[str]:
    from ..config.suggest import closest

    near = closest(name, VERBS)
    if near is None and ("=" in name or name.startswith("-")):
        near = "train"
    did = f"did you mean `stoker {near}`?" if near else f"verbs are {', '.join(VERBS)}"
    return [f"stoker {name}: there is no such verb; {did}"]


def _parts(
    name: str, verb: Verb
) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    if name in ("train", "finetune"):
        return partial(_add_train_arguments, finetune=name == "finetune"), _train
    if name == "config":
        return _add_show_arguments, _config
    # imported when it is the one that runs: some import torch
    match name:
        case "explain":
            from . import explain as module
        case "plan":
            from . import plan as module
        case "generate":
            from . import generate as module
        case "evaluate":
            from . import evaluate as module
        case "convert":
            from . import convert as module
        case "preprocess":
            from . import preprocess as module
        case "quickstart":
            from . import quickstart as module
        case _:
            from . import doctor as module
    return module.add_arguments, module.run


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-dir", type=Path, metavar="D", help="a folder of your own configuration files")
    parser.add_argument(
        "--config-name", metavar="N", help="the primary file, without .yaml (default: train, or finetune)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="choices of groups and values of keys")


def _add_train_arguments(parser: argparse.ArgumentParser, *, finetune: bool = False) -> None:
    _add_config_arguments(parser)
    parser.set_defaults(finetune=finetune)
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="train with each combination of values: key=1,2 key=range(1,4) group=glob(gpt*), one run after another",
    )
    parser.add_argument(
        "--restart",
        type=int,
        default=0,
        metavar="N",
        help="start again, up to N times without progress, after a crash or a lost process",
    )


def _add_show_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config_arguments(parser)
    parser.add_argument(
        "--finetune", action="store_true", help="as `stoker finetune` reads it: the model is model.restore_from_path"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything as one JSON object")
    form.add_argument("--schema", action="store_true", help="the JSON schema of a family's files, for editors")
    form.add_argument("--all", action="store_true", help="every key of the family that is known, with its state")
    form.add_argument("--docs", action="store_true", help="docs/configuration.md")


def _load(args: argparse.Namespace) -> RunConfig:
    from ..config.load import load_run_config

    return load_run_config(args.config_name, args.config_dir, args.overrides, finetune=args.finetune)


def _train(args: argparse.Namespace) -> int:
    if args.multirun:
        from .multirun import sweep

        return sweep(
            args.config_name, args.config_dir, args.overrides, partial(_start, args), _say, finetune=args.finetune
        )
    config = _load(args)
    _say_findings(config.findings)
    from ..distributed.placement import place

    placement = place(config.root.trainer, environment.snapshot())
    if placement.rank is not None:
        _say_late(args.imports, config)
        environment.prepare_process(config.root.env_vars)
        from .elastic_entry import train as train_as_rank

        return train_as_rank(config, placement)
    # Modules of the user's own may have loaded torch, which reads some variables once: a new process has them in time.
    if args.restart or not placement.is_single or (args.imports and config.root.env_vars):
        _end_on_sigterm()
        return _start(args, config, placement)
    environment.prepare_process(config.root.env_vars)
    from ..train import train

    return train(config)


def _end_on_sigterm() -> None:
    """End with 143 on a SIGTERM before, between and after the processes of a run; while there are any, they hear it.

    A scheduler may send several: one that comes when the last process has just ended must not change the exit code.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TERMINATED))


def _say_late(imports: Sequence[str], config: RunConfig) -> None:
    """Name the `env_vars` that come after the modules of `--import`, in a process that somebody else started."""
    environ = environment.snapshot()
    late = [
        name for name, value in config.root.env_vars.items() if environ.get(name) != environment.environment_text(value)
    ]
    if imports and late:
        _say(
            f"warning: `env_vars` are set after the modules of --import: {', '.join(late)}; where torch reads them as "
            "it starts, export them before torchrun or srun"
        )


def _start(args: argparse.Namespace, config: RunConfig, placement: Placement) -> int:
    """Train in processes of their own."""
    if args.restart:
        from ..distributed.supervisor import supervise

        return supervise(config, placement, args.restart, _say, args.imports)
    from ..distributed.launcher import launch

    return launch(config, placement, args.imports)


def _config(args: argparse.Namespace) -> int:
    from ..config import render
    from ..config.problems import ConfigError

    if args.docs:
        print(render.as_docs_page().rstrip("\n"))
        return EXIT_DONE
    if args.schema or args.all:
        family = _load(args).root.model.family
        print((render.as_json_schema(family) if args.schema else render.as_key_list(family)).rstrip("\n"))
        return EXIT_DONE
    try:
        config = _load(args)
    except ConfigError as error:  # alone on a terminal: among three hundred rows nobody would find it
        if args.json:
            print(render.as_json(error.account, error.findings, None, error), flush=True)
        raise
    print(
        render.as_json(config.account, config.findings, config, None) if args.json else render.as_yaml(config.account)
    )
    sys.stdout.flush()
    if not args.json:
        _say_findings(config.findings)
    return EXIT_DONE


def _say_findings(findings: Sequence[Any]) -> None:
    if findings:
        from ..config.render import finding_lines

        _say("\n".join(finding_lines(findings)))


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _crash(error: Exception, arguments: list[str]) -> int:
    """An error nobody foresaw: the traceback into a file, one line on the screen."""
    import traceback

    trace = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    path = keep_trace(f"stoker {' '.join(words_without_secrets(arguments))}\nPython {sys.version}\n\n{trace}")
    if path is None:
        _say(trace)
        _say(f"stoker stopped on an error of its own: {summary}")
    else:
        _say(f"stoker stopped on an error of its own: {summary}; the traceback is in {path}")
    return EXIT_BUG
