"""Loss spike detection as a pure function of the recent training losses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NUM_RECENT_LOSSES = 10
"""Number of latest losses whose median is tested: one bad batch is noise, a loss that stays high is not."""
NUM_REFERENCE_LOSSES = 128
"""Number of reference losses before those."""
MIN_REFERENCE_LOSSES = 64
"""Fewest reference losses for a test."""
MIN_RELATIVE_DEVIATION = 0.01
"""Lower bound of the deviation, relative to a reference of at least 1 nat: a converged loss hardly varies."""

_MAD_TO_STD = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""


def loss_deviation(losses: Sequence[float]) -> tuple[float, float, float] | None:
    """Return how far the latest losses are above those before them, in standard deviations of a single loss.

    Medians and the median absolute deviation are robust, so neither rare bad batches nor an earlier spike distort the
    reference.

    Args:
        losses: finite training losses, oldest first, nats per token; only the last `NUM_REFERENCE_LOSSES +
            NUM_RECENT_LOSSES` are used.

    Returns:
        The deviations (negative if below), the median of the latest losses and that of the reference; None while there
        are too few losses.
    """
    recent, reference = (
        losses[-NUM_RECENT_LOSSES:],
        losses[-NUM_RECENT_LOSSES - NUM_REFERENCE_LOSSES : -NUM_RECENT_LOSSES],
    )
    if len(reference) < MIN_REFERENCE_LOSSES:
        return None
    baseline, current = statistics.median(reference), statistics.median(recent)
    deviation = _MAD_TO_STD * statistics.median(abs(loss - baseline) for loss in reference)
    deviation = max(deviation, MIN_RELATIVE_DEVIATION * max(1.0, abs(baseline)))
    return (current - baseline) / deviation, current, baseline
