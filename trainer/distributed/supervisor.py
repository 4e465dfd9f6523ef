"""`stoker train --restart N`: restart a run from its newest checkpoint after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..config.run_config import RunConfig
from ..config.run_paths import checkpoint_directory, configured_run_directory
from ..utils.errors import EXIT_FAILURE, UserError
from .launcher import launch
from .placement import Placement

_PAUSE_SECONDS = 1.0


def run_with_restarts(
    config: RunConfig, placement: Placement, restarts: int, report: Callable[[str], None], imports: Sequence[str] = ()
) -> int:
    """Run until training is done or stopped, or has failed `restarts` times in a row without a new checkpoint.

    Bad input, a full disk and divergence would recur, so they are not retried.

    Raises:
        UserError: the run cannot be resumed, or the restarts are used up.
    """
    manager = config.root.exp_manager
    if restarts < 0:
        raise UserError(f"--restart {restarts}: must be 0 or more")
    if not manager.resume_if_exists or not manager.create_checkpoint_callback:
        raise UserError(
            "--restart resumes from checkpoints; set exp_manager.resume_if_exists=True "
            "exp_manager.create_checkpoint_callback=True"
        )
    left = restarts
    while True:
        before = _checkpoint_names(config)
        try:
            return launch(config, placement, imports)
        except UserError as error:
            if error.exit_code != EXIT_FAILURE:
                raise
            left = restarts if _checkpoint_names(config) != before else left
            if left == 0:
                last_line = f"giving up: {restarts} restart{'s' * (restarts > 1)} without a new checkpoint"
                raise UserError([*error.lines, last_line], EXIT_FAILURE) from error
            left -= 1
            report("\n".join(error.lines[:1]))
            report(f"restarting from the newest checkpoint ({left} more without progress)")
            time.sleep(_PAUSE_SECONDS)


def _checkpoint_names(config: RunConfig) -> list[str]:
    """Return the names of the complete checkpoints."""
    keys = config.root.exp_manager
    place = configured_run_directory(keys, config.root.name)
    assert place is not None  # set, because the run can resume
    folder = checkpoint_directory(keys, place)
    return sorted(path.name for path in folder.glob("step-*") if ".tmp-" not in path.name)
