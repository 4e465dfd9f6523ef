"""Monitor loss and gradient norm of training steps: mean loss, skipped steps, divergence and loss spikes.

The optimizer skips a step whose gradients are not finite, on the device, without a host sync. Such steps are copied
here when the metrics are read. Loss and norm are global over all ranks, so every rank gets the same results.

In fp16 a finite loss with infinite gradients is an overflow, which the loss scale is there for: such steps do not count
towards `max_skipped_steps`, unless the scale cannot fall any further.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from ..checkpoint.loop_state import LoopState
from ..optim.loss_scale import MIN_SCALE

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
_SPIKE_INTERVAL = 5
"""Steps between two spike tests, each a few medians."""


class DivergedError(Exception):
    """Raised when training has diverged; the message has the step and the reason."""


class LossMonitor:
    """Monitor the metrics of every step.

    Args:
        max_skipped_steps: maximum number of consecutive skipped steps.
        spike_threshold: deviations at which to warn of a loss spike; None never warns.
        state: loop state of the checkpoint the run resumes from.

    Attributes:
        skipped_steps: steps skipped since the start of training because gradients were not finite.
        consecutive_skipped_steps: number of consecutive skipped steps up to the last one.
    """

    def __init__(self, max_skipped_steps: int, spike_threshold: float | None, state: LoopState) -> None:
        self._max_skipped_steps = max_skipped_steps
        self._spike_threshold = spike_threshold
        self._loss_sum = state.loss_sum
        self._loss_steps = state.loss_steps
        self._recent_losses = deque(state.recent_losses, maxlen=NUM_REFERENCE_LOSSES + NUM_RECENT_LOSSES)
        self._in_spike = state.in_spike
        self.skipped_steps = state.skipped_steps
        self.consecutive_skipped_steps = state.skipped_in_a_row

    def update(
        self, first_step: int, values: Sequence[tuple[float, float] | tuple[float, float, float | None]]
    ) -> list[str]:
        """Process the metrics of the steps since the last call.

        Args:
            first_step: number of the first of these steps.
            values: loss, gradient norm and loss scale (None, or left out, except in fp16) of each step.

        Returns:
            Warnings, one line each.

        Raises:
            DivergedError: more than `max_skipped_steps` steps in a row were not finite, or gradients overflow whatever
                the loss scale.
        """
        warnings: list[str] = []
        skipped: list[int] = []
        overflows: list[int] = []
        scale = None
        for step, metrics in enumerate(values, first_step):
            loss, grad_norm = metrics[:2]
            scale = metrics[2] if len(metrics) > 2 else None
            if scale is not None and math.isfinite(loss) and not math.isfinite(grad_norm):
                self.skipped_steps += 1
                overflows.append(step)
                if scale <= MIN_SCALE:
                    raise DivergedError(
                        f"training diverged at step {step}: gradients overflow in fp16 even with the smallest loss "
                        f"scale ({MIN_SCALE:g})"
                    )
            elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
                skipped.append(step)
                self.skipped_steps += 1
                self.consecutive_skipped_steps += 1
                if self.consecutive_skipped_steps > self._max_skipped_steps:
                    hint = "" if scale is None else "; activations overflow in fp16, which no loss scale prevents"
                    raise DivergedError(self._diverged(step, loss, grad_norm) + hint)
                continue
            self.consecutive_skipped_steps = 0
            self._loss_sum += loss
            self._loss_steps += 1
            self._recent_losses.append(loss)
            if step % _SPIKE_INTERVAL == 0 and (warning := self._check_spike(step)):
                warnings.append(warning)
        if skipped:
            loss, grad_norm, *_ = values[skipped[0] - first_step]
            warnings.insert(0, f"{_skipped(skipped)}: loss {loss}, gradient norm {grad_norm}")
        if overflows:
            last = f"the loss scale of step {first_step + len(values) - 1} was {scale:.10g}"
            warnings.insert(0, f"{_skipped(overflows)}: gradients overflowed in fp16; {last}")
        return warnings

    def mean_loss(self, *, restart: bool) -> float:
        """Return the mean loss of the finite steps since the last regular report; NaN if there is none.

        Args:
            restart: start a new mean. Only for reports that an uninterrupted run makes too, so that a resumed run logs
                the same means.
        """
        mean = self._loss_sum / self._loss_steps if self._loss_steps else math.nan
        if restart:
            self._loss_sum, self._loss_steps = 0.0, 0
        return mean

    def state(self) -> LoopState:
        """Return the loop state for a checkpoint; `TrainLoopCallback` adds the state of early stopping."""
        return LoopState(
            loss_sum=self._loss_sum,
            loss_steps=self._loss_steps,
            skipped_steps=self.skipped_steps,
            skipped_in_a_row=self.consecutive_skipped_steps,
            recent_losses=tuple(self._recent_losses),
            in_spike=self._in_spike,
        )

    def _diverged(self, step: int, loss: float, grad_norm: float) -> str:
        in_a_row = f", number {self.consecutive_skipped_steps} in a row" if self._max_skipped_steps else ""
        return f"training diverged at step {step}: loss {loss}, gradient norm {grad_norm}{in_a_row}"

    def _check_spike(self, step: int) -> str | None:
        if self._spike_threshold is None:
            return None
        found = loss_deviation(tuple(self._recent_losses))
        if found is None:
            return None
        deviations, current, baseline = found
        if self._in_spike:
            self._in_spike = deviations > self._spike_threshold / 2
        elif deviations > self._spike_threshold:
            self._in_spike = True
            return (
                f"loss spike before step {step}: {current:.4f} (median of {NUM_RECENT_LOSSES} steps), "
                f"{deviations:.0f} standard "
                f"deviations above {baseline:.4f} before"
            )
        return None


def _skipped(steps: list[int]) -> str:
    return f"step {steps[0]} was skipped" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} on were skipped"


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
