"""Steps between checkpoints that lose the least time: `every_n_train_steps: auto`.

Saving costs C seconds every interval T, and a failure, every M seconds on average, loses T / 2 seconds of training; the
sum is least at T = sqrt(2 C M) (Young 1974, doi 10.1145/361147.361115; Daly 2006, doi 10.1016/j.future.2004.11.016).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ..distributed.process_group import DistributedContext

FIRST_SAVE_STEPS = 10
"""Steps before the first checkpoint of a run, which measures the cost of one."""
_LARGEST_SECONDS, _LARGEST_PROCESSES = 7.9 * 3600, 1024
"""Mean time between failures of a job of so many GPUs (Kokolis et al. 2024, arXiv 2410.21680), inverse to their number:
the longest that is assumed before the first failure."""
_SHORTEST_SECONDS = 60.0
_CHANGE = 0.2
"""Smaller relative changes of the interval are left alone: they would follow noise."""


class FailureRate:
    """Failures of a run and the time it ran, over all its starts.

    Args:
        events: the events of the run (`run_events.py`).
        processes: number of processes.
        clock: seconds since the epoch.
    """

    def __init__(
        self, events: Iterable[dict[str, Any]], processes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._longest = max(_SHORTEST_SECONDS, _LARGEST_SECONDS * _LARGEST_PROCESSES / processes)
        self.failures = 0
        self._seconds = 0.0
        started: float | None = None
        last = 0.0
        for event in events:
            if event["event"] == "start":
                if started is not None:  # the start before this one ended without a word
                    self.failures += 1
                    self._seconds += max(0.0, last - started)
                started = event["time"]
            elif event["event"] in ("failure", "error", "stop", "end") and started is not None:
                self.failures += event["event"] == "failure" or event.get("exit_code", 2) in (1, 74)
                self._seconds += max(0.0, event["time"] - started)
                started = None
            last = event["time"]
        if started is not None:
            self.failures += 1
            self._seconds += max(0.0, last - started)
        self._started_at = clock()

    @property
    def mean_seconds(self) -> float:
        """Mean time between failures; before the first one the time without any, within limits.

        A run that has gone well for an hour is as likely as not to do so for another; most fail early or late.
        """
        seconds = self._seconds + max(0.0, self._clock() - self._started_at)
        return seconds / self.failures if self.failures else min(max(seconds, _SHORTEST_SECONDS), self._longest)


class SaveInterval:
    """The interval, which rank 0 computes and all ranks follow.

    Args:
        ranks: the ranks of the run.
        events: the events of the run so far, on rank 0.
        step: completed steps when this process starts.

    Attributes:
        steps: steps between checkpoints.
    """

    def __init__(self, ranks: DistributedContext, events: list[dict[str, Any]], step: int) -> None:
        self._ranks = ranks
        self._rate = FailureRate(events, ranks.world_size)
        self._costs: deque[float] = deque(maxlen=5)
        self._saved_at_step = step
        self.steps = FIRST_SAVE_STEPS
        past = next((event for event in reversed(events) if event["event"] == "interval"), {})
        cost, seconds = past.get("save_seconds"), past.get("step_seconds")
        if cost and seconds:
            self._costs.append(cost)
            self.steps = self._best(seconds)
        self.steps = json.loads(ranks.broadcast_text(json.dumps(self.steps)))

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step."""
        return step - self._saved_at_step >= self.steps

    def after_save(self, step: int, save_seconds: float, step_seconds: float | None) -> dict[str, Any] | None:
        """Adapt the interval after a checkpoint; a collective.

        Args:
            step: step of the checkpoint.
            save_seconds: what it cost training.
            step_seconds: median seconds of a step; None before any.

        Returns:
            The values of an event if the interval has changed, else None.
        """
        self._saved_at_step = step
        self._costs.append(save_seconds)
        steps, before = self._best(step_seconds) if step_seconds else self.steps, self.steps
        is_first = len(self._costs) == 1
        if abs(steps - before) <= _CHANGE * before and not is_first:
            steps = before
        # what rank 0 has decided: the others have measured something else
        self.steps = json.loads(self._ranks.broadcast_text(json.dumps(steps)))
        if not step_seconds or (self.steps == before and not is_first):
            return None
        return {
            "steps": steps,
            "save_seconds": round(statistics.median(self._costs), 4),
            "step_seconds": round(step_seconds, 5),
            "failures": self._rate.failures,
            "mean_seconds_between_failures": round(self._rate.mean_seconds, 1),
        }

    def _best(self, step_seconds: float) -> int:
        seconds = math.sqrt(2 * statistics.median(self._costs) * self._rate.mean_seconds)
        return max(1, round(seconds / step_seconds))
