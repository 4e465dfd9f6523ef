"""How long the device has nothing to do in the steps of a trace, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.autograd import DeviceType

_LONGEST = 5
_NAME_WIDTH = 44


class DeviceWork(NamedTuple):
    """A kernel or copy on the device: its name, start and end in microseconds."""

    name: str
    start: float
    end: float


def device_work(events: Iterable[Any]) -> list[DeviceWork]:
    """Return the kernels and copies of a profile, on all streams, from the `kineto_results.events()` of torch."""
    return [
        DeviceWork(event.name(), event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3)
        for event in events
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def device_gaps(work: Iterable[DeviceWork], longest: int = _LONGEST) -> list[str]:
    """Format the time in which no stream of the device works, between the first and the last piece of work.

    Args:
        work: kernels and copies.
        longest: number of gaps that are listed, each with what ends before it and begins after it.
    """
    ordered = sorted(work, key=lambda each: each.start)
    if not ordered:
        return []
    last, gaps = ordered[0], list[tuple[float, str, str]]()
    for each in ordered[1:]:
        if each.start > last.end:
            gaps.append((each.start - last.end, last.name, each.name))
        if each.end > last.end:
            last = each
    span, idle = last.end - ordered[0].start, sum(gap for gap, _, _ in gaps)
    lines = [
        f"device: busy {(span - idle) / 1e3:.2f} of {span / 1e3:.2f} ms; idle {idle / 1e3:.2f} ms in {len(gaps):,} gaps"
    ]
    for gap, before, after in sorted(gaps, reverse=True)[:longest]:
        lines.append(f"  {gap / 1e3:.2f} ms between {before[:_NAME_WIDTH]} and {after[:_NAME_WIDTH]}")
    return lines
