"""The one-cycle learning rate of Smith and Topin (arXiv 1708.07120), as a schedule of stoker's."""

import math

import stoker


@stoker.register("schedule", "one_cycle")
def one_cycle(step: int, max_steps: int, lr: float, min_lr: float, rise: float = 0.3, start: float = 25.0) -> float:
    """Return the learning rate after `step` completed steps.

    Args:
        step: from 0.
        max_steps: length of the schedule.
        lr: the peak.
        min_lr: the end.
        rise: fraction of the steps up to the peak.
        start: the peak divided by the first learning rate.
    """
    peak = max(1.0, rise * max_steps)
    if step < peak:
        return _cosine(lr / start, lr, step / peak)
    return _cosine(lr, min_lr, min(1.0, (step - peak) / (max_steps - peak)))


def _cosine(first: float, last: float, fraction: float) -> float:
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * fraction))
