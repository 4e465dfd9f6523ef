"""Which samples each step trains on: a pure function of the step, the consumed samples and the keys.

A global batch is cut into micro batches of fixed size. Rank r of R takes the micro batches r, r + R, r + 2R, ... so
the micro batches, and the random numbers drawn in them, are the same whatever the number of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RampUp:
    """A global batch that grows with the samples seen (Megatron's `rampup_batch_size`, nemo_semantics 1.3).

    Attributes:
        start: first global batch size.
        increment: added each time.
        samples: consumed samples at which the full size is reached.
        final: the full size.
    """

    start: int
    increment: int
    samples: int
    final: int

    def size(self, consumed: int) -> int:
        """The global batch size after so many consumed samples."""
        increments = (self.final - self.start) // self.increment
        if consumed >= self.samples or increments == 0:
            return self.final
        return min(self.final, self.start + consumed * increments // self.samples * self.increment)


class BatchPlan:
    """Positions in the data of every step from a first one on.

    Args:
        global_batch_size: samples of a step, once it has grown.
        first_step: completed steps where this process begins.
        consumed: samples consumed by then.
        ramp_up: how the size grows; None: it does not.
    """

    def __init__(
        self, global_batch_size: int, *, first_step: int = 0, consumed: int = 0, ramp_up: RampUp | None = None
    ) -> None:
        self.global_batch_size = global_batch_size
        self.first_step = first_step
        # Steps of one size in a row: (first step, samples consumed before it, size).
        self._phases: list[tuple[int, int, int]] = []
        step = first_step
        while ramp_up is not None and (size := ramp_up.size(consumed)) < global_batch_size:
            if not self._phases or self._phases[-1][2] != size:
                self._phases.append((step, consumed, size))
            step, consumed = step + 1, consumed + size
        self._phases.append((step, consumed, global_batch_size))
        self._starts = [first for first, _, _ in self._phases]

    def consumed(self, step: int) -> int:
        """Samples consumed when `step` steps are completed: the position of the next one's first sample."""
        first, consumed, size = self._phase(step)
        return consumed + (step - first) * size

    def size(self, step: int) -> int:
        """Samples of the step that follows `step` completed ones."""
        return self._phase(step)[2]

    def _phase(self, step: int) -> tuple[int, int, int]:
        if step < self.first_step:
            raise ValueError(f"`step` ({step}) must not be before the first step of the plan ({self.first_step})")
        return self._phases[bisect_right(self._starts, step) - 1]


class StepPart(NamedTuple):
    """The micro batches of one step that a rank takes.

    Attributes:
        first: position of the global batch's first sample.
        size: samples of a micro batch.
        numbers: micro batch j begins at sample first + j * size.
    """

    first: int
    size: int
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class RankBatches:
    """The part of the plan that one rank takes: what its loader is asked for.

    Attributes:
        plan: of the run.
        micro_batch_size: samples of a micro batch.
        rank: of this process.
        world_size: processes.
    """

    plan: BatchPlan
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1

    def __iter__(self) -> Iterator[StepPart]:
        """What this rank takes of every step, without end."""
        return (self.part(step) for step in count(self.plan.first_step))

    def part(self, step: int) -> StepPart:
        """What this rank takes of one step."""
        size = self.micro_batch_size
        numbers = range(self.rank, self.plan.size(step) // size, self.world_size)
        return StepPart(self.plan.consumed(step), size, tuple(numbers))


def ramp_up_of(keys: Sequence[int] | None, global_batch_size: int) -> RampUp | None:
    """`model.rampup_batch_size` as a `RampUp`; null or empty: none."""
    return RampUp(*keys, final=global_batch_size) if keys else None
