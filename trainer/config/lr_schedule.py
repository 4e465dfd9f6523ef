"""Learning rates as pure functions of the step, with NeMo's numbers (nemo_semantics 1.7, golden values in Appendix B).

A schedule depends on the configuration alone, never on the state of a trainer, so a resumed run needs none of it back.
The attributes of a schedule are the keys of `model.optim.sched` that act for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .schema.optim import OptimBlock

Schedule = Callable[[int], float]
"""Completed optimizer steps (0 for the first step) to the learning rate of the next one."""


@dataclass(frozen=True, slots=True)
class CosineAnnealing:
    """Linear warm-up, then a half cosine from `lr` to `min_lr`.

    Without `constant_steps` the warm-up is lr * (step + 1) / (warmup + 1), so the first step already learns, and the
    cosine ends at `max_steps`. With them (Megatron's form) the warm-up is lr * step / warmup, and the cosine ends
    `constant_steps` earlier; `min_lr` holds from there.

    Attributes:
        lr: peak learning rate.
        min_lr: final learning rate.
        max_steps: length of the schedule, in optimizer steps.
        warmup_steps: steps of warm-up.
        constant_steps: steps at `min_lr` at the end.
    """

    lr: float
    min_lr: float
    max_steps: int
    warmup_steps: int
    constant_steps: int = 0

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` completed ones."""
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

    The schedules below have the same warm-up and end, and something else between the two (`decayed`).

    Attributes:
        lr: peak learning rate.
        min_lr: learning rate after `max_steps`.
        max_steps: length of the schedule, in optimizer steps.
        warmup_steps: steps of warm-up.
    """

    lr: float
    min_lr: float
    max_steps: int
    warmup_steps: int

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` completed ones."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if step > self.max_steps or self.max_steps <= self.start:
            return self.min_lr
        return self.lr if step < self.start else self.decayed(step)

    @property
    def start(self) -> int:
        """The step at which the decay begins."""
        return self.warmup_steps

    @property
    def decay_steps(self) -> int:
        """Steps from there to `max_steps`."""
        return self.max_steps - self.start

    def decayed(self, step: int) -> float:
        """The learning rate between `start` and `max_steps`."""
        return self.lr


@dataclass(frozen=True, slots=True)
class WarmupAnnealing(WarmupPolicy):
    """A straight line from `lr` to `min_lr` at `max_steps`."""

    def decayed(self, step: int) -> float:
        """See the class."""
        return self.min_lr + (1 - (step - self.start) / self.decay_steps) * (self.lr - self.min_lr)


@dataclass(frozen=True, slots=True)
class InverseSquareRootAnnealing(WarmupPolicy):
    """lr / sqrt((step + 1) / (warmup + 1)), with no floor before `max_steps`."""

    def decayed(self, step: int) -> float:
        """See the class."""
        return self.lr / math.sqrt((step + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True, slots=True)
class SquareAnnealing(WarmupPolicy):
    """lr times the square of the part of the decay that is left; at least `min_lr`."""

    def decayed(self, step: int) -> float:
        """See the class."""
        return max(self.lr * ((self.max_steps - step) / self.decay_steps) ** 2, self.min_lr)


@dataclass(frozen=True, slots=True)
class SquareRootAnnealing(WarmupPolicy):
    """lr times the root of the part of all steps, warm-up included, that is left; at least `min_lr`."""

    def decayed(self, step: int) -> float:
        """See the class."""
        return max(self.lr * math.sqrt((self.max_steps - step) / self.max_steps), self.min_lr)


@dataclass(frozen=True, slots=True)
class PolynomialDecayAnnealing(WarmupPolicy):
    """From `lr` to `min_lr` with the part of the decay that is left, to the power `power`."""

    power: float = 1.0

    def decayed(self, step: int) -> float:
        """See the class."""
        left = (self.max_steps - step) / self.decay_steps
        return self.min_lr + (self.lr - self.min_lr) * left**self.power


@dataclass(frozen=True, slots=True)
class WarmupHoldPolicy(WarmupPolicy):
    """Warm-up, then `lr` for `hold_steps` and, in this class, on to `max_steps`; the classes below decay after it.

    Without `hold_steps` the decay begins after the warm-up, as it does in NeMo with `hold_steps: 0`; with a null
    NeMo's polynomial and linear forms forget the warm-up and jump.
    """

    hold_steps: int = 0

    @property
    def start(self) -> int:
        """The step at which the decay begins."""
        return self.warmup_steps + self.hold_steps


@dataclass(frozen=True, slots=True)
class PolynomialHoldDecayAnnealing(WarmupHoldPolicy):
    """From `lr` to `min_lr` with the part of the decay that is left, to the power `power`."""

    power: float = 1.0

    def decayed(self, step: int) -> float:
        """See the class."""
        left = (self.max_steps - step) / self.decay_steps
        return self.min_lr + (self.lr - self.min_lr) * left**self.power


@dataclass(frozen=True, slots=True)
class WarmupHoldAnnealLinear(WarmupHoldPolicy):
    """Warm-up, stable, decay (arXiv 2404.06395): a straight line from `lr` to `min_lr` at the end."""

    def decayed(self, step: int) -> float:
        """See the class."""
        return self.lr - (self.lr - self.min_lr) * (step - self.start) / self.decay_steps


@dataclass(frozen=True, slots=True)
class WarmupHoldAnnealOneMinusSquareRoot(WarmupHoldPolicy):
    """Warm-up, stable, decay as 1 - sqrt(part of the decay that is over) (arXiv 2408.11029); at least `min_lr`."""

    def decayed(self, step: int) -> float:
        """See the class."""
        return max(self.lr * (1 - math.sqrt((step - self.start) / self.decay_steps)), self.min_lr)


@dataclass(frozen=True, slots=True)
class NoamHoldAnnealing(WarmupHoldPolicy):
    """lr * (warmup / (step - hold)) ** decay_rate after warm-up and hold (arXiv 2206.00888); at least `min_lr`."""

    decay_rate: float = 0.5

    def decayed(self, step: int) -> float:
        """See the class."""
        peak = max(1.0, self.warmup_steps**self.decay_rate)
        return max(self.lr * peak / max(1.0, (step - self.hold_steps) ** self.decay_rate), self.min_lr)


@dataclass(frozen=True, slots=True)
class NoamAnnealing:
    """lr / sqrt(d_model) * min(step ** -0.5, step * warmup ** -1.5) (arXiv 1706.03762), without an end.

    Attributes:
        lr: factor of it all, not the peak.
        min_lr: floor after the warm-up.
        warmup_steps: step of the peak; 0: it only falls.
        d_model: width of the model.
    """

    lr: float
    min_lr: float
    warmup_steps: int
    d_model: int

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` completed ones."""
        step = max(1, step)
        rate = step**-0.5
        if self.warmup_steps > 0:
            rate = min(rate, step * self.warmup_steps**-1.5)
        rate *= self.lr * self.d_model**-0.5
        return max(rate, self.min_lr) if step > self.warmup_steps else rate


@dataclass(frozen=True, slots=True)
class T5InverseSquareRootAnnealing:
    """1 / sqrt(max(step, constant_steps)), whatever the learning rate (arXiv 1910.10683); `min_lr` after `max_steps`.

    Attributes:
        min_lr: learning rate after `max_steps`.
        max_steps: length of the schedule, in optimizer steps.
        constant_steps: steps at the peak, 1 / sqrt(constant_steps); at least 1.
    """

    min_lr: float
    max_steps: int
    constant_steps: int

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` completed ones."""
        if step > max(self.constant_steps, self.max_steps):
            return self.min_lr
        return max(step, self.constant_steps) ** -0.5


@dataclass(frozen=True, slots=True)
class RelativeStep:
    """Adafactor's own: 1 / sqrt(t) of the t-th step, at most 0.01, or 1e-6 t while warming up (arXiv 1804.04235)."""

    warmup_init: bool

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` completed ones."""
        return min(1e-6 * (step + 1) if self.warmup_init else 1e-2, (step + 1) ** -0.5)


SCHEDULES: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        CosineAnnealing,
        WarmupAnnealing,
        WarmupPolicy,
        WarmupHoldPolicy,
        WarmupHoldAnnealLinear,
        WarmupHoldAnnealOneMinusSquareRoot,
        InverseSquareRootAnnealing,
        T5InverseSquareRootAnnealing,
        NoamAnnealing,
        NoamHoldAnnealing,
        SquareAnnealing,
        SquareRootAnnealing,
        PolynomialDecayAnnealing,
        PolynomialHoldDecayAnnealing,
    )
}
"""The schedules by `model.optim.sched.name`."""


def build_schedule(optim: OptimBlock, max_steps: int) -> Any:
    """The schedule of `model.optim.sched`; `max_steps` (of the trainer) is its length unless `sched.max_steps` is set.

    Ratios are parts of that length, rounded down as in NeMo. Adafactor's `relative_step` is a schedule of its own.
    """
    if optim.name == "adafactor" and optim.relative_step:
        return RelativeStep(optim.warmup_init)
    sched = optim.sched
    length = sched.max_steps or max_steps
    values = {
        "lr": optim.lr,
        "min_lr": sched.min_lr,
        "max_steps": length,
        "warmup_steps": steps_of(sched.warmup_steps, sched.warmup_ratio, length),
        "constant_steps": steps_of(sched.constant_steps, sched.constant_ratio, length),
        "hold_steps": steps_of(sched.hold_steps, sched.hold_ratio, length),
        "power": sched.power,
        "decay_rate": sched.decay_rate,
        "d_model": sched.d_model,
    }
    kind = SCHEDULES[sched.name]
    return kind(**{field.name: values[field.name] for field in fields(kind)})


def steps_of(steps: int | None, ratio: float | None, length: int) -> int:
    """A number of steps that is given as such, or as a part of `length`, or not at all."""
    if steps is not None:
        return steps
    return int(ratio * length) if ratio is not None else 0
