"""`stoker train --restart N`: starts a run again from its newest checkpoint when it ends by accident."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..config.run_config import RunConfig
from ..config.run_paths import checkpoint_place, named_place
from ..utils.errors import EXIT_BUG, UserError
from .launcher import launch
from .placement import Placement

_PAUSE_SECONDS = 1.0


def supervise(
    config: RunConfig, placement: Placement, restarts: int, say: Callable[[str], None], imports: Sequence[str] = ()
) -> int:
    """Run until it is done, is told to stop, or fails `restarts` times in a row without a new checkpoint.

    Bad input, a full disk and divergence would only happen again, so they end it at once.

    Args:
        config: of the run.
        placement: its processes on this machine.
        restarts: how many times to start again.
        say: prints a line.
        imports: the modules that `--import` named.

    Raises:
        UserError: the run cannot be resumed, or failed for good.
    """
    manager = config.root.exp_manager
    if restarts < 0:
        raise UserError(f"--restart {restarts}: must be 0 or more")
    if not manager.resume_if_exists or not manager.create_checkpoint_callback:
        raise UserError(
            "--restart goes on from checkpoints; set exp_manager.resume_if_exists=True "
            "exp_manager.create_checkpoint_callback=True"
        )
    left = restarts
    while True:
        before = _progress(config)
        try:
            return launch(config, placement, imports)
        except UserError as error:
            if error.exit_code != EXIT_BUG:
                raise
            left = restarts if _progress(config) != before else left
            if left == 0:
                given_up = f"given up: {restarts} restart{'s' * (restarts > 1)} without a new checkpoint"
                raise UserError([*error.lines, given_up], EXIT_BUG) from error
            left -= 1
            say("\n".join(error.lines[:1]))
            say(f"starting again from the newest checkpoint ({left} more without progress)")
            time.sleep(_PAUSE_SECONDS)


def _progress(config: RunConfig) -> list[str]:
    """The checkpoints there are."""
    place = named_place(config.root)
    assert place is not None  # a run that may resume
    folder = checkpoint_place(config.root, place)
    return sorted(path.name for path in folder.glob("step-*") if ".tmp-" not in path.name)
