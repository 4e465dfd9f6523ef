"""The jobs of a sweep as they are written down: `multirun.json`, by which a sweep goes on, and the table at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.run_config import RunConfig
from ..config.schema.exp_manager import logged_name
from ..config.sweep_overrides import Job
from ..distributed.placement import Placement
from ..utils.durable_files import replace_file
from ..utils.errors import EXIT_DONE, EXIT_IO, UserError
from ..utils.redaction import without_secrets

RECORD = "multirun.json"
"""In the directory of a sweep: its jobs, their overrides, directories and how they ended."""
_MAX_RECORD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A job on its way.

    Attributes:
        job: its overrides.
        config: with its own directory.
        placement: of its processes.
        directory: its run directory.
        exit_code: how it ended; None: it did not start.
        problem: the first line of what was wrong.
        figures: its last step, and the last and best value of the metric that ranks its checkpoints.
    """

    job: Job
    config: RunConfig
    placement: Placement
    directory: Path
    exit_code: int | None = None
    problem: str = ""
    figures: dict[str, Any] | None = None


def shown_job(job: Job) -> str:
    """What makes a job differ from the others, without secrets."""
    return " ".join(map(without_secrets, job.swept)) or "nothing varies"


def cannot_write(where: object, error: OSError, key: str) -> UserError:
    """The error for the user where the directory of a sweep, which `key` gives, cannot be written."""
    return UserError(
        f"cannot write the directory of the sweep {where}: {error.strerror or error}; set {key} to a "
        "directory that can be written",
        EXIT_IO,
    )


def read_record(directory: Path, jobs: Sequence[Job], resumes: bool, elsewhere: str) -> list[dict[str, Any]]:
    """What an earlier process wrote of each job; empty for a new sweep.

    Args:
        directory: of the sweep.
        jobs: those of now.
        resumes: whether an earlier sweep may be gone on with.
        elsewhere: the keys that lead to another directory.

    Raises:
        UserError: the directory holds another sweep, or one that was not to be gone on with.
    """
    path = directory / RECORD
    if not path.exists():
        return [{} for _ in jobs]
    if not resumes:
        raise UserError(
            f"{directory} already holds a sweep; go on with it with exp_manager.resume_if_exists=True, or write "
            f"elsewhere with another {elsewhere}"
        )
    try:
        if path.stat().st_size > _MAX_RECORD_BYTES:
            raise ValueError("it is too large")
        known = json.loads(path.read_text(encoding="utf-8"))["jobs"]
        swept = [row["swept"] for row in known]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); move it away to start the sweep anew") from None
    if swept != [list(map(without_secrets, job.swept)) for job in jobs]:
        raise UserError(
            f"{directory} holds a sweep of other jobs; repeat its overrides to go on with it, or write elsewhere with "
            f"another {elsewhere}"
        )
    return known


def taken_over(run: SweptRun, known: dict[str, Any]) -> SweptRun:
    """A job that an earlier process has finished with this very configuration is done."""
    if known.get("exit_code") == EXIT_DONE and known.get("configuration") == run.config.digest:
        return replace(run, exit_code=EXIT_DONE, figures=figures_of(run))
    return run


def write_record(directory: Path, runs: Sequence[SweptRun], key: str) -> None:
    """Write how far each job is; `key` gives the directory.

    Raises:
        UserError: the directory cannot be written (exit code 74).
    """
    document = {
        "jobs": [
            {
                "number": run.job.number,
                "swept": list(map(without_secrets, run.job.swept)),
                "overrides": list(map(without_secrets, run.job.overrides)),
                "directory": str(run.directory),
                "configuration": run.config.digest,
                "exit_code": run.exit_code,
                "problem": run.problem,
                "figures": run.figures,
            }
            for run in runs
        ]
    }
    try:
        replace_file(directory / RECORD, (json.dumps(document, indent=2) + "\n").encode())
    except OSError as error:
        raise cannot_write(directory, error, key) from error


def _wanted(run: SweptRun) -> str:
    """The metric that ranks the checkpoints of a job, as it is logged."""
    return logged_name(run.config.root.exp_manager.checkpoint_callback_params.monitor)


def figures_of(run: SweptRun) -> dict[str, Any] | None:
    """The last step in metrics.jsonl, and the last and best value of the metric that ranks checkpoints."""
    wanted = _wanted(run)
    rows: list[dict[str, Any]] = []
    try:
        with (run.directory / "metrics.jsonl").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                except ValueError:  # the last line of a killed run may be torn
                    continue
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    rows.append(row)
    except OSError:
        return None
    if not rows:
        return None
    metric = wanted if any(wanted in row for row in rows) else "loss"
    better = max if run.config.root.exp_manager.checkpoint_callback_params.mode == "max" and metric == wanted else min
    values = [row[metric] for row in rows if isinstance(row.get(metric), float)]
    return {
        "step": rows[-1]["step"],
        "metric": metric,
        "last": values[-1] if values else None,
        "best": better(values) if values else None,
    }


def table_of(runs: Sequence[SweptRun], directory: Path) -> list[str]:
    """A line for each job, below a heading.

    Figures of one kind only: where some job has the metric that ranks its checkpoints, a training loss that stands for
    it in another, which ended before it was measured, is not shown beside it.
    """
    measured = [run for run in runs if run.figures and run.figures["metric"] == _wanted(run)]
    compared = measured or [run for run in runs if run.figures]
    shown = {run.job.number for run in compared}
    metrics = {run.figures["metric"] for run in compared if run.figures}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    rows = [["job", "exit", "step", f"last {metric}", f"best {metric}", "directory", "overrides"]]
    for run in runs:
        figures = run.figures or {}
        numbers = [figures.get("last"), figures.get("best")] if run.job.number in shown else [None, None]
        rows.append(
            [
                str(run.job.number),
                "-" if run.exit_code is None else str(run.exit_code),
                str(figures.get("step", "-")),
                *("-" if number is None else f"{number:.4f}" for number in numbers),
                os.path.relpath(run.directory, directory),
                shown_job(run.job),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
