"""Learning rates as pure functions of the step, with NeMo's numbers (nemo_semantics 1.7, golden values in Appendix B).

A schedule depends on the configuration alone, never on the state of a trainer, so a resumed run needs none of it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .config.blocks import OptimBlock

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
class WarmupAnnealing:
    """Linear warm-up lr * (step + 1) / (warmup + 1), then a straight line from `lr` to `min_lr` at `max_steps`."""

    lr: float
    min_lr: float
    max_steps: int
    warmup_steps: int

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` completed ones."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        if step > self.max_steps or self.max_steps <= self.warmup_steps:
            return self.min_lr
        remaining = 1 - (step - self.warmup_steps) / (self.max_steps - self.warmup_steps)
        return self.min_lr + remaining * (self.lr - self.min_lr)


def build_schedule(optim: OptimBlock, max_steps: int) -> CosineAnnealing | WarmupAnnealing:
    """The schedule of `model.optim.sched`; `max_steps` (of the trainer) is its length unless `sched.max_steps` is set.

    Ratios are parts of that length, rounded down as in NeMo.
    """
    sched = optim.sched
    length = sched.max_steps or max_steps
    warmup_steps = _steps(sched.warmup_steps, sched.warmup_ratio, length)
    if sched.name == "WarmupAnnealing":
        return WarmupAnnealing(optim.lr, sched.min_lr, length, warmup_steps)
    constant_steps = _steps(sched.constant_steps, sched.constant_ratio, length)
    return CosineAnnealing(optim.lr, sched.min_lr, length, warmup_steps, constant_steps)


def _steps(steps: int | None, ratio: float | None, length: int) -> int:
    if steps is not None:
        return steps
    return int(ratio * length) if ratio is not None else 0
