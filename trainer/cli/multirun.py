"""Hydra multirun (`stoker train -m`): one run per combination of the swept override values, one after another.

All jobs are composed and validated once, before the first starts. Each runs in separate processes, which get the frozen
configuration, so the sweep continues however a job ends, and all ranks of a job share one directory. `exp_manager`
determines the sweep directory as it does that of a run, with `multirun` below the name; job N runs in subdirectory N.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any

from ..config.load import config_from_document, load_run_config
from ..config.problems import ConfigError
from ..config.run_config import RunConfig
from ..config.run_paths import create_run_directory
from ..config.schema.exp_manager import ExpManagerBlock
from ..config.schema.root import RootBlock
from ..config.sweep_overrides import Job, expand_jobs
from ..conversion.finetune_defaults import load_finetune_config
from ..distributed.placement import Placement, resolve_placement
from ..utils import environment
from ..utils.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, UserError
from ..utils.owned_files import check_owned
from ..utils.signals import handlers_set
from ..utils.text import pluralize
from .sweep_record import (
    RECORD_FILE,
    SweepRun,
    format_table,
    job_label,
    mark_finished,
    read_metrics,
    read_record,
    unwritable_error,
    write_record,
)

_SIGNAL_EXIT_CODES = (EXIT_INTERRUPTED, EXIT_TERMINATED)
_HYDRA_SWEEP_KEY = re.compile(r"\+{0,2}hydra\.sweep\.(?P<key>dir|subdir)=(?P<value>.*)", re.DOTALL)
_SWEEP_KEYS = ("explicit_log_dir", "exp_dir", "version", "use_datetime_version", "resume_if_exists")
_PER_JOB_KEYS = (
    "exp_manager.checkpoint_callback_params.dirpath",
    "exp_manager.wandb_logger_kwargs.id",
    "exp_manager.mlflow_logger_kwargs.run_id",
    "model.memory_profile.output_path",
)

RunJob = Callable[[RunConfig, Placement], int]
"""Run a job in separate processes and return its exit code; raises UserError if it failed."""
LoadConfig = Callable[[Sequence[str]], RunConfig]
"""Compose and validate the configuration of a list of overrides; raises UserError."""


@dataclass(frozen=True, slots=True)
class _HydraKeys:
    """Hydra's sweep keys, split from the other overrides.

    Attributes:
        subdir: `hydra.sweep.subdir`, the directory of a job in it.
    """

    directory: str | None
    subdir: str
    overrides: tuple[str, ...]

    def directory_keys(self, manager: ExpManagerBlock) -> tuple[str, str]:
        """Return the key that sets the sweep directory, and the keys to change for another one."""
        if self.directory is not None:
            return "hydra.sweep.dir", "hydra.sweep.dir"
        if manager.explicit_log_dir:
            return "exp_manager.explicit_log_dir", "exp_manager.explicit_log_dir"
        return "exp_manager.exp_dir", "exp_manager.name or exp_dir"


def sweep(
    config_name: str | None,
    config_dir: Path | None,
    overrides: Sequence[str],
    run_job: RunJob,
    log: Callable[[str], None],
    *,
    finetune: bool = False,
) -> int:
    """Train every job of a sweep.

    Args:
        overrides: overrides of the command line, some with several values.

    Returns:
        0, or the exit code of the first failed job; 130 or 143 if a signal ended the sweep.

    Raises:
        UserError: a job is invalid (nothing has been started then), or the sweep directory cannot be used.
    """
    from ..config.compose import Composer

    hydra_keys = _parse_hydra_keys(overrides)
    composer = Composer(config_dir, environment.config_folders(environment.snapshot()))
    jobs = expand_jobs(hydra_keys.overrides, lambda group: composer.options(group) if composer.is_group(group) else ())
    load = load_finetune_config if finetune else load_run_config
    configs, placements = _load_jobs(jobs, lambda texts: load(config_name, config_dir, texts))
    _check_unique_directories([config.root for config in configs])
    _print_findings(jobs, configs, log)
    # before the sweep directory is created, so that an error leaves none behind
    names = _job_directories(hydra_keys.subdir, jobs)
    directory = _create_directory(hydra_keys, [config.root for config in configs])
    check_owned(directory, RECORD_FILE, *names)
    key, elsewhere = hydra_keys.directory_keys(configs[0].root.exp_manager)
    resumes = all(config.root.exp_manager.resume_if_exists for config in configs)
    previous = read_record(directory, jobs, resumes, elsewhere)
    runs = [
        SweepRun(job, _with_directory(config, directory / name), placement, directory / name)
        for job, config, placement, name in zip(jobs, configs, placements, names, strict=True)
    ]
    runs = [mark_finished(run, known) for run, known in zip(runs, previous, strict=True)]
    write_record(directory, runs, key)
    stopped = _run_all(runs, partial(write_record, directory, runs, key), run_job, log)
    write_record(directory, runs, key)
    print(
        "\n".join(["", *format_table(runs, directory), f"{pluralize(len(runs), 'job')} in {directory}"]),
        flush=True,
    )
    return stopped or next((run.exit_code for run in runs if run.exit_code), EXIT_OK)


def _parse_hydra_keys(overrides: Sequence[str]) -> _HydraKeys:
    found: dict[str, str] = {}
    rest: list[str] = []
    for text in overrides:
        if match := _HYDRA_SWEEP_KEY.fullmatch(text):
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
    return _HydraKeys(directory, found.get("subdir", "${hydra.job.num}"), tuple(rest))


# ---------------------------------------------------------------- before the first job


def _load_jobs(jobs: Sequence[Job], load: LoadConfig) -> tuple[list[RunConfig], list[Placement]]:
    """Compose and validate every job.

    Raises:
        UserError: all errors of all jobs.
    """
    configs: list[RunConfig] = []
    placements: list[Placement] = []
    errors: dict[tuple[str, ...], list[Job]] = {}
    environ = environment.snapshot()
    for job in jobs:
        try:
            config = load(job.overrides)
            configs.append(config)
            placements.append(_placement(config, environ))
        except ConfigError as error:
            for problem in error.problems:
                errors.setdefault(tuple(problem.lines()), []).append(job)
        except UserError as error:
            errors.setdefault(tuple(error.lines), []).append(job)
    if not errors:
        return configs, placements
    lines: list[str] = []
    for text, affected in errors.items():
        if len(affected) < len(jobs):
            lines.append(f"{_job_labels(affected)}:")
        lines += text
    summary = f"{pluralize(len(errors), 'error')} in the configurations of {pluralize(len(jobs), 'job')}"
    raise UserError([*lines, f"{summary}; nothing was started"])


def _placement(config: RunConfig, environ: Any) -> Placement:
    placement = resolve_placement(config.root.trainer, environ)
    if placement.rank is not None or placement.num_nodes > 1:
        raise UserError(
            "-m starts the processes of its jobs itself, on one machine; run it without torchrun and srun, and with "
            "trainer.num_nodes=1"
        )
    return placement


def _job_labels(jobs: Sequence[Job]) -> str:
    if len(jobs) == 1:
        return f"job {jobs[0].number} ({job_label(jobs[0])})"
    numbers = [str(job.number) for job in jobs]
    return f"jobs {', '.join(numbers[:12])}{', ...' * (len(numbers) > 12)}"


def _check_unique_directories(roots: Sequence[RootBlock]) -> None:
    """Reject keys with which the sweep would have several directories, or several jobs would share one.

    Raises:
        UserError: there is such a key.
    """
    for name in _SWEEP_KEYS:
        if len({getattr(root.exp_manager, name) for root in roots}) > 1:
            raise UserError(
                f"`exp_manager.{name}` differs between the jobs; a sweep has one directory, and its jobs are numbered "
                "in it: give the key one value"
            )
    for path in _PER_JOB_KEYS:
        values = [value for root in roots if (value := attrgetter(path)(root)) is not None]
        if len(set(values)) < len(values):
            raise UserError(f"`{path}` ({values[0]}) would be shared by several jobs; leave it out of a sweep")


def _print_findings(jobs: Sequence[Job], configs: Sequence[RunConfig], say: Callable[[str], None]) -> None:
    from ..config.render import finding_lines

    findings: dict[str, list[Job]] = {}
    for job, config in zip(jobs, configs, strict=True):
        for line in finding_lines(config.findings):
            findings.setdefault(line, []).append(job)
    for line, affected in findings.items():
        say(line if len(affected) == len(jobs) else f"{_job_labels(affected)}: {line}")


def _create_directory(hydra_keys: _HydraKeys, roots: Sequence[RootBlock]) -> Path:
    """Create the sweep directory.

    Raises:
        UserError: it cannot be created (exit code 74).
    """
    root = roots[0]
    manager = root.exp_manager
    names = {keys.exp_manager.name or keys.name for keys in roots}
    name = f"{names.pop()}/multirun" if len(names) == 1 else "multirun"
    update = {"name": name}
    if hydra_keys.directory is not None:
        if manager.explicit_log_dir is not None:
            raise UserError(
                "hydra.sweep.dir and exp_manager.explicit_log_dir both set the directory of the sweep; give one"
            )
        update["explicit_log_dir"] = hydra_keys.directory
    try:
        return create_run_directory(manager.model_copy(update=update), root.name)
    except OSError as error:
        where = error.filename or manager.explicit_log_dir or manager.exp_dir or "runs"
        raise unwritable_error(where, error, hydra_keys.directory_keys(manager)[0]) from error


def _job_directories(subdir: str, jobs: Sequence[Job]) -> list[str]:
    """Return the run directory of each job, relative to that of the sweep.

    Raises:
        UserError: two jobs have the same directory, or one is outside the sweep directory.
    """
    names: list[str] = []
    for job in jobs:
        overrides = ",".join(sorted(text.lstrip("+").replace("/", "_") for text in job.swept))
        name = subdir.replace("${hydra.job.num}", str(job.number)).replace("${hydra.job.override_dirname}", overrides)
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or {"..", RECORD_FILE}.intersection(path.parts) or "${" in name:
            raise UserError(
                f"hydra.sweep.subdir ({subdir}) must name a directory below that of the sweep, with "
                "${hydra.job.num} or ${hydra.job.override_dirname}"
            )
        names.append(str(path))
    if len(set(names)) < len(names):
        raise UserError(
            f"hydra.sweep.subdir ({subdir}) gives several jobs one directory; put ${{hydra.job.num}} into it"
        )
    return names


def _with_directory(config: RunConfig, directory: Path) -> RunConfig:
    """Return the configuration with its own run directory."""
    manager = {**config.document["exp_manager"], "explicit_log_dir": str(directory)}
    document = {**config.document, "exp_manager": manager}
    return config_from_document(document, trusted=True).with_provenance(config.provenance())


# ---------------------------------------------------------------- the jobs


class _Terminated(BaseException):
    """SIGTERM, or another signal that ends with its exit code, received between two jobs."""


def _run_all(runs: list[SweepRun], record: Callable[[], None], start: RunJob, say: Callable[[str], None]) -> int:
    """Run the unfinished jobs, update `runs` and write it with `record`; return the exit code of a signal, or 0."""
    with handlers_set(_terminate):
        try:
            for index, run in enumerate(runs):
                head = f"job {run.job.number} ({index + 1} of {len(runs)}): {job_label(run.job)}"
                if run.exit_code is not None:
                    print(f"{head}: already finished", flush=True)
                    continue
                print(f"{head}; {run.directory}", flush=True)
                runs[index] = _run_one(run, start, say)
                record()
                if runs[index].exit_code in _SIGNAL_EXIT_CODES:
                    return runs[index].exit_code or EXIT_OK
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except _Terminated:
            return EXIT_TERMINATED
    return EXIT_OK


def _run_one(run: SweepRun, start: RunJob, say: Callable[[str], None]) -> SweepRun:
    code, problem = EXIT_BAD_INPUT, ""
    try:
        code = start(run.config, run.placement)
    except UserError as error:
        code, problem = error.exit_code, error.lines[0]
        say("\n".join(error.lines))
    return replace(run, exit_code=code, error=problem, metrics=read_metrics(run))


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated
