"""The command line: `stoker VERB [--config-dir D] [--config-name N] [--cfg job] [key=value ...]`.

No import of torch here, and all other imports are lazy, so `--help`, `config` and configuration errors are fast.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils import environment
from ..utils.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_IO,
    EXIT_OK,
    UserError,
    save_traceback,
)
from ..utils.progress import shown
from ..utils.redaction import redact_arguments
from ..utils.signals import exit_on_signals, raise_on_ctrl_c
from ..utils.text import one_line
from .argument_parser import ArgumentParser
from .common_arguments import add_config_arguments, add_finetune_argument, load_config, shows_composition

if TYPE_CHECKING:
    from ..config.run_config import RunConfig
    from ..distributed.placement import Placement

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass(frozen=True, slots=True)
class Verb:
    """A subcommand.

    Attributes:
        composes: takes configuration overrides only: `train`, `finetune`, `config`.
    """

    summary: str
    composes: bool = False
    accepts_imports: bool = False


VERBS = {
    "train": Verb("train a model", composes=True, accepts_imports=True),
    "finetune": Verb("fine-tune a pretrained model, all parameters or an adapter", composes=True, accepts_imports=True),
    "config": Verb("show every effective value and where it comes from", composes=True, accepts_imports=True),
    "list": Verb("list presets, configuration keys or attention backends, with a line on each"),
    "explain": Verb("show which attention backend a run uses, and why not the others", accepts_imports=True),
    "plan": Verb("estimate memory and time of a run, and suggest settings that fit", accepts_imports=True),
    "generate": Verb("continue a text with a trained model", accepts_imports=True),
    "evaluate": Verb("loss, perplexity and bits per byte of a trained model", accepts_imports=True),
    "report": Verb("write the page of a run: curves, memory, attention, configuration"),
    "compare": Verb("compare runs: results, configurations, curves"),
    "convert": Verb(
        "convert a Hugging Face model to a checkpoint, or a checkpoint to a Hugging Face model", accepts_imports=True
    ),
    "preprocess": Verb("tokenize text, JSON lines or tables", accepts_imports=True),
    "quickstart": Verb("train a small GPT on this machine in about a minute"),
    "bench": Verb("measure attention backends and rates of this machine, by which runs and plans choose"),
    "doctor": Verb("check this machine: packages, devices, memory"),
}

_WITH_PROGRESS = frozenset({"plan", "generate", "evaluate", "convert", "preprocess"})

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
    """Run one verb and return the exit code; the only exception raised is argparse's SystemExit, as after `--help`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # not of callers in Python, whose signals are theirs
        exit_on_signals()
        raise_on_ctrl_c()
    return exit_code_of(lambda: _dispatch(arguments), arguments)


def exit_code_of(action: Callable[[], int], arguments: Sequence[str]) -> int:
    """Return the exit code of `action`; its errors are printed, those of stoker itself with the command line."""
    try:
        return action()
    except UserError as error:
        _print_error("\n".join(error.lines))
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # The reader of the output (head, less) has exited; closing stdout would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        if _wraps_interrupt(error):
            return _interrupted()
        if isinstance(error, OSError) and error.errno in _FULL:
            _print_error(f"{error.filename or 'the disk'}: {error.strerror}")
            return EXIT_IO
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            _print_error(f"{str(error.filename)[:60]}...: no name in a path may be longer than 255 bytes; use another")
            return EXIT_BAD_INPUT
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            _print_error(_too_many_files())
            return EXIT_IO
        return _crash(error, list(arguments))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_OVERVIEW.format(verbs="\n".join(f"  {name:<11} {verb.summary}" for name, verb in VERBS.items())))
        return EXIT_OK if arguments else EXIT_BAD_INPUT
    name = arguments[0]
    if name == "--version":
        from importlib.metadata import version

        print(f"stoker {version('stoker')}")
        return EXIT_OK
    if name not in VERBS:
        raise UserError(_unknown_verb(name))
    verb = VERBS[name]
    parser = ArgumentParser(
        arguments[1:],
        prog=f"stoker {name}",
        description=verb.summary[0].upper() + verb.summary[1:] + ".",
        epilog=_GROUPS if verb.composes else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments, run = _verb_functions(name, verb)
    add_arguments(parser)
    if verb.accepts_imports:
        parser.add_argument(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="MODULE",
            help="import a module of your own first, which registers components (docs/extend.md); may be repeated",
        )
    args = parser.parse_intermixed_args(arguments[1:])
    if verb.accepts_imports and args.imports:
        from ..utils.import_modules import import_plugins

        import_plugins(args.imports)
    if "cfg" in args and shows_composition(args):
        from .show_composition import show_composition

        return show_composition(args)
    with shown(name in _WITH_PROGRESS and environment.snapshot().get("RANK", "0") == "0"):
        return run(args)


def _unknown_verb(name: str) -> list[str]:
    from ..config.suggest import closest

    suggestion = closest(name, VERBS)
    if suggestion is None and ("=" in name or name.startswith("-")):
        suggestion = "train"
    hint = f"did you mean `stoker {suggestion}`?" if suggestion else f"verbs are {', '.join(VERBS)}"
    return [f"stoker {name}: there is no such verb; {hint}"]


def _verb_functions(
    name: str, verb: Verb
) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    if name in ("train", "finetune"):
        return partial(_add_train_arguments, finetune=name == "finetune"), _train
    if name == "config":
        return _add_config_verb_arguments, _config
    # imported when it is the one that runs: some import torch
    module = import_module(f".{'list_names' if name == 'list' else name}", __package__)
    return module.add_arguments, module.run


def _add_train_arguments(parser: argparse.ArgumentParser, *, finetune: bool = False) -> None:
    add_config_arguments(parser, "train, or finetune")
    parser.set_defaults(finetune=finetune)
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="sweep over all combinations of values: key=1,2 key=range(1,4) group=glob(gpt*), one run at a time",
    )
    parser.add_argument(
        "--restart",
        type=int,
        metavar="N",
        help="trainer.max_restarts=N: restart after a crash or a lost process, N times without a new checkpoint",
    )


def _add_config_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "train, or finetune")
    add_finetune_argument(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--schema", action="store_true", help="print the JSON schema of a model family, for editors")
    form.add_argument(
        "--schema-path",
        nargs="?",
        const="primary",
        metavar="GROUP",
        help="print the path of the JSON schema of a config group's files (default: of primary files)",
    )
    form.add_argument(
        "--schema-files", type=Path, metavar="DIR", help="write the JSON schema of each group to a folder"
    )
    form.add_argument("--all", action="store_true", help="list every known key of the model family, with its state")
    form.add_argument("--docs", action="store_true", help="print docs/configuration.md")


def _train(args: argparse.Namespace) -> int:
    if args.restart is not None:
        args.overrides.append(f"trainer.max_restarts={args.restart}")
    if args.multirun or _mode_is_multirun(args):
        return _sweep(args)
    config = load_config(args)
    if config.hydra is not None and config.hydra.is_multirun:
        return _sweep(args)
    _print_findings(config.findings)
    from ..distributed.placement import resolve_placement

    placement = resolve_placement(config.root.trainer, environment.snapshot())
    if placement.rank is not None:
        _warn_late_env_vars(args.imports, config)
        environment.prepare_process(config.root.env_vars)
        from ..train import train_as_rank

        return train_as_rank(config, placement).exit_code
    from .early_checks import check_run_start

    check_run_start(config)
    # User modules may have imported torch, which reads some variables once at import: `env_vars` need a new process.
    supervised = config.root.trainer.max_restarts > 0
    if supervised or not placement.is_single or (args.imports and config.root.env_vars):
        return start_run(config, placement, args.imports)
    environment.prepare_process(config.root.env_vars)
    from ..train import train

    return train(config)


def _mode_is_multirun(args: argparse.Namespace) -> bool:
    """Return True if some override has several values, as only those of a sweep may, and `hydra.mode` is MULTIRUN."""
    from ..config.hydra_node import RunContext
    from ..config.load import load_hydra_settings
    from ..config.sweep_overrides import fixed_overrides, hydra_overrides

    of_hydra, words = hydra_overrides(args.overrides)
    fixed = fixed_overrides(words)
    if len(fixed) == len(words):
        return False
    name = args.config_name or ("finetune" if args.finetune else "train")
    try:
        return load_hydra_settings(
            name, args.config_dir, [*of_hydra, *fixed], config_path=args.config_path, context=RunContext()
        ).is_multirun
    except UserError:
        return False  # reported with the other problems of the configuration


def _warn_late_env_vars(imports: Sequence[str], config: RunConfig) -> None:
    """Warn about `env_vars` that are set only after `--import` modules, in a process started by torchrun or srun."""
    environ = environment.snapshot()
    late = [
        name for name, value in config.root.env_vars.items() if environ.get(name) != environment.format_variable(value)
    ]
    if imports and late:
        _print_error(
            f"warning: `env_vars` are set after the modules of --import: {', '.join(late)}; if torch reads them at "
            "import, export them before torchrun or srun"
        )


def _sweep(args: argparse.Namespace) -> int:
    from .multirun import sweep

    return sweep(
        args.config_name,
        args.config_dir,
        args.overrides,
        lambda config, placement: start_run(config, placement, args.imports),
        _print_error,
        finetune=args.finetune,
        config_path=args.config_path,
        imports=args.imports,
    )


def start_run(config: RunConfig, placement: Placement, imports: Sequence[str] = ()) -> int:
    """Train in worker processes; return the exit code.

    Raises:
        UserError: the error of the failed worker.
    """
    if config.root.trainer.max_restarts or placement.rendezvous is not None:
        environment.prepare_process()
        environment.import_torch_quietly()
        from ..distributed.node_agent import run_agent

        return run_agent(config, placement, _print_error, imports)
    from ..distributed.launcher import launch

    return launch(config, placement, imports)


def _config(args: argparse.Namespace) -> int:
    from ..config import render
    from ..config.problems import ConfigError

    if args.docs:
        print(render.as_docs_page().rstrip("\n"))
        return EXIT_OK
    if args.schema_path or args.schema_files:
        from ..config import json_schema

        if args.schema_path:
            print(json_schema.schema_path(args.schema_path))
        else:
            json_schema.write_schema_files(args.schema_files)
        return EXIT_OK
    if args.schema or args.all:
        from ..config.json_schema import as_json_schema

        family = load_config(args).root.model.family
        print((as_json_schema(family) if args.schema else render.as_key_list(family)).rstrip("\n"))
        return EXIT_OK
    try:
        config = load_config(args)
    except ConfigError as error:  # on a terminal the error alone: it would be lost among three hundred rows
        if args.json:
            print(render.as_json(error.key_reports, error.findings, None, error), flush=True)
        raise
    print(
        render.as_json(config.key_reports, config.findings, config, None)
        if args.json
        else render.as_yaml(config.key_reports)
    )
    sys.stdout.flush()
    if not args.json:
        _print_findings(config.findings)
    return EXIT_OK


def _print_findings(findings: Sequence[Any]) -> None:
    if findings:
        from ..config.render import finding_lines

        _print_error("\n".join(finding_lines(findings)))


def _print_error(text: str) -> None:
    # Messages quote files: a name in them may hold terminal sequences.
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", _escape, text)
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _escape(control: re.Match[str]) -> str:
    return control[0].encode("unicode_escape").decode()


def _too_many_files() -> str:
    try:
        import resource

        limit = f" ({resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,}, of `ulimit -n`)"
    except ImportError:  # Windows
        limit = ""
    return f"too many open files for the limit of this process{limit}; raise it: ulimit -n 4096"


def _interrupted() -> int:
    # An interrupt inside an `eval` of text, as of a dataclass, leaves a mark with which Python ends itself by SIGINT in
    # place of this exit code; the next one, of a named tuple, removes it.
    namedtuple("_Reset", ())
    _print_error("interrupted")
    return EXIT_INTERRUPTED


def _wraps_interrupt(error: BaseException | None) -> bool:
    """Return whether a KeyboardInterrupt caused `error`: Python 3.11 wraps one in `__set_name__`, as in an import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _crash(error: Exception, arguments: list[str]) -> int:
    """Handle an unexpected error: write the traceback to a file and print one line."""
    import traceback

    from ...models.config.extensions import ExtensionError, extension_frame

    place = extension_frame(error)
    whose = "internal error in stoker"
    if place is not None or isinstance(error, ExtensionError):
        whose = f"error in a component of your own{'' if place is None else f' ({place})'}"
    elif "--import" in arguments:
        whose = "error in stoker, or in how a component of your own is called"
    trace = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {one_line(error, 300)}"
    path = save_traceback(f"stoker {' '.join(redact_arguments(arguments))}\nPython {sys.version}\n\n{trace}")
    if path is None:
        _print_error(trace)
        _print_error(f"{whose}: {summary}")
    else:
        _print_error(f"{whose}: {summary}; the traceback is in {path}")
    return EXIT_FAILURE
