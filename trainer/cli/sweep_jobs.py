"""Jobs of a sweep, of a grid or of Optuna: their configuration, their placement, and the table of all."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config.load import config_from_document
from ..config.run_config import RunConfig
from ..config.sweep_overrides import Job
from ..distributed.placement import Placement, resolve_placement
from ..utils.errors import UserError
from ..utils.redaction import redact_arguments
from ..utils.text import pluralize
from .sweep_record import Sweep, SweepRun, job_table

LoadJob = Callable[[Job], RunConfig]
"""Compose and validate the configuration of a job; raises UserError."""


def new_run(directory: Path, job: Job, config: RunConfig, placement: Placement) -> SweepRun:
    """Return a job in its own directory, below that of the sweep."""
    assert config.hydra is not None
    own = directory / config.hydra.sweep_subdir
    return SweepRun(job, _with_directory(config, own), placement, own)


def job_placement(config: RunConfig, environ: Any) -> Placement:
    """Return the placement of a job.

    Raises:
        UserError: this process is a rank of torchrun or srun, or the job has several nodes.
    """
    placement = resolve_placement(config.root.trainer, environ)
    if placement.rank is not None or placement.num_nodes > 1:
        raise UserError(
            "-m starts the processes of its jobs itself, on one machine; run it without torchrun and srun, and with "
            "trainer.num_nodes=1"
        )
    return placement


def print_table(sweep: Sweep, *, stopped: bool) -> None:
    """Print the jobs of a sweep; of one that a signal stopped also the command line that resumes it."""
    lines = [*job_table(sweep.runs, sweep.directory), f"{pluralize(len(sweep.runs), 'job')} in {sweep.directory}"]
    if stopped:
        lines.append(f"to resume: {_resume_command(sweep)}")
    print("\n".join(["", *lines]), flush=True)


def _resume_command(sweep: Sweep) -> str:
    words = redact_arguments(sys.argv[1:])
    added = ["exp_manager.resume_if_exists=True"]
    if sweep.key != "exp_manager.explicit_log_dir":  # that of the first start may have its time
        place = str(sweep.directory)
        quoted = place if re.fullmatch(r"[\w./-]+", place, re.ASCII) else "'" + place.replace("'", "\\'") + "'"
        added.append(f"hydra.sweep.dir={quoted}")
    return shlex.join(["stoker", *words, *(word for word in added if word not in words)])


def _with_directory(config: RunConfig, directory: Path) -> RunConfig:
    """Return the configuration with its own run directory."""
    manager = {**config.document["exp_manager"], "explicit_log_dir": str(directory)}
    document = {**config.document, "exp_manager": manager}
    return config_from_document(document, trusted=True).with_provenance(config.provenance())
