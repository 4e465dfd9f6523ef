"""Learning rate schedules as pure functions of the step, as in NeMo (nemo_semantics 1.7, golden values in Appendix B).

A schedule depends on the configuration alone and has no state, so checkpoints do not contain any. The attributes of a
schedule are the keys of `model.optim.sched` that apply to it: learning rates, and numbers of optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..utils.errors import UserError

Schedule = Callable[[int], float]
"""Map the number of completed optimizer steps (0 for the first step) to the learning rate of the next one."""


@dataclass(frozen=True, slots=True)
class CosineAnnealing:
    """Linear warm-up, then a half cosine from `lr` to `min_lr`.

    Without `constant_steps` the warm-up is lr * (step + 1) / (warmup + 1), so the first step has a non-zero rate, and
    the cosine ends at `max_steps`. With `constant_steps` (as in Megatron) the warm-up is lr * step / warmup, and the
    cosine ends `constant_steps` earlier, with `min_lr` from there.
    """

    lr: float
    min_lr: float
    max_steps: int
    warmup_steps: float
    constant_steps: float = 0

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` completed steps."""
        decay_steps = self.max_steps - self.warmup_steps - self.constant_steps
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            if self.constant_steps:
                return self.lr * step / self.warmup_steps
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if decay_steps <= 0 or step > self.warmup_steps + decay_steps:
            return self.min_lr
        fraction = (step - self.warmup_steps) / decay_steps
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * fraction))


@dataclass(frozen=True, slots=True)
class WarmupPolicy:
    """Linear warm-up lr * (step + 1) / (warmup + 1), then `lr` up to `max_steps`, then `min_lr`.

    Subclasses have the same warm-up and end, and their own decay in between (`_decayed_lr`).
    """

    lr: float
    min_lr: float
    max_steps: int
    warmup_steps: float

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` completed steps."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if step > self.max_steps or self.max_steps <= self.decay_start:
            return self.min_lr
        return self.lr if step < self.decay_start else self._decayed_lr(step)

    @property
    def decay_start(self) -> float:
        """The step at which the decay begins."""
        return self.warmup_steps

    @property
    def decay_steps(self) -> float:
        """Steps from `decay_start` to `max_steps`."""
        return self.max_steps - self.decay_start

    def _decayed_lr(self, step: int) -> float:
        """Return the learning rate between `decay_start` and `max_steps`."""
        return self.lr


@dataclass(frozen=True, slots=True)
class WarmupAnnealing(WarmupPolicy):
    """Linear decay from `lr` to `min_lr` at `max_steps`."""

    def _decayed_lr(self, step: int) -> float:
        return self.min_lr + (1 - (step - self.decay_start) / self.decay_steps) * (self.lr - self.min_lr)


@dataclass(frozen=True, slots=True)
class InverseSquareRootAnnealing(WarmupPolicy):
    """lr / sqrt((step + 1) / (warmup + 1)), with no floor before `max_steps`."""

    def _decayed_lr(self, step: int) -> float:
        return self.lr / math.sqrt((step + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True, slots=True)
class SquareAnnealing(WarmupPolicy):
    """lr times the square of the remaining fraction of the decay; at least `min_lr`."""

    def _decayed_lr(self, step: int) -> float:
        return max(self.lr * ((self.max_steps - step) / self.decay_steps) ** 2, self.min_lr)


@dataclass(frozen=True, slots=True)
class SquareRootAnnealing(WarmupPolicy):
    """lr times the square root of the remaining fraction of all steps, warm-up included; at least `min_lr`."""

    def _decayed_lr(self, step: int) -> float:
        return max(self.lr * math.sqrt((self.max_steps - step) / self.max_steps), self.min_lr)


@dataclass(frozen=True, slots=True)
class PolynomialDecayAnnealing(WarmupPolicy):
    """Decay from `lr` to `min_lr` with the remaining fraction of the decay to the power `power`."""

    power: float = 1.0

    def _decayed_lr(self, step: int) -> float:
        remaining = (self.max_steps - step) / self.decay_steps
        return self.min_lr + (self.lr - self.min_lr) * remaining**self.power


@dataclass(frozen=True, slots=True)
class WarmupHoldPolicy(WarmupPolicy):
    """Warm-up, then constant `lr` for `hold_steps` and, in this class, up to `max_steps`; subclasses decay after it.

    Without `hold_steps` the decay begins after the warm-up, as in NeMo with `hold_steps: 0`; with null, NeMo's
    polynomial and linear schedules ignore the warm-up in the decay and are discontinuous.
    """

    hold_steps: float = 0

    @property
    def decay_start(self) -> float:
        """The step at which the decay begins."""
        return self.warmup_steps + self.hold_steps


@dataclass(frozen=True, slots=True)
class PolynomialHoldDecayAnnealing(WarmupHoldPolicy):
    """Decay from `lr` to `min_lr` with the remaining fraction of the decay to the power `power`."""

    power: float = 1.0

    def _decayed_lr(self, step: int) -> float:
        remaining = (self.max_steps - step) / self.decay_steps
        return self.min_lr + (self.lr - self.min_lr) * remaining**self.power


@dataclass(frozen=True, slots=True)
class WarmupHoldAnnealLinear(WarmupHoldPolicy):
    """Warmup-stable-decay (WSD, arXiv 2404.06395) with linear decay from `lr` to `min_lr`."""

    def _decayed_lr(self, step: int) -> float:
        return self.lr - (self.lr - self.min_lr) * (step - self.decay_start) / self.decay_steps


@dataclass(frozen=True, slots=True)
class WarmupHoldAnnealOneMinusSquareRoot(WarmupHoldPolicy):
    """Warmup-stable-decay (WSD) with decay 1 - sqrt(elapsed fraction) (arXiv 2408.11029); at least `min_lr`."""

    def _decayed_lr(self, step: int) -> float:
        return max(self.lr * (1 - math.sqrt((step - self.decay_start) / self.decay_steps)), self.min_lr)


@dataclass(frozen=True, slots=True)
class NoamHoldAnnealing(WarmupHoldPolicy):
    """lr * (warmup / (step - hold)) ** decay_rate after warm-up and hold (arXiv 2206.00888); at least `min_lr`."""

    decay_rate: float = 0.5

    def _decayed_lr(self, step: int) -> float:
        peak = max(1.0, self.warmup_steps**self.decay_rate)
        return max(self.lr * peak / max(1.0, (step - self.hold_steps) ** self.decay_rate), self.min_lr)


@dataclass(frozen=True, slots=True)
class NoamAnnealing:
    """lr / sqrt(d_model) * min(step ** -0.5, step * warmup ** -1.5) (arXiv 1706.03762), without an end.

    `lr` is a factor, not the peak; `min_lr` is the lower bound after the warm-up, of 0 or more steps.
    """

    lr: float
    min_lr: float
    warmup_steps: float
    d_model: int

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` completed steps."""
        step = max(1, step)
        rate = step**-0.5
        if self.warmup_steps > 0:
            rate = min(rate, step * self.warmup_steps**-1.5)
        rate *= self.lr * self.d_model**-0.5
        return max(rate, self.min_lr) if step > self.warmup_steps else rate


@dataclass(frozen=True, slots=True)
class T5InverseSquareRootAnnealing:
    """1 / sqrt(max(step, constant_steps)), independent of `lr` (arXiv 1910.10683); `min_lr` after `max_steps`.

    `constant_steps` is at least 1.
    """

    min_lr: float
    max_steps: int
    constant_steps: float

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` completed steps."""
        if step > max(self.constant_steps, self.max_steps):
            return self.min_lr
        return max(step, self.constant_steps) ** -0.5


@dataclass(frozen=True, slots=True)
class RelativeStep:
    """Adafactor's relative step: 1 / sqrt(t) at step t, at most 0.01, or 1e-6 t with warm-up (arXiv 1804.04235)."""

    warmup_init: bool

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` completed steps."""
        return min(1e-6 * (step + 1) if self.warmup_init else 1e-2, (step + 1) ** -0.5)


@dataclass(frozen=True, slots=True)
class OwnSchedule:
    """A schedule of the user's own: `function(step, max_steps=..., lr=..., min_lr=..., **kwargs)`.

    Attributes:
        name: its name, for messages.
        function: returns the learning rate after `step` completed steps; a pure function.
        kwargs: `model.optim.sched.kwargs`.
    """

    name: str
    function: Callable[..., float]
    lr: float
    min_lr: float
    max_steps: int
    kwargs: Mapping[str, Any]

    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` completed steps.

        Raises:
            UserError: it is not a number of at least 0, or the function does not take these arguments.
        """
        at = f"`model.optim.sched.name` ({self.name})"
        try:
            rate = self.function(step, max_steps=self.max_steps, lr=self.lr, min_lr=self.min_lr, **self.kwargs)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"{at}, step {step}: {type(error).__name__}: {error}") from error
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise UserError(f"{at}, step {step}: it must return a learning rate, a number >= 0, not {rate!r}")
        return float(rate)


ScheduleName = Literal[
    "CosineAnnealing",
    "WarmupAnnealing",
    "WarmupPolicy",
    "WarmupHoldPolicy",
    "WarmupHoldAnnealLinear",
    "WarmupHoldAnnealOneMinusSquareRoot",
    "InverseSquareRootAnnealing",
    "T5InverseSquareRootAnnealing",
    "NoamAnnealing",
    "NoamHoldAnnealing",
    "SquareAnnealing",
    "SquareRootAnnealing",
    "PolynomialDecayAnnealing",
    "PolynomialHoldDecayAnnealing",
]
SCHEDULES: Mapping[str, type[Any]] = {name: globals()[name] for name in get_args(ScheduleName)}
"""Schedules by `model.optim.sched.name`."""
