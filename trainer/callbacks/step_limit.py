"""Number of steps of a run, shortened to fit a time budget at the measured pace."""

from __future__ import annotations

import time
from collections.abc import Callable

_MIN_MEASURED_FRACTION = 0.02
"""Fraction of the budget to measure before the first change; the pace of a few steps says little."""
_TOLERANCE = 0.02
"""Excess steps that are left alone, as a fraction of all: smaller corrections would follow noise."""


class StepLimit:
    """Number of steps after which a run ends: `trainer.max_steps`, or fewer if its time would be exceeded.

    A shortened run ends with its last step, whose learning rate schedule ends there too, where `trainer.max_time` would
    stop it in the middle. Which steps it has then depends on the clock, so this is for runs that ask for a time.

    Args:
        max_steps: `trainer.max_steps`.
        seconds: time for training from the end of its first step, validations and checkpoints included; None for no
            limit.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self, max_steps: int, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_steps = max_steps
        self._seconds = seconds
        self._clock = clock
        self._started_at: float | None = None
        self._resumed_at = 0.0
        self._trained_seconds = 0.0
        self._measured_steps = 0

    def after_step(self, step: int) -> bool:
        """Measure the step just completed; return True if that has shortened the run.

        The first step of a process is not measured: it compiles and allocates.
        """
        if self._seconds is None:
            return False
        now = self._clock()
        if self._started_at is None:
            self._started_at = self._resumed_at = now
            return False
        self._trained_seconds += now - self._resumed_at
        self._resumed_at = now
        self._measured_steps += 1
        if self._trained_seconds < _MIN_MEASURED_FRACTION * self._seconds:
            return False
        left = max(0.0, self._started_at + self._seconds - now)
        fitting = max(step + 1, step + int(left * self._measured_steps / self._trained_seconds))
        if fitting + _TOLERANCE * self.max_steps >= self.max_steps:
            return False
        self.max_steps = fitting
        return True

    def resume_clock(self) -> None:
        """Exclude the time since the last step from the pace: it was a validation or a checkpoint."""
        self._resumed_at = self._clock()
