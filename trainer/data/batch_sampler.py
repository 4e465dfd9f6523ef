"""Batch sampling: the samples of each step as a pure function of step, consumed samples and configuration.

A global batch is split into micro batches of fixed size. Rank r of R gets micro batches r, r + R, r + 2R, ..., so
micro batches and the random numbers drawn in them do not depend on the number of ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class BatchSizeRampUp:
    """Global batch size ramp-up by consumed samples (Megatron's `rampup_batch_size`, nemo_semantics 1.3).

    Attributes:
        start: initial global batch size.
        increment: size of each increase.
        samples: consumed samples at which the final size is reached.
        final: final global batch size.
    """

    start: int
    increment: int
    samples: int
    final: int

    def batch_size(self, consumed: int) -> int:
        """Return the global batch size after `consumed` samples."""
        increments = (self.final - self.start) // self.increment
        if consumed >= self.samples or increments == 0:
            return self.final
        return min(self.final, self.start + consumed * increments // self.samples * self.increment)


class BatchSchedule:
    """Global batch size and data position of each step.

    Args:
        global_batch_size: final global batch size.
        first_step: completed steps when this process starts.
        consumed: samples consumed by `first_step`.
        ramp_up: batch size ramp-up; None for a constant size.
    """

    def __init__(
        self, global_batch_size: int, *, first_step: int = 0, consumed: int = 0, ramp_up: BatchSizeRampUp | None = None
    ) -> None:
        self.global_batch_size = global_batch_size
        self.first_step = first_step
        # Runs of steps with equal batch size: (first step, samples consumed before it, size).
        self._phases: list[tuple[int, int, int]] = []
        step = first_step
        while ramp_up is not None and (size := ramp_up.batch_size(consumed)) < global_batch_size:
            if not self._phases or self._phases[-1][2] != size:
                self._phases.append((step, consumed, size))
            step, consumed = step + 1, consumed + size
        self._phases.append((step, consumed, global_batch_size))
        self._starts = [first for first, _, _ in self._phases]

    @property
    def batch_sizes(self) -> list[int]:
        """Global batch sizes from the first step on, in their order."""
        return [size for _, _, size in self._phases]

    def consumed_samples(self, step: int) -> int:
        """Return the samples consumed after `step` steps: the data position of the next step."""
        first, consumed, size = self._phase(step)
        return consumed + (step - first) * size

    def batch_size(self, step: int) -> int:
        """Return the global batch size of the step after `step` completed ones."""
        return self._phase(step)[2]

    def _phase(self, step: int) -> tuple[int, int, int]:
        if step < self.first_step:
            raise ValueError(f"`step` ({step}) must not be before the first step of the plan ({self.first_step})")
        return self._phases[bisect_right(self._starts, step) - 1]


class MicroBatchIndices(NamedTuple):
    """Micro batches of one rank in one step.

    Attributes:
        first_sample: data position of the first sample of the global batch.
        indices: micro batch indices; micro batch j starts at sample first + j * size.
    """

    first_sample: int
    micro_batch_size: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class RankBatchSampler:
    """Batch sampler of one rank: its micro batches of every step.

    Attributes:
        schedule: batch plan of the run.
        micro_batch_size: samples per micro batch.
    """

    schedule: BatchSchedule
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1

    def __iter__(self) -> Iterator[MicroBatchIndices]:
        """Yield the micro batches of this rank for every step, without end."""
        return (self.micro_batches(step) for step in count(self.schedule.first_step))

    def micro_batches(self, step: int) -> MicroBatchIndices:
        """Return the micro batches of this rank in one step."""
        size = self.micro_batch_size
        numbers = range(self.rank, self.schedule.batch_size(step) // size, self.world_size)
        return MicroBatchIndices(self.schedule.consumed_samples(step), size, tuple(numbers))


def parse_ramp_up(keys: Sequence[int] | None, global_batch_size: int) -> BatchSizeRampUp | None:
    """Build a `BatchSizeRampUp` from `model.rampup_batch_size`; None if null or empty."""
    return BatchSizeRampUp(*keys, final=global_batch_size) if keys else None
