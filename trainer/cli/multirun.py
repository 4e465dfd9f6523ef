"""`stoker train -m`: several runs, one after another, one for each combination of the values that overrides name.

All jobs are composed and validated here, once, before the first starts. Each then runs in processes of its own, which
get the frozen configuration: whatever ends a job, the sweep goes on, and all ranks of a job have one directory.
`exp_manager` chooses the directory of the sweep as that of a run, with `multirun` below the name; job N is in N there.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

from ..config.load import load_run_config
from ..config.problems import ConfigError
from ..config.run_config import RunConfig
from ..config.run_paths import create_place
from ..config.schema.exp_manager import ExpManagerBlock
from ..config.schema.root import RootBlock
from ..config.sweep_overrides import Job, jobs_of
from ..distributed.placement import Placement, place
from ..utils import environment
from ..utils.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, UserError
from ..utils.text import counted
from .sweep_record import (
    RECORD,
    SweptRun,
    cannot_write,
    figures_of,
    read_record,
    shown_job,
    table_of,
    taken_over,
    write_record,
)

_STOPS = (EXIT_INTERRUPTED, EXIT_TERMINATED)
_HYDRA_PLACE = re.compile(r"\+{0,2}hydra\.sweep\.(?P<key>dir|subdir)=(?P<value>.*)", re.DOTALL)
_OF_ONE_SWEEP = ("explicit_log_dir", "exp_dir", "version", "use_datetime_version", "resume_if_exists")
_OF_ONE_JOB = (
    "exp_manager.checkpoint_callback_params.dirpath",
    "exp_manager.wandb_logger_kwargs.id",
    "exp_manager.mlflow_logger_kwargs.run_id",
    "model.memory_profile.output_path",
)

Start = Callable[[RunConfig, Placement], int]
"""Runs a job in processes of its own and gives its exit code; raises UserError where it ended badly."""
Load = Callable[[Sequence[str]], RunConfig]
"""Composes and validates the configuration that overrides make; raises UserError."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Where Hydra's own keys put the jobs of a sweep.

    Attributes:
        directory: `hydra.sweep.dir`, or None.
        below: `hydra.sweep.subdir`, the place of a job in it.
        overrides: all other overrides.
    """

    directory: str | None
    below: str
    overrides: tuple[str, ...]

    def keys_of_the_place(self, manager: ExpManagerBlock) -> tuple[str, str]:
        """The key that gives the directory of the sweep, and those that lead to another."""
        if self.directory is not None:
            return "hydra.sweep.dir", "hydra.sweep.dir"
        if manager.explicit_log_dir:
            return "exp_manager.explicit_log_dir", "exp_manager.explicit_log_dir"
        return "exp_manager.exp_dir", "exp_manager.name or exp_dir"


def sweep(
    config_name: str | None,
    config_dir: Path | None,
    overrides: Sequence[str],
    start: Start,
    say: Callable[[str], None],
    *,
    finetune: bool = False,
) -> int:
    """Train every job of a sweep.

    Args:
        config_name: see `load_run_config`.
        config_dir: likewise.
        overrides: of the command line; some of them name several values.
        start: runs a job.
        say: prints to the standard error.
        finetune: see `load_run_config`.

    Returns:
        0; where jobs failed the exit code of the first of them; 130 or 143 where a signal ended the sweep.

    Raises:
        UserError: jobs that are not valid, and nothing was started; or the directory of the sweep cannot be used.
    """
    from ..config.compose import Composer

    wish = _wish(overrides)
    composer = Composer(config_dir, environment.config_folders(environment.snapshot()))
    jobs = jobs_of(wish.overrides, lambda group: composer.options(group) if composer.is_group(group) else ())
    configs, placements = _valid(jobs, lambda texts: load_run_config(config_name, config_dir, texts, finetune=finetune))
    _check_apart([config.root for config in configs])
    _say_findings(jobs, configs, say)
    names = _names(wish.below, jobs)  # before the directory of the sweep is made: what is refused leaves nothing
    directory = _directory(wish, [config.root for config in configs])
    key, elsewhere = wish.keys_of_the_place(configs[0].root.exp_manager)
    resumes = all(config.root.exp_manager.resume_if_exists for config in configs)
    before = read_record(directory, jobs, resumes, elsewhere)
    runs = [
        SweptRun(job, _placed(config, directory / name), placement, directory / name)
        for job, config, placement, name in zip(jobs, configs, placements, names, strict=True)
    ]
    runs = [taken_over(run, known) for run, known in zip(runs, before, strict=True)]
    write_record(directory, runs, key)
    stopped = _run_all(runs, partial(write_record, directory, runs, key), start, say)
    write_record(directory, runs, key)
    print(
        "\n".join(["", *table_of(runs, directory), f"{counted(len(runs), 'job')} in {directory}"]),
        flush=True,
    )
    return stopped or next((run.exit_code for run in runs if run.exit_code), EXIT_DONE)


def _wish(overrides: Sequence[str]) -> Wish:
    found: dict[str, str] = {}
    rest: list[str] = []
    for text in overrides:
        if match := _HYDRA_PLACE.fullmatch(text):
            value = match["value"].strip("'\"")
            if found.setdefault(match["key"], value) != value:
                raise UserError(
                    f"hydra.sweep.{match['key']} is given as {found[match['key']]} and as {value}; keep one"
                )
        else:
            rest.append(text)
    directory = found.get("dir")
    if directory is not None:
        if not directory:
            raise UserError("hydra.sweep.dir is empty; name a directory, or leave it out")
        directory = re.sub(r"\$\{now:([^}]*)\}", lambda match: time.strftime(match[1]), directory)
    return Wish(directory, found.get("subdir", "${hydra.job.num}"), tuple(rest))


# ---------------------------------------------------------------- before the first job


def _valid(jobs: Sequence[Job], load: Load) -> tuple[list[RunConfig], list[Placement]]:
    """The configuration and placement of every job.

    Raises:
        UserError: everything that is wrong with any of them.
    """
    configs: list[RunConfig] = []
    placements: list[Placement] = []
    wrong: dict[tuple[str, ...], list[Job]] = {}
    environ = environment.snapshot()
    for job in jobs:
        try:
            config = load(job.overrides)
            configs.append(config)
            placements.append(_placement(config, environ))
        except ConfigError as error:
            for problem in error.problems:
                wrong.setdefault(tuple(problem.lines()), []).append(job)
        except UserError as error:
            wrong.setdefault(tuple(error.lines), []).append(job)
    if not wrong:
        return configs, placements
    lines: list[str] = []
    for text, concerned in wrong.items():
        if len(concerned) < len(jobs):
            lines.append(f"{_named(concerned)}:")
        lines += text
    count, where = counted(len(wrong), "error"), counted(len(jobs), "job")
    raise UserError([*lines, f"{count} in the configurations of {where}; nothing was started"])


def _placement(config: RunConfig, environ: Any) -> Placement:
    placement = place(config.root.trainer, environ)
    if placement.rank is not None or placement.nodes > 1:
        raise UserError(
            "-m starts the processes of its jobs itself, on one machine; without torchrun and srun, "
            "and with trainer.num_nodes=1"
        )
    return placement


def _named(jobs: Sequence[Job]) -> str:
    if len(jobs) == 1:
        return f"job {jobs[0].number} ({shown_job(jobs[0])})"
    numbers = [str(job.number) for job in jobs]
    return f"jobs {', '.join(numbers[:12])}{', ...' * (len(numbers) > 12)}"


def _check_apart(roots: Sequence[RootBlock]) -> None:
    """Refuse keys that would put the sweep at several places, or several jobs at one.

    Raises:
        UserError: there is one.
    """
    for name in _OF_ONE_SWEEP:
        if len({getattr(root.exp_manager, name) for root in roots}) > 1:
            raise UserError(
                f"`exp_manager.{name}` differs between the jobs; a sweep has one directory, and its jobs are numbered "
                "in it: give the key one value"
            )
    for path in _OF_ONE_JOB:
        values = [value for root in roots if (value := _value(root, path)) is not None]
        if len(set(values)) < len(values):
            raise UserError(f"`{path}` ({values[0]}) would be that of several jobs; leave it out of a sweep")


def _value(block: Any, path: str) -> Any:
    for name in path.split("."):
        block = getattr(block, name)
    return block


def _say_findings(jobs: Sequence[Job], configs: Sequence[RunConfig], say: Callable[[str], None]) -> None:
    from ..config.render import finding_lines

    told: dict[str, list[Job]] = {}
    for job, config in zip(jobs, configs, strict=True):
        for line in finding_lines(config.findings):
            told.setdefault(line, []).append(job)
    for line, concerned in told.items():
        say(line if len(concerned) == len(jobs) else f"{_named(concerned)}: {line}")


def _directory(wish: Wish, roots: Sequence[RootBlock]) -> Path:
    """The directory of the sweep, made.

    Raises:
        UserError: it cannot be made (exit code 74).
    """
    root = roots[0]
    manager = root.exp_manager
    names = {keys.exp_manager.name or keys.name for keys in roots}
    name = f"{names.pop()}/multirun" if len(names) == 1 else "multirun"
    update = {"name": name}
    if wish.directory is not None:
        if manager.explicit_log_dir is not None:
            raise UserError(
                "hydra.sweep.dir and exp_manager.explicit_log_dir both name the directory of the sweep; give one"
            )
        update["explicit_log_dir"] = wish.directory
    try:
        return create_place(root.model_copy(update={"exp_manager": manager.model_copy(update=update)}))
    except OSError as error:
        where = error.filename or manager.explicit_log_dir or manager.exp_dir or "runs"
        raise cannot_write(where, error, wish.keys_of_the_place(manager)[0]) from error


def _names(below: str, jobs: Sequence[Job]) -> list[str]:
    """The run directory of each job, below that of the sweep.

    Raises:
        UserError: two jobs have the same, or one is outside of the sweep's.
    """
    names: list[str] = []
    for job in jobs:
        overrides = ",".join(sorted(text.lstrip("+").replace("/", "_") for text in job.swept))
        name = below.replace("${hydra.job.num}", str(job.number)).replace("${hydra.job.override_dirname}", overrides)
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or {"..", RECORD}.intersection(path.parts) or "${" in name:
            raise UserError(
                f"hydra.sweep.subdir ({below}) must name a directory below that of the sweep, with "
                "${hydra.job.num} or ${hydra.job.override_dirname}"
            )
        names.append(str(path))
    if len(set(names)) < len(names):
        raise UserError(
            f"hydra.sweep.subdir ({below}) gives several jobs one directory; put ${{hydra.job.num}} into it"
        )
    return names


def _placed(config: RunConfig, directory: Path) -> RunConfig:
    """The same configuration in a directory of its own."""
    manager = {**config.document["exp_manager"], "explicit_log_dir": str(directory)}
    return RunConfig.from_document({**config.document, "exp_manager": manager}, trusted=True)


# ---------------------------------------------------------------- the jobs


class _Terminated(BaseException):
    """SIGTERM, between two jobs."""


def _run_all(runs: list[SweptRun], record: Callable[[], None], start: Start, say: Callable[[str], None]) -> int:
    """Run those that are not done, keeping how each ended in `runs`, which `record` writes; a signal's code, or 0."""
    with _sigterm_raised():
        try:
            for index, run in enumerate(runs):
                head = f"job {run.job.number} ({index + 1} of {len(runs)}): {shown_job(run.job)}"
                if run.exit_code is not None:
                    print(f"{head}: was done before", flush=True)
                    continue
                print(f"{head}; {run.directory}", flush=True)
                runs[index] = _run_one(run, start, say)
                record()
                if runs[index].exit_code in _STOPS:
                    return runs[index].exit_code or EXIT_DONE
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except _Terminated:
            return EXIT_TERMINATED
    return EXIT_DONE


def _run_one(run: SweptRun, start: Start, say: Callable[[str], None]) -> SweptRun:
    code, problem = EXIT_BAD_INPUT, ""
    try:
        code = start(run.config, run.placement)
    except UserError as error:
        code, problem = error.exit_code, error.lines[0]
        say("\n".join(error.lines))
    return replace(run, exit_code=code, problem=problem, figures=figures_of(run))


@contextmanager
def _sigterm_raised() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
