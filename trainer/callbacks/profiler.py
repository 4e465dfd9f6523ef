"""Profilers: a torch.profiler trace of some steps, host time per phase, a CUDA memory snapshot.

Each profiles the steps of one process, copied from 1 at the start of the process, and writes to the run directory. The
memory snapshot is a pickle, the only format that https://pytorch.org/memory_viz reads; torch writes it, and stoker
never reads one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..config.schema.trainer_and_data import MemoryProfileBlock, TrainerBlock
from ..utils.durable_files import atomic_write, replaced_file
from ..utils.environment import user_path
from ..utils.errors import UserError
from .device_gaps import device_gaps, device_work

_TOP_OPERATIONS = 10
_NAME_WIDTH = 48
_MAX_ALLOCATIONS = 1_000_000

LogFunction = Callable[[str], None]


class Profiler:
    """Interface of a profiler, which does nothing.

    Attributes:
        overhead_seconds: total profiling overhead in seconds, such as writing a trace, to be excluded from step times.
    """

    overhead_seconds = 0.0

    def on_step_start(self, step: int) -> None:
        """Called before step `number` of this process."""

    def on_step_end(self, step: int) -> None:
        """Called after step `number` of this process has been launched; the device may still run it."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context of work between two steps: `validation`, `checkpoint` and the like."""
        yield

    def close(self) -> None:
        """Called at the end of the run; writes the results."""


class ProfilerList:
    """A list of profilers; one that cannot write its files is dropped with a warning, and the run continues.

    Args:
        profilers: the profilers, in the order in which they are called.
        log: logs a line.
    """

    def __init__(self, profilers: Sequence[Profiler], log: LogFunction) -> None:
        self._profilers = list(profilers)
        self._log = log
        self._past_overhead = 0.0

    def add(self, profiler: Profiler) -> None:
        """Add a profiler, which is called after the others."""
        self._profilers.append(profiler)

    @property
    def overhead_seconds(self) -> float:
        """Total profiling overhead in seconds, to be excluded from step times."""
        return self._past_overhead + sum(profiler.overhead_seconds for profiler in self._profilers)

    def on_step_start(self, step: int) -> None:
        """Call before step `number` of this process."""
        self._each(lambda profiler: profiler.on_step_start(step))

    def on_step_end(self, step: int) -> None:
        """Call after step `number` of this process."""
        self._each(lambda profiler: profiler.on_step_end(step))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context of work between two steps."""
        with ExitStack() as stack:
            for profiler in self._profilers:
                stack.enter_context(profiler.phase(name))
            yield

    def close(self) -> None:
        """Close all profilers; a second call does nothing."""
        self._each(lambda profiler: profiler.close())
        self._past_overhead = self.overhead_seconds
        self._profilers = []

    def _each(self, call: Callable[[Profiler], None]) -> None:
        for profiler in list(self._profilers):
            try:
                call(profiler)
            except (OSError, UserError) as error:
                self._profilers.remove(profiler)
                self._past_overhead += profiler.overhead_seconds
                self._log(f"warning: cannot write the profile: {error}; the run continues without it")


def check_profiling(keys: MemoryProfileBlock, device: torch.device) -> None:
    """Check the profiling keys, before anything is built.

    Raises:
        UserError: a memory snapshot on a device other than CUDA.
    """
    if keys.enabled and device.type != "cuda":
        raise UserError(
            f"`model.memory_profile.enabled` (True) needs a CUDA device, but this run is on {device.type}; "
            "use model.memory_profile.enabled=False"
        )


def build_profilers(
    keys: TrainerBlock,
    memory: MemoryProfileBlock,
    directory: Path,
    device: torch.device,
    log: LogFunction,
    rank: int = 0,
    steps_before: int = 0,
) -> ProfilerList:
    """Build the enabled profilers of one process.

    Profiles go to the subdirectory `profile` of the run directory. Times and traces are those of rank 0.
    `steps_before` are the completed steps of the run when this process starts, for file names.
    """
    profilers: list[Profiler] = []
    profile = directory / "profile"
    if keys.profiler == "pytorch" and rank == 0:
        first, last = keys.profile_steps
        profilers.append(TraceProfiler(profile, first, last, device, log, steps_before))
    elif keys.profiler == "simple" and rank == 0:
        profilers.append(PhaseTimer(profile, log))
    if memory.enabled and memory.rank == rank:
        key = "model.memory_profile.output_path"
        place = user_path(memory.output_path, key).absolute() if memory.output_path else profile
        profilers.append(
            MemorySnapshotRecorder(place, memory.start_step, memory.end_step, device, log, steps_before, rank)
        )
    return ProfilerList(profilers, log)


@dataclass(eq=False)
class _StepRange(Profiler):
    """Profiler of a range of steps: starts before the first and finishes after the last, or at the end of the run.

    Phases between steps are part of the range.

    Attributes:
        directory: output directory.
        first: first profiled step of this process.
        last: last profiled step of this process.
        device: device to profile besides the CPU.
        log: logs a line.
        steps_before: completed steps of the run when this process starts, for file names.
    """

    directory: Path
    first: int
    last: int
    device: torch.device
    log: LogFunction
    steps_before: int = 0
    _current: int = field(default=0, init=False)
    _running: bool = field(default=False, init=False)

    def on_step_start(self, step: int) -> None:
        """Start at the first step of the range."""
        if step == self.first:
            self._running = True
            with self._measured_overhead():
                self.start()

    def on_step_end(self, step: int) -> None:
        """Finish after the last step of the range."""
        self._current = step
        if self._running and step >= self.last:
            self.close()

    def close(self) -> None:
        """Finish if running."""
        if self._running:
            self._running = False
            with self._measured_overhead():
                self.finish(f"steps-{self.steps_before + self.first}-{self.steps_before + self._current}")

    @contextmanager
    def _measured_overhead(self) -> Iterator[None]:
        """Measure the overhead of the code within, after synchronizing the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.overhead_seconds += time.perf_counter() - start

    def start(self) -> None:
        raise NotImplementedError

    def finish(self, steps: str) -> None:
        raise NotImplementedError


class TraceProfiler(_StepRange):
    """torch.profiler trace of some steps for https://ui.perfetto.dev or chrome://tracing, and a table of operations.

    Writes `trace-steps-F-L.json.gz` and `operations-steps-F-L.txt`, the table and the longest gaps between kernels, and
    logs the latter.
    """

    _profile: Any = None

    def start(self) -> None:
        """Start tracing."""
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()

    def finish(self, steps: str) -> None:
        """Stop tracing and write trace and table."""
        self._profile.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"trace-{steps}.json.gz"
        with replaced_file(path) as temporary:
            self._profile.export_chrome_trace(str(temporary))
        lines = operations_table(self._profile.key_averages(), on_device=self.device.type == "cuda")
        if self.device.type == "cuda":
            lines += device_gaps(device_work(self._profile.profiler.kineto_results.events()))
        atomic_write(self.directory / f"operations-{steps}.txt", ("\n".join(lines) + "\n").encode())
        self._profile = None
        for line in (f"trace {path}", *lines):
            self.log(line)


def operations_table(operations: Sequence[Any], *, on_device: bool, top: int = _TOP_OPERATIONS) -> list[str]:
    """Format the operations with the longest self time (children excluded).

    Args:
        operations: `profile.key_averages()`: `key`, `count`, and self times in microseconds.
        on_device: sort by device time instead of CPU time.
        top: number of operations.
    """

    def self_time(operation: Any) -> float:
        return operation.self_device_time_total if on_device else operation.self_cpu_time_total

    total = sum(map(self_time, operations)) or 1.0
    lines = [f"{'operation':<{_NAME_WIDTH}} {'calls':>7} {'ms':>10} {'share':>6}"]
    for operation in sorted(operations, key=self_time, reverse=True)[:top]:
        if self_time(operation) > 0:
            name = operation.key if len(operation.key) <= _NAME_WIDTH else operation.key[: _NAME_WIDTH - 3] + "..."
            time_us = self_time(operation)
            lines.append(f"{name:<{_NAME_WIDTH}} {operation.count:>7} {time_us / 1e3:>10.2f} {time_us / total:>6.1%}")
    return lines


class PhaseTimer(Profiler):
    """Host time per phase, from the first step to the end of the run.

    GPU work counts in the phase in which the host synchronizes, mostly the reports.

    Args:
        directory: output directory of `times.txt`.
        log: logs a line of the table.
        clock: returns the time in seconds.
    """

    def __init__(self, directory: Path, log: LogFunction, clock: Callable[[], float] = time.perf_counter) -> None:
        self._directory = directory
        self._log = log
        self._clock = clock
        self._start: float | None = None
        self._step_start = 0.0
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def on_step_start(self, step: int) -> None:
        """Start the time of a step."""
        self._step_start = self._clock()
        if self._start is None:
            self._start = self._step_start

    def on_step_end(self, step: int) -> None:
        """Add the time of a step."""
        self._add("training step", self._clock() - self._step_start)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the code within to phase `name`."""
        start = self._clock()
        try:
            yield
        finally:
            self._add(name, self._clock() - start)

    def close(self) -> None:
        """Write the table."""
        if self._start is None:
            return
        lines = self.table(self._clock() - self._start)
        self._directory.mkdir(parents=True, exist_ok=True)
        atomic_write(self._directory / "times.txt", ("\n".join(lines) + "\n").encode())
        for line in lines:
            self._log(line)

    def table(self, total: float) -> list[str]:
        """Format one line per phase, the longest first; the rest of `total` seconds is waiting for data."""
        seconds = {**self._seconds, "waiting for data": max(0.0, total - sum(self._seconds.values()))}
        lines = [f"{'phase':<20} {'times':>8} {'seconds':>10} {'ms each':>10} {'share':>6}"]
        for name, time_s in sorted(seconds.items(), key=lambda item: -item[1]):
            times = self._counts.get(name, self._counts.get("training step", 0))
            each = time_s / times * 1e3 if times else 0.0
            lines.append(f"{name:<20} {times:>8} {time_s:>10.2f} {each:>10.2f} {time_s / (total or 1.0):>6.1%}")
        return lines

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._counts[name] = self._counts.get(name, 0) + 1


@dataclass(eq=False)
class MemorySnapshotRecorder(_StepRange):
    """CUDA memory snapshot of all allocations during some steps (NeMo's `model.memory_profile`).

    Writes `memory-rank-R-steps-F-L.pickle`, for https://pytorch.org/memory_viz; `rank` is that of this process.
    """

    rank: int = 0

    def start(self) -> None:
        """Start recording."""
        torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS, device=self.device)

    def finish(self, steps: str) -> None:
        """Write the snapshot and stop recording."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self.directory / f"memory-rank-{self.rank}-{steps}.pickle"
            with replaced_file(path) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None, device=self.device)
        self.log(f"memory record {path}, for https://pytorch.org/memory_viz")
