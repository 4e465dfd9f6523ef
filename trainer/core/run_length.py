"""Length of a run and its validation interval in optimizer steps, which depend on the data with `max_epochs`."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from ..config.resolved_run import ResolvedRun
from ..data.batch_sampler import BatchSchedule, parse_ramp_up
from ..utils.errors import UserError
from ..utils.text import pluralize


def resolve_run_length(run: ResolvedRun, samples: int) -> ResolvedRun:
    """Resolve `max_epochs` and a fractional `val_check_interval`, as Lightning does; unchanged without them.

    The run ends after `max_steps`, or after the last full global batch of `max_epochs` passes over the data, whichever
    comes first. A fraction is one of an epoch with `max_epochs`, otherwise of `max_steps`: NeMo's epoch is the run.

    Args:
        samples: training samples of an epoch.

    Returns:
        A run whose `trainer` has both as numbers of steps; its `max_epochs` is None unless that ends the run.

    Raises:
        UserError: an epoch has less than one global batch.
    """
    keys = run.trainer
    max_steps, epochs, interval = keys.max_steps, keys.max_epochs, keys.val_check_interval
    whole = max_steps
    if epochs is not None and epochs > 0:
        whole = _full_batches(run, samples)
        if not whole:
            raise UserError(
                f"`trainer.max_epochs` ({epochs}) passes over {pluralize(samples, 'training sample')}, less than one "
                f"global batch; use a smaller `model.global_batch_size` ({run.model.global_batch_size}), or more data"
            )
        steps = _full_batches(run, epochs * samples)
        if max_steps == -1 or steps <= max_steps:
            max_steps = steps
        else:
            epochs = None
    else:
        epochs = None
    if isinstance(interval, float):
        interval = max(1, int(interval * whole))
    update = {"max_steps": max_steps, "max_epochs": epochs, "val_check_interval": interval}
    return replace(run, trainer=keys.model_copy(update=update))


def _full_batches(run: ResolvedRun, samples: int) -> int:
    """Return the number of global batches, from the start of a run, that fit into a number of samples."""
    size = run.model.global_batch_size
    schedule = BatchSchedule(size, ramp_up=parse_ramp_up(run.model.rampup_batch_size, size))
    return bisect_right(range(samples + 1), samples, key=schedule.consumed_samples) - 1
