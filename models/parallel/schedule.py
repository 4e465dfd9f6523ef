"""Schedules of a pipeline: the order of the passes of each rank, and how long a step takes. Without torch.

With one stage on each rank: GPipe (Huang et al. 2019, arXiv 1811.06965) with fewer micro batches than ranks, otherwise
1F1B (Narayanan et al. 2019, arXiv 1806.03377); with several: interleaved 1F1B (arXiv 2104.04473). The orders are those
of `Schedule1F1B`, `ScheduleGPipe` and `ScheduleInterleaved1F1B` of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

PassKind = Literal["forward", "recompute", "backward"]


class PipelinePass(NamedTuple):
    """Forward or backward pass of a micro batch through a stage."""

    stage: int
    micro_batch: int
    is_backward: bool


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """Pass of a rank, or a part of one, on the clock; a step begins at 0 seconds.

    Attributes:
        stage: number of the stage.
        micro_batch: number of the micro batch in the step.
        kind: what the rank computes.
        start: when it begins, in seconds.
        end: when it ends.
    """

    stage: int
    micro_batch: int
    kind: PassKind
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of the passes of a micro batch through a stage.

    Attributes:
        forward: forward pass.
        backward: backward pass without what it recomputes.
        recompute: what the backward pass recomputes, for each micro batch of a step.
        send: until the input of the next stage has arrived there.
        send_back: until the gradient of its input has arrived at the stage before.
    """

    forward: float
    backward: float
    recompute: tuple[float, ...]
    send: float = 0.0
    send_back: float = 0.0


@lru_cache(maxsize=256)
def pass_order(rank: int, ranks: int, chunks: int, micro_batches: int) -> tuple[PipelinePass, ...]:
    """Return the passes of a rank in a step, in order.

    Args:
        rank: the rank of the pipeline.
        ranks: number of ranks of the pipeline.
        chunks: stages of each rank.
        micro_batches: micro batches of a step.

    Raises:
        ValueError: interleaved stages need micro batches in equal rounds.
    """
    total = chunks * micro_batches
    if chunks == 1:
        round_size = 1
        warm_up = micro_batches if micro_batches < ranks else ranks - rank - 1
    else:
        rounds = max(1, micro_batches // ranks)
        if micro_batches % rounds:
            raise ValueError(f"{micro_batches} micro batches are not a multiple of {rounds} rounds of {ranks} ranks")
        round_size = micro_batches // rounds
        warm_up = min((chunks - 1) * round_size + 2 * (ranks - 1 - rank), total)

    def passes(is_backward: bool) -> Iterator[PipelinePass]:
        for number in range(total):
            done, chunk = divmod(number // round_size, chunks)
            chunk = chunks - 1 - chunk if is_backward else chunk
            yield PipelinePass(chunk * ranks + rank, done * round_size + number % round_size, is_backward)

    forward, backward = list(passes(False)), list(passes(True))
    order = forward[:warm_up]
    for pair in zip(forward[warm_up:], backward, strict=False):
        order += pair
    return (*order, *backward[total - warm_up :])


def most_held(order: Iterable[PipelinePass], sizes: Mapping[int, int]) -> int:
    """Return the most that a rank holds at a time if a micro batch holds `sizes` from its forward pass through a stage,
    of that number, to the backward pass.
    """
    held = most = 0
    for stage, _, is_backward in order:
        held += -sizes[stage] if is_backward else sizes[stage]
        most = max(most, held)
    return most


def stage_in_flight(stage: int, ranks: int, chunks: int, micro_batches: int) -> int:
    """Return the most forward passes of a stage without their backward pass at a time; arguments as in `pass_order`."""
    order = pass_order(stage % ranks, ranks, chunks, micro_batches)
    return most_held((each for each in order if each.stage == stage), {stage: 1})


def bubble_fraction(ranks: int, chunks: int, micro_batches: int) -> float:
    """Return the part of a step in which a rank has nothing to do, if all stages take as long (arXiv 2104.04473)."""
    return (ranks - 1) / (micro_batches * chunks + ranks - 1)


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Simulated step of a pipeline.

    Attributes:
        passes: of each rank: each pass with its start and its end in seconds.
        times: of each stage.
    """

    passes: tuple[tuple[tuple[PipelinePass, float, float], ...], ...]
    times: tuple[StageTimes, ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last rank has ended its last pass."""
        return max(self.ends)

    @property
    def ends(self) -> tuple[float, ...]:
        """Seconds until each rank has ended its last pass."""
        return tuple(passes[-1][2] for passes in self.passes)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank computes."""
        return tuple(sum(end - start for _, start, end in passes) for passes in self.passes)

    @property
    def bubble(self) -> float:
        """Part of the step in which the ranks wait, on average."""
        return 1.0 - sum(self.busy) / len(self.passes) / self.seconds

    def events(self) -> list[PipelineEvent]:
        """Return all passes as events; what a backward pass recomputes is drawn at its beginning."""
        found: list[PipelineEvent] = []
        for (stage, micro, is_backward), start, end in (each for passes in self.passes for each in passes):
            if not is_backward:
                found.append(PipelineEvent(stage, micro, "forward", start, end))
                continue
            middle = start + self.times[stage].recompute[micro]
            if middle > start:
                found.append(PipelineEvent(stage, micro, "recompute", start, middle))
            found.append(PipelineEvent(stage, micro, "backward", middle, end))
        return found


def simulate_step(times: Sequence[StageTimes], ranks: int, micro_batches: int) -> SimulatedStep:
    """Simulate a step: each rank runs its passes in order, each as soon as its input has arrived.

    Messages delay the pass that needs them and nothing else.

    Args:
        times: of all stages, first to last; stage s is on rank s % ranks.
        ranks: number of ranks of the pipeline.
        micro_batches: micro batches of a step.
    """
    last, chunks = len(times) - 1, len(times) // ranks
    orders = [pass_order(rank, ranks, chunks, micro_batches) for rank in range(ranks)]
    # when the input of each pass has arrived, by direction and stage; None: not yet
    arrived: list[list[list[float | None]]] = [[[None] * micro_batches for _ in times] for _ in range(2)]
    arrived[0][0][:] = [0.0] * micro_batches
    clocks, found = [0.0] * ranks, [[] for _ in range(ranks)]
    runnable = list(range(ranks))
    while runnable:
        rank = runnable.pop()
        order, done, clock = orders[rank], found[rank], clocks[rank]
        for each in order[len(done) :]:
            stage, micro, is_backward = each
            at = arrived[is_backward][stage][micro]
            if at is None:
                break
            start, own = max(clock, at), times[stage]
            clock = start + (own.backward + own.recompute[micro] if is_backward else own.forward)
            done.append((each, start, clock))
            if is_backward and stage:
                arrived[1][stage - 1][micro] = clock + own.send_back
                runnable.append((stage - 1) % ranks)
            elif not is_backward and stage < last:
                arrived[0][stage + 1][micro] = clock + own.send
                runnable.append((stage + 1) % ranks)
            elif not is_backward:  # the loss
                arrived[1][stage][micro] = clock
        clocks[rank] = clock
    assert all(len(done) == len(order) for done, order in zip(found, orders, strict=True)), "the schedule is deadlocked"
    return SimulatedStep(tuple(map(tuple, found)), tuple(times))
