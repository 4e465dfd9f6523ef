"""Whether the training loss stands out from its own recent values: a pure function of the losses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

RECENT = 10
"""Losses whose median is judged: one bad batch is noise, a loss that stays up is not."""
REFERENCE = 128
"""Losses before those that say what is normal."""
FEWEST = 64
"""With fewer reference losses nothing is said."""
SMALLEST_DEVIATION = 0.01
"""Relative to the reference, but at least so many nats: a loss near its floor hardly varies, its jitter is no news."""

_NORMAL = 1.4826
"""Median absolute deviation to standard deviation, of a normal distribution."""


def deviations_above(losses: Sequence[float]) -> tuple[float, float, float] | None:
    """How far the newest losses are above those before them, in standard deviations of a single loss.

    Both sides are medians and the deviation is the median absolute one, so neither rare bad batches nor an earlier
    spike change what is normal.

    Args:
        losses: finite training losses, oldest first, nats per token; only the last `REFERENCE + RECENT` count.

    Returns:
        The deviations (negative below), the median of the newest and that of the reference; None while there are too
        few losses.
    """
    recent, reference = losses[-RECENT:], losses[-RECENT - REFERENCE : -RECENT]
    if len(reference) < FEWEST:
        return None
    usual, now = statistics.median(reference), statistics.median(recent)
    deviation = _NORMAL * statistics.median(abs(loss - usual) for loss in reference)
    deviation = max(deviation, SMALLEST_DEVIATION * max(1.0, abs(usual)))
    return (now - usual) / deviation, now, usual
