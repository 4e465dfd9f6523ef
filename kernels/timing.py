"""Times of calls that are compared with each other, measured in turns: of the device on a GPU, else of the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch

HEAD_START_CYCLES = 4_000_000  # about 2 ms, in which the host queues a whole call, so that launches are not timed
SLOW_MS, SLOW_ROUNDS = 250.0, 2  # calls that take longer get fewer rounds
_FLUSHED_BYTES = 256 << 20


class Event(Protocol):
    """A moment that has been recorded."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to another."""
        ...


class HostEvent:
    """A moment of the host's clock."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end_event: HostEvent, /) -> float:
        """Return the milliseconds from this event to another."""
        return 1e3 * (end_event.seconds - self.seconds)


TimedCall = Callable[[], list[Event]]
"""A call that returns the events it has recorded, at least two."""


def record_event(device_type: str = "cuda") -> Event:
    """Record a moment of the device's stream, or of the host without a GPU."""
    if device_type != "cuda":
        return HostEvent()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def in_turns(
    calls: dict[str, TimedCall], rounds: int, round_ms: float, *, head_start: bool = True, device_type: str = "cuda"
) -> dict[str, list[list[float]]]:
    """Time calls in turns, in reversed order every second round, on a GPU with a cold L2 cache.

    Args:
        calls: by contender; each has run once before.
        rounds: number of rounds; a round's figure is the median of its calls.
        round_ms: time per contender and round.
        head_start: let a GPU sleep until the host has queued a call.
        device_type: device of the calls.

    Returns:
        Milliseconds between consecutive events: contender -> list per interval -> list per round.
    """
    on_gpu = device_type == "cuda"
    flush = torch.empty(_FLUSHED_BYTES if on_gpu else 0, dtype=torch.uint8, device=device_type)
    counts, slow = {}, set()
    for name, call in calls.items():
        events = call()
        if on_gpu:
            torch.cuda.synchronize()
        duration = events[0].elapsed_time(events[-1])
        counts[name] = max(3 if duration < SLOW_MS / 4 else 1, min(100, int(round_ms / max(duration, 1e-3))))
        slow |= {name} if duration > SLOW_MS else set()
    results: dict[str, list[list[float]]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else list(calls)[::-1]:
            if name in slow and number >= SLOW_ROUNDS:
                continue
            samples = []
            for _ in range(counts[name]):
                flush.zero_()
                if head_start and on_gpu:
                    torch.cuda._sleep(HEAD_START_CYCLES)
                samples.append(calls[name]())
            if on_gpu:
                torch.cuda.synchronize()
            intervals = [[a.elapsed_time(b) for a, b in pairwise(events)] for events in samples]
            results[name].append([statistics.median(column) for column in zip(*intervals, strict=True)])
    return {name: [list(column) for column in zip(*per_round, strict=True)] for name, per_round in results.items()}
