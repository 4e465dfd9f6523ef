"""Start the jobs of a sweep: the interface of launchers, and the launcher `basic`, one job after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

from ..config.run_config import RunConfig
from ..distributed.placement import Placement
from ..utils.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, UserError
from ..utils.signals import handlers_set
from .sweep_record import Sweep, SweepRun, job_label, read_metrics

SIGNAL_EXIT_CODES = (EXIT_INTERRUPTED, EXIT_TERMINATED)

RunJob = Callable[[RunConfig, Placement], int]
"""Run a job in separate processes and return its exit code; raises UserError if it failed."""
Launch = Callable[[Sweep, Sequence[int]], int]
"""Run the jobs of a sweep at the given places in `Sweep.runs`, and update them there; return the exit code of a signal
that ended the sweep, or 0."""


class Terminated(BaseException):
    """SIGTERM, or another signal that ends with its exit code, received between two jobs."""


def terminate(number: int, frame: FrameType | None) -> None:
    """Raise `Terminated`: a signal handler."""
    raise Terminated


def title(sweep: Sweep, place: int) -> str:
    """Return number and overrides of a job, for messages."""
    run = sweep.runs[place]
    return f"job {run.job.number} ({place + 1} of {sweep.total}): {job_label(run.job)}"


def run_one_by_one(sweep: Sweep, places: Sequence[int], run_job: RunJob, log: Callable[[str], None]) -> int:
    """Run jobs one after another; see `Launch`."""
    with handlers_set(terminate):
        try:
            for place in places:
                run = sweep.runs[place]
                if run.exit_code is not None:
                    print(f"{title(sweep, place)}: already finished", flush=True)
                    continue
                print(f"{title(sweep, place)}; {run.directory}", flush=True)
                sweep.runs[place] = run = _run_one(run, run_job, log)
                sweep.record()
                if run.exit_code in SIGNAL_EXIT_CODES:
                    return run.exit_code or EXIT_OK
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except Terminated:
            return EXIT_TERMINATED
    return EXIT_OK


def _run_one(run: SweepRun, run_job: RunJob, log: Callable[[str], None]) -> SweepRun:
    code, problem = EXIT_BAD_INPUT, ""
    try:
        code = run_job(run.config, run.placement)
    except UserError as error:
        code, problem = error.exit_code, error.lines[0]
        log("\n".join(error.lines))
    return replace(run, exit_code=code, error=problem, metrics=read_metrics(run))
