"""Hydra multirun (`stoker train -m`): a grid of jobs, or jobs that Optuna chooses (`optuna_sweep.py`).

All jobs of a grid are composed and validated once, before the first starts. Each runs in separate processes, which get
the frozen configuration, so the sweep continues however a job ends, and all ranks of a job share one directory.
`exp_manager` determines the sweep directory as it does that of a run, with `multirun` below the name, unless
`hydra.sweep.dir` does; job N runs in subdirectory N. The launchers (`launch_jobs.py`, `submitit_jobs.py`) start them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

from ..config.hydra_node import RunContext
from ..config.load import load_hydra_settings, load_run_config
from ..config.problems import ConfigError
from ..config.run_config import HydraSettings, RunConfig
from ..config.run_paths import create_run_directory
from ..config.schema.exp_manager import ExpManagerBlock
from ..config.schema.hydra import OptunaSweeper, SubmititLauncher
from ..config.schema.root import RootBlock
from ..config.sweep_overrides import Job, expand_jobs, fixed_overrides, hydra_overrides
from ..conversion.finetune_defaults import load_finetune_config
from ..distributed.placement import Placement
from ..utils import environment
from ..utils.errors import EXIT_OK, UserError
from ..utils.owned_files import check_owned
from ..utils.text import pluralize
from .launch_jobs import Launch, RunJob, run_one_by_one
from .sweep_jobs import LoadJob, job_placement, new_run, print_table
from .sweep_record import RECORD_FILE, Sweep, job_label, unwritable_error

_SWEEP_KEYS = ("explicit_log_dir", "exp_dir", "version", "use_datetime_version", "resume_if_exists")
_PER_JOB_KEYS = (
    "exp_manager.checkpoint_callback_params.dirpath",
    "exp_manager.wandb_logger_kwargs.id",
    "exp_manager.mlflow_logger_kwargs.run_id",
    "model.memory_profile.output_path",
)


def sweep(
    config_name: str | None,
    config_dir: Path | None,
    overrides: Sequence[str],
    run_job: RunJob,
    log: Callable[[str], None],
    *,
    finetune: bool = False,
    config_path: Path | None = None,
    imports: Sequence[str] = (),
) -> int:
    """Train every job of a sweep.

    Args:
        overrides: overrides of the command line, some with several values.
        run_job: runs a job of the launcher `basic`.
        imports: user modules that the jobs of other launchers import first.

    Returns:
        0, or the exit code of the first failed job (with Optuna, if no job succeeded); 130 or 143 if a signal ended the
        sweep.

    Raises:
        UserError: a job is invalid (nothing has been started then), or the sweep directory cannot be used.
    """
    from ..config.compose import Composer

    context = RunContext(is_multirun=True)
    of_hydra, words = hydra_overrides(overrides)
    settings = load_hydra_settings(
        config_name or ("finetune" if finetune else "train"),
        config_dir,
        [*of_hydra, *fixed_overrides(words)],
        config_path=config_path,
        context=context,
    )
    given = {word.lstrip("+").partition("=")[0] for word in words}
    params = settings.sweeper.params.items()
    words = [*(f"{key}={_as_typed(value)}" for key, value in params if key not in given), *words]
    load = load_finetune_config if finetune else load_run_config

    def load_job(job: Job) -> RunConfig:
        in_job = RunContext(is_multirun=True, job_number=job.number, swept=job.swept, now=context.now)
        typed = [*of_hydra, *job.overrides]
        return load(config_name, config_dir, typed, config_path=config_path, context=in_job)

    options = Composer(config_dir, config_path=config_path).options
    launch = _launcher(settings, run_job, log, imports)
    if isinstance(settings.sweeper, OptunaSweeper):
        from .optuna_sweep import Search

        search = Search(settings, words, options)
        return search.run(partial(open_sweep, settings, log=log), load_job, launch, log)
    jobs = expand_jobs(words, options)
    opened = open_sweep(settings, jobs, load_job, log=log)
    opened.resume()
    opened.record()
    stopped = launch(opened, range(len(opened.runs)))
    opened.record()
    print_table(opened, stopped=bool(stopped))
    return stopped or next((run.exit_code for run in opened.runs if run.exit_code), EXIT_OK)


def _as_typed(value: Any) -> str:
    """Return a value of `hydra.sweeper.params` as on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _launcher(settings: HydraSettings, run_job: RunJob, log: Callable[[str], None], imports: Sequence[str]) -> Launch:
    if isinstance(settings.launcher, SubmititLauncher):
        from .submitit_jobs import SubmititJobs

        return SubmititJobs(settings.launcher, imports, log)
    return partial(run_one_by_one, run_job=run_job, log=log)


def open_sweep(settings: HydraSettings, jobs: Sequence[Job], load: LoadJob, *, log: Callable[[str], None]) -> Sweep:
    """Compose and validate jobs, and create the directory of their sweep or read its record.

    Raises:
        UserError: a job is invalid, or the directory cannot be used.
    """
    configs, placements = _load_jobs(jobs, load)
    roots = [config.root for config in configs]
    _check_unique_directories(roots)
    _print_findings(jobs, configs, log)
    # before the sweep directory is created, so that an error leaves none behind
    names = _job_directories(configs)
    manager = roots[0].exp_manager
    directory = _create_directory(settings.sweep_dir, roots)
    check_owned(directory, RECORD_FILE, *names)
    key, elsewhere = _directory_keys(settings.sweep_dir, manager)
    resumes = all(root.exp_manager.resume_if_exists for root in roots)
    runs = [
        new_run(directory, job, config, placement)
        for job, config, placement in zip(jobs, configs, placements, strict=True)
    ]
    return Sweep(directory, key, elsewhere, runs, resumes)


def _directory_keys(sweep_dir: str | None, manager: ExpManagerBlock) -> tuple[str, str]:
    """Return the key that sets the sweep directory, and the keys to change for another one."""
    if sweep_dir is not None:
        return "hydra.sweep.dir", "hydra.sweep.dir"
    if manager.explicit_log_dir:
        return "exp_manager.explicit_log_dir", "exp_manager.explicit_log_dir"
    return "exp_manager.exp_dir", "exp_manager.name or exp_dir"


# ---------------------------------------------------------------- before the first job


def _load_jobs(jobs: Sequence[Job], load: LoadJob) -> tuple[list[RunConfig], list[Placement]]:
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
            config = load(job)
            configs.append(config)
            placements.append(job_placement(config, environ))
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


def _create_directory(sweep_dir: str | None, roots: Sequence[RootBlock]) -> Path:
    """Create the sweep directory.

    Raises:
        UserError: it cannot be created (exit code 74).
    """
    root = roots[0]
    manager = root.exp_manager
    names = {keys.exp_manager.name or keys.name for keys in roots}
    name = f"{names.pop()}/multirun" if len(names) == 1 else "multirun"
    update = {"name": name}
    if sweep_dir is not None:
        if manager.explicit_log_dir is not None:
            raise UserError(
                "hydra.sweep.dir and exp_manager.explicit_log_dir both set the directory of the sweep; give one"
            )
        update["explicit_log_dir"] = sweep_dir
    try:
        return create_run_directory(manager.model_copy(update=update), root.name)
    except OSError as error:
        where = error.filename or manager.explicit_log_dir or manager.exp_dir or "runs"
        raise unwritable_error(where, error, _directory_keys(sweep_dir, manager)[0]) from error


def _job_directories(configs: Sequence[RunConfig]) -> list[str]:
    """Return the run directory of each job, relative to that of the sweep.

    Raises:
        UserError: two jobs have the same directory, or one is outside the sweep directory.
    """
    names: list[str] = []
    for config in configs:
        assert config.hydra is not None
        path = PurePosixPath(config.hydra.sweep_subdir)
        if not path.parts or path.is_absolute() or {"..", RECORD_FILE}.intersection(path.parts):
            raise UserError(
                f"hydra.sweep.subdir ({path}) must name a directory below that of the sweep, with "
                "${hydra.job.num} or ${hydra.job.override_dirname}"
            )
        names.append(str(path))
    if len(set(names)) < len(names):
        raise UserError(
            f"hydra.sweep.subdir ({names[0]}) gives several jobs one directory; put ${{hydra.job.num}} into it"
        )
    return names
