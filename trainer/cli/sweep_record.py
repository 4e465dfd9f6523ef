"""State of a sweep on disk (`multirun.json`), from which it can be resumed, and its summary table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.dotted_paths import leaves
from ..config.run_config import RunConfig
from ..config.schema.exp_manager import canonical_metric_name
from ..config.schema.key_index import format_value, schema_keys
from ..config.sweep_overrides import Job
from ..distributed.placement import Placement
from ..utils.durable_files import atomic_write
from ..utils.errors import EXIT_INTERRUPTED, EXIT_IO, EXIT_OK, EXIT_TERMINATED, UserError
from ..utils.redaction import redact, redact_value
from ..utils.text import format_table, truncate_lines

RECORD_FILE = "multirun.json"
"""File in the sweep directory with jobs, overrides, directories and exit codes."""
_MAX_RECORD_BYTES = 64 << 20
_RESOLVED_CONFIG = "config.resolved.json"
_MAX_SHOWN_KEYS = 6
_STARTED = (None, EXIT_OK, EXIT_INTERRUPTED, EXIT_TERMINATED)
"""Exit codes of jobs that resume from checkpoints of their own; one that failed may start with what mends it."""
_OF_DIRECTORY = (
    "exp_manager.explicit_log_dir",
    "exp_manager.resume_if_exists",
    "exp_manager.resume_ignore_no_checkpoint",
)
_OF_LENGTH_AND_REPORT = (
    *("exp_manager.", "env_vars.", "trainer.max_", "trainer.log_every_n_steps", "trainer.val_check_interval"),
    *("trainer.check_val_every_n_epoch", "trainer.limit_", "trainer.num_sanity_val_steps", "trainer.devices"),
    *("trainer.num_nodes", "trainer.accelerator", "trainer.enable_", "model.micro_batch_size"),
    *("model.data.num_workers", "model.activations_checkpoint_"),
)
"""Prefixes of keys with which a job goes on as the same one: how long it trains, what it reports and where it runs."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """A job of a sweep and its state.

    Attributes:
        exit_code: exit code; None if it has not run.
        error: first line of the error.
        metrics: last step, and the last and best value of the metric that ranks checkpoints.
    """

    job: Job
    config: RunConfig
    placement: Placement
    directory: Path
    exit_code: int | None = None
    error: str = ""
    metrics: dict[str, Any] | None = None


@dataclass
class Sweep:
    """The jobs of a sweep, and its directory.

    Attributes:
        key: the key that sets the directory.
        elsewhere: the keys to change for another directory.
        can_resume: the directory may hold the same sweep.
        total: number of jobs, also of those that are not chosen yet.
    """

    directory: Path
    key: str
    elsewhere: str
    runs: list[SweepRun]
    can_resume: bool
    total: int = 0

    def __post_init__(self) -> None:
        """Count the jobs."""
        self.total = self.total or len(self.runs)

    def record(self) -> None:
        """Write the state of each job.

        Raises:
            UserError: the directory cannot be written (exit code 74).
        """
        jobs = [
            {
                "number": run.job.number,
                "swept": list(map(redact, run.job.swept)),
                "overrides": list(map(redact, run.job.overrides)),
                "directory": str(run.directory),
                "configuration": run.config.digest,
                "exit_code": run.exit_code,
                "problem": run.error,
                "figures": run.metrics,
            }
            for run in self.runs
        ]
        try:
            atomic_write(self.directory / RECORD_FILE, (json.dumps({"jobs": jobs}, indent=2) + "\n").encode())
        except OSError as error:
            raise unwritable_error(self.directory, error, self.key) from error

    def recorded_jobs(self) -> list[dict[str, Any]] | None:
        """Read the recorded state of each job; None for a new sweep.

        Raises:
            UserError: the sweep may not be resumed, or its record cannot be read.
        """
        path = self.directory / RECORD_FILE
        if not path.exists():
            return None
        if not self.can_resume:
            raise UserError(
                f"{self.directory} already holds a sweep; resume it with exp_manager.resume_if_exists=True, or write "
                f"elsewhere with another {self.elsewhere}"
            )
        try:
            if path.stat().st_size > _MAX_RECORD_BYTES:
                raise ValueError("it is too large")
            known = json.loads(path.read_text(encoding="utf-8"))["jobs"]
            if not all(isinstance(row["swept"], list) for row in known):
                raise ValueError("it is not a list of jobs")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read ({error}); move it away to start a new sweep") from None
        return known

    def resume(self) -> None:
        """Mark the jobs that a record in the directory says are finished.

        Raises:
            UserError: the directory holds another sweep, one of other configurations, or one that may not be resumed.
        """
        known = self.recorded_jobs()
        if known is None:
            known = [{} for _ in self.runs]
        elif [row["swept"] for row in known] != [list(map(redact, run.job.swept)) for run in self.runs]:
            raise UserError(
                f"{self.directory} holds a sweep of other jobs; repeat its overrides to resume it, or write elsewhere "
                f"with another {self.elsewhere}"
            )
        started = [run for run, row in zip(self.runs, known, strict=True) if row.get("exit_code") in _STARTED]
        self.check_same_configurations(started, may_change=_OF_LENGTH_AND_REPORT)
        self.runs = [mark_finished(run, row) for run, row in zip(self.runs, known, strict=True)]

    def check_same_configurations(self, runs: Sequence[SweepRun], may_change: Sequence[str] = ()) -> None:
        """Check that jobs have the configuration with which they were started, before any of them is started again.

        Args:
            may_change: prefixes of keys that may have other values.

        Raises:
            UserError: one has not; the message names the keys.
        """
        for run in runs:
            changes = list(_changes(run, (*_OF_DIRECTORY, *may_change)))
            if changes:
                shown = "; ".join(truncate_lines(changes, _MAX_SHOWN_KEYS))
                raise UserError(
                    f"{self.directory} holds a sweep with another configuration, as of job {run.job.number}: {shown}; "
                    f"repeat its overrides to resume it, or write elsewhere with another {self.elsewhere}"
                )


def _changes(run: SweepRun, may_change: tuple[str, ...]) -> Iterator[str]:
    """Yield a text for each key that has another value than when a job was started; none if it was not."""
    try:
        saved = json.loads((run.directory / _RESOLVED_CONFIG).read_text(encoding="utf-8"))
        before = dict(leaves(saved))
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    after = dict(leaves(json.loads(json.dumps(run.config.document))))
    known = schema_keys(run.config.root.model.family)
    if run.config.root.trainer.max_epochs is not None:  # by which a run replaces the steps that it saves
        may_change += ("trainer.max_steps",)
    for path in {**before, **after}:
        default = known[path].default if path in known else None  # of a key that another version did not know
        values = [format_value(each.get(path, default)) for each in (before, after)]
        if values[0] != values[1] and not path.startswith(may_change):
            was, now = (redact_value(path, value) for value in values)
            yield f"`{path}` was {was} and is {now} now"


def job_label(job: Job) -> str:
    """Return the swept overrides of a job, secrets redacted."""
    return " ".join(map(redact, job.swept)) or "nothing varies"


def unwritable_error(path: object, error: OSError, key: str) -> UserError:
    """Return the error for a sweep directory, set by `key`, that cannot be written."""
    return UserError(
        f"cannot write the directory of the sweep {path}: {error.strerror or error}; set {key} to a "
        "directory that can be written",
        EXIT_IO,
    )


def mark_finished(run: SweepRun, recorded: dict[str, Any]) -> SweepRun:
    """Mark a job as done if it was already finished with the same configuration."""
    if recorded.get("exit_code") == EXIT_OK and recorded.get("configuration") == run.config.digest:
        return replace(run, exit_code=EXIT_OK, metrics=read_metrics(run))
    return run


def _monitor(run: SweepRun) -> str:
    """Return the logged name of the metric that ranks the checkpoints of a job."""
    return canonical_metric_name(run.config.root.exp_manager.checkpoint_callback_params.monitor)


def read_metrics(run: SweepRun) -> dict[str, Any] | None:
    """Read metrics.jsonl: the last step, and the last and best value of the metric that ranks checkpoints."""
    monitor = _monitor(run)
    rows: list[dict[str, Any]] = []
    try:
        with (run.directory / "metrics.jsonl").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except ValueError:  # the last line of a killed run may be cut off
                    continue
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
    except OSError:
        return None
    if not rows:
        return None
    metric = monitor if any(monitor in row for row in rows) else "loss"
    better = max if run.config.root.exp_manager.checkpoint_callback_params.mode == "max" and metric == monitor else min
    values = [row[metric] for row in rows if isinstance(row.get(metric), float)]
    return {
        "step": rows[-1]["step"],
        "metric": metric,
        "last": values[-1] if values else None,
        "best": better(values) if values else None,
    }


def job_table(runs: Sequence[SweepRun], directory: Path) -> list[str]:
    """Return the lines of a table of jobs.

    Only comparable values are shown: if a job has its monitored metric, the training loss that replaces it in a job
    that ended before measuring it is left out.
    """
    measured = [run for run in runs if run.metrics and run.metrics["metric"] == _monitor(run)]
    compared = measured or [run for run in runs if run.metrics]
    shown = {run.job.number for run in compared}
    metrics = {run.metrics["metric"] for run in compared if run.metrics}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    rows = [["job", "exit", "step", f"last {metric}", f"best {metric}", "directory", "overrides"]]
    for run in runs:
        figures = run.metrics or {}
        numbers = [figures.get("last"), figures.get("best")] if run.job.number in shown else [None, None]
        rows.append(
            [
                str(run.job.number),
                "-" if run.exit_code is None else str(run.exit_code),
                str(figures.get("step", "-")),
                *("-" if number is None else f"{number:.4f}" for number in numbers),
                os.path.relpath(run.directory, directory),
                job_label(run.job),
            ]
        )
    return format_table(rows)
