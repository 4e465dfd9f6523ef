"""What the losses and gradient norms of training steps mean: their mean, skipped steps, divergence and spikes.

A step whose gradients are not finite changes nothing: the optimizer finds that out on the device, without a host sync.
Here such steps are counted, when the figures are read. Loss and norm are those of all processes together, so every
process comes to the same results.
"""

from __future__ import annotations

import math
from collections import deque

from ..checkpoint.loop_state import LoopState
from .loss_spike import RECENT, REFERENCE, deviations_above

_SPIKE_INTERVAL = 5
"""Steps between two looks for a spike, each a few medians."""


class DivergedError(Exception):
    """Training cannot go on; the message says since which step and why."""


class StepPolicy:
    """Follows the figures of every step.

    Args:
        max_skipped_steps: steps in a row that may be skipped.
        spike_threshold: deviations at which a rise of the loss is warned of; None never warns.
        state: where an earlier process left off.

    Attributes:
        skipped_steps: steps since the start of training whose gradients were not finite.
        skipped_in_a_row: how many of them came last.
    """

    def __init__(self, max_skipped_steps: int, spike_threshold: float | None, state: LoopState) -> None:
        self._max_skipped_steps = max_skipped_steps
        self._spike_threshold = spike_threshold
        self._sum = state.loss_sum
        self._count = state.loss_steps
        self._recent = deque(state.recent_losses, maxlen=REFERENCE + RECENT)
        self._in_spike = state.in_spike
        self.skipped_steps = state.skipped_steps
        self.skipped_in_a_row = state.skipped_in_a_row

    def read(self, first: int, values: list[tuple[float, float]]) -> list[str]:
        """Take the figures of steps that were not read yet.

        Args:
            first: the step of the first of them.
            values: loss (nats per token) and gradient norm of each step.

        Returns:
            Warnings, one line each.

        Raises:
            DivergedError: more than `max_skipped_steps` steps in a row were not finite.
        """
        warnings: list[str] = []
        skipped: list[int] = []
        for step, (loss, grad_norm) in enumerate(values, first):
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                skipped.append(step)
                self.skipped_steps += 1
                self.skipped_in_a_row += 1
                if self.skipped_in_a_row > self._max_skipped_steps:
                    raise DivergedError(self._diverged(step, loss, grad_norm))
                continue
            self.skipped_in_a_row = 0
            self._sum += loss
            self._count += 1
            self._recent.append(loss)
            if step % _SPIKE_INTERVAL == 0 and (warning := self._spike(step)):
                warnings.append(warning)
        if skipped:
            loss, grad_norm = values[skipped[0] - first]
            steps = f"step {skipped[0]} was" if len(skipped) == 1 else f"{len(skipped)} steps from {skipped[0]} on were"
            warnings.insert(0, f"{steps} skipped: loss {loss}, gradient norm {grad_norm}")
        return warnings

    def mean_loss(self, *, restart: bool) -> float:
        """Mean loss of the good steps since the last regular report; NaN where there was none.

        Args:
            restart: begin a new mean. Only reports that an unbroken run makes too may do so: then the figures of a
                resumed run are those of the unbroken one.
        """
        mean = self._sum / self._count if self._count else math.nan
        if restart:
            self._sum, self._count = 0.0, 0
        return mean

    def state(self) -> LoopState:
        """What another process needs to go on from here; early stopping adds its own part."""
        return LoopState(
            loss_sum=self._sum,
            loss_steps=self._count,
            skipped_steps=self.skipped_steps,
            skipped_in_a_row=self.skipped_in_a_row,
            recent_losses=tuple(self._recent),
            in_spike=self._in_spike,
        )

    def _diverged(self, step: int, loss: float, grad_norm: float) -> str:
        in_a_row = f", number {self.skipped_in_a_row} in a row" if self._max_skipped_steps else ""
        return f"training diverged at step {step}: loss {loss}, gradient norm {grad_norm}{in_a_row}"

    def _spike(self, step: int) -> str | None:
        if self._spike_threshold is None:
            return None
        found = deviations_above(tuple(self._recent))
        if found is None:
            return None
        deviations, now, usual = found
        if self._in_spike:
            self._in_spike = deviations > self._spike_threshold / 2
        elif deviations > self._spike_threshold:
            self._in_spike = True
            return (
                f"the training loss jumped before step {step}: {now:.4f} (median of {RECENT} steps), {deviations:.0f} "
                f"deviations above {usual:.4f} before"
            )
        return None
