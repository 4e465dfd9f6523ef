"""Where time and memory go: a trace of some steps, times of the phases of a run, a record of GPU allocations.

Each observes the steps of one process, counted from 1 where the process starts, and writes below the run directory.
The record of allocations is a pickle, the only form that torch's viewer (https://pytorch.org/memory_viz) takes; torch
writes it, and nothing here reads one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from ..config.schema.root import RootBlock
from ..utils.environment import user_path
from ..utils.errors import UserError

_TOP_OPERATIONS = 10
_NAME_WIDTH = 48
_MAX_ALLOCATIONS = 1_000_000

Say = Callable[[str], None]


class StepObserver(Protocol):
    """Sees the steps of a process go by.

    Attributes:
        aside: seconds it has taken for itself so far, while the device had nothing to do.
    """

    aside: float

    def before(self, number: int) -> None:
        """Step `number` of this process is about to run."""
        ...

    def after(self, number: int) -> None:
        """Step `number` of this process is done; the device may still be at it."""
        ...

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work between two steps: `validation`, `checkpoint` and the like."""
        ...

    def close(self) -> None:
        """The run ends: write what there is."""
        ...


class Observers:
    """Several observers as one, none of which ends a run: one that cannot write is dropped with a warning.

    Args:
        observers: each is called in this order.
        say: takes a line.
    """

    def __init__(self, observers: Sequence[StepObserver], say: Say) -> None:
        self._observers = list(observers)
        self._say = say
        self._aside = 0.0

    @property
    def aside(self) -> float:
        """Seconds that the observers have taken for themselves, such as to write a trace: no part of any step."""
        return self._aside + sum(observer.aside for observer in self._observers)

    def before(self, number: int) -> None:
        """Step `number` of this process is about to run."""
        self._each(lambda observer: observer.before(number))

    def after(self, number: int) -> None:
        """Step `number` of this process is done."""
        self._each(lambda observer: observer.after(number))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work between two steps."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.phase(name))
            yield

    def close(self) -> None:
        """The run ends; a second call does nothing."""
        self._each(lambda observer: observer.close())
        self._aside = self.aside
        self._observers = []

    def _each(self, act: Callable[[StepObserver], None]) -> None:
        for observer in list(self._observers):
            try:
                act(observer)
            except OSError as error:
                self._observers.remove(observer)
                self._aside += observer.aside
                self._say(f"warning: cannot write the profile: {error}; the run goes on without it")


def check_profiling(root: RootBlock, device: torch.device) -> None:
    """Find out whether what is asked for can be had, before anything is built.

    Raises:
        UserError: a record of allocations on a device that is not CUDA.
    """
    if root.model.memory_profile.enabled and device.type != "cuda":
        raise UserError(
            f"`model.memory_profile.enabled` (True) records a CUDA device, but this run is on {device.type}; "
            "use model.memory_profile.enabled=False"
        )


def build_observers(
    root: RootBlock, directory: Path, device: torch.device, say: Say, rank: int = 0, steps_before: int = 0
) -> Observers:
    """The observers of the configuration for one process.

    Args:
        root: `trainer.profiler`, `trainer.profile_steps` and `model.memory_profile`.
        directory: the run directory; profiles go to `profile` in it.
        device: of this process.
        say: takes a line of a table.
        rank: of this process. Times and traces are those of rank 0.
        steps_before: completed steps of the run when this process starts, for the names of files.
    """
    observers: list[StepObserver] = []
    profile, memory = directory / "profile", root.model.memory_profile
    if root.trainer.profiler == "pytorch" and rank == 0:
        first, last = root.trainer.profile_steps
        observers.append(TraceProfiler(profile, first, last, device, say, steps_before))
    elif root.trainer.profiler == "simple" and rank == 0:
        observers.append(PhaseTimes(profile, say))
    if memory.enabled and memory.rank == rank:
        key = "model.memory_profile.output_path"
        place = user_path(memory.output_path, key).absolute() if memory.output_path else profile
        observers.append(MemoryRecorder(place, memory.start_step, memory.end_step, device, say, rank, steps_before))
    return Observers(observers, say)


class _StepRange:
    """Starts before the first step of a range and finishes after its last one, or when the run ends within it."""

    def __init__(self, first: int, last: int, steps_before: int, device: torch.device) -> None:
        self._first, self._last = first, last
        self._steps_before = steps_before
        self._device = device
        self._reached = 0
        self._running = False
        self.aside = 0.0

    def before(self, number: int) -> None:
        """Start, if this is the first step of the range."""
        if number == self._first:
            self._running = True
            with self._aside():
                self.start()

    def after(self, number: int) -> None:
        """Finish, if this was the last step of the range."""
        self._reached = number
        if self._running and number >= self._last:
            self.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Nothing in particular."""
        yield

    def close(self) -> None:
        """Finish, if the range has begun."""
        if self._running:
            self._running = False
            with self._aside():
                self.finish(f"steps-{self._steps_before + self._first}-{self._steps_before + self._reached}")

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Count what happens within as no part of a step, once the device has done the steps before it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.aside += time.perf_counter() - began

    def start(self) -> None:
        raise NotImplementedError

    def finish(self, steps: str) -> None:
        raise NotImplementedError


class TraceProfiler(_StepRange):
    """A trace of some steps for https://ui.perfetto.dev or chrome://tracing, and a table of the costliest operations.

    Args:
        directory: gets `trace-steps-F-L.json.gz` and `operations-steps-F-L.txt`.
        first: first step of this process that is traced.
        last: last one.
        device: whose operations are traced, besides those of the CPU.
        say: takes a line of the table.
        steps_before: steps of the run before those of this process, for the names of files.
    """

    def __init__(
        self, directory: Path, first: int, last: int, device: torch.device, say: Say, steps_before: int = 0
    ) -> None:
        super().__init__(first, last, steps_before, device)
        self._directory = directory
        self._say = say
        self._profile: Any = None

    def start(self) -> None:
        """Begin to trace."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()

    def finish(self, steps: str) -> None:
        """Write trace and table."""
        self._profile.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"trace-{steps}.json.gz"
        self._profile.export_chrome_trace(str(path))
        lines = operations_table(self._profile.key_averages(), on_device=self._device.type == "cuda")
        (self._directory / f"operations-{steps}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._profile = None
        for line in (f"trace {path}", *lines):
            self._say(line)


def operations_table(operations: Sequence[Any], *, on_device: bool, top: int = _TOP_OPERATIONS) -> list[str]:
    """The operations that took most time by themselves, without those that they called.

    Args:
        operations: torch's averages: `key`, `count`, and self times in microseconds.
        on_device: rank by time on the device instead of the CPU.
        top: how many.
    """

    def own_time(operation: Any) -> float:
        return operation.self_device_time_total if on_device else operation.self_cpu_time_total

    total = sum(map(own_time, operations)) or 1.0
    lines = [f"{'operation':<{_NAME_WIDTH}} {'calls':>7} {'ms':>10} {'share':>6}"]
    for operation in sorted(operations, key=own_time, reverse=True)[:top]:
        if own_time(operation) > 0:
            name = operation.key if len(operation.key) <= _NAME_WIDTH else operation.key[: _NAME_WIDTH - 3] + "..."
            took = own_time(operation)
            lines.append(f"{name:<{_NAME_WIDTH}} {operation.count:>7} {took / 1e3:>10.2f} {took / total:>6.1%}")
    return lines


class PhaseTimes:
    """Where the time of the host goes, from the first step to the end of the run.

    Work on a GPU counts where the host waits for it: in the reports, mostly.

    Args:
        directory: gets `times.txt`.
        say: takes a line of the table.
        clock: seconds.
    """

    def __init__(self, directory: Path, say: Say, clock: Callable[[], float] = time.perf_counter) -> None:
        self.aside = 0.0
        self._directory = directory
        self._say = say
        self._clock = clock
        self._start: float | None = None
        self._step_began = 0.0
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def before(self, number: int) -> None:
        """A step begins."""
        self._step_began = self._clock()
        if self._start is None:
            self._start = self._step_began

    def after(self, number: int) -> None:
        """A step ends."""
        self._add("training step", self._clock() - self._step_began)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens within it as `name`."""
        began = self._clock()
        try:
            yield
        finally:
            self._add(name, self._clock() - began)

    def close(self) -> None:
        """Write the table."""
        if self._start is None:
            return
        lines = self.table(self._clock() - self._start)
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / "times.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for line in lines:
            self._say(line)

    def table(self, total: float) -> list[str]:
        """One line for each phase, the longest first; what no phase counts is waiting for data."""
        seconds = {**self._seconds, "waiting for data": max(0.0, total - sum(self._seconds.values()))}
        lines = [f"{'phase':<20} {'times':>8} {'seconds':>10} {'ms each':>10} {'share':>6}"]
        for name, took in sorted(seconds.items(), key=lambda item: -item[1]):
            times = self._counts.get(name, self._counts.get("training step", 0))
            each = took / times * 1e3 if times else 0.0
            lines.append(f"{name:<20} {times:>8} {took:>10.2f} {each:>10.2f} {took / (total or 1.0):>6.1%}")
        return lines

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._counts[name] = self._counts.get(name, 0) + 1


class MemoryRecorder(_StepRange):
    """A record of every allocation on a GPU during some steps (NeMo's `model.memory_profile`).

    Args:
        directory: gets `memory-rank-R-steps-F-L.pickle`, for https://pytorch.org/memory_viz.
        first: first step of this process that is recorded.
        last: last one.
        device: the GPU.
        say: takes a line.
        rank: of this process.
        steps_before: steps of the run before those of this process, for the names of files.
    """

    def __init__(
        self,
        directory: Path,
        first: int,
        last: int,
        device: torch.device,
        say: Say,
        rank: int = 0,
        steps_before: int = 0,
    ) -> None:
        super().__init__(first, last, steps_before, device)
        self._directory = directory
        self._say = say
        self._rank = rank

    def start(self) -> None:
        """Begin to record."""
        torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS, device=self._device)

    def finish(self, steps: str) -> None:
        """Write the record and stop recording."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"memory-rank-{self._rank}-{steps}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
        self._say(f"memory record {path}, for https://pytorch.org/memory_viz")
