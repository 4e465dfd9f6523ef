"""Watchdog of a rank: ends it when a training step takes far too long, after writing the stack traces of its threads.

All ranks of a step wait for each other, so if one hangs, all do, and the watchdog of each writes its own file. A rank
that cannot run its watchdog (suspended, or stuck without Python's lock) is ended by the launcher, which sends SIGQUIT
first: the handler is C code that needs no lock.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..distributed.process_group import DistributedContext
from ..utils.owned_files import open_owned

_FACTOR = 10
"""A step is not limited to less than this many times the median of past steps."""
_PAST_STEPS = 101
_POLL_SECONDS = 0.5
_OTHERS_SECONDS = 3.0
"""Time for the other ranks to write their stack traces too, before they lose this one."""
STACKS = "stacks"


class StepTimer:
    """Duration of training steps, without the validations and checkpoints between them.

    Attributes:
        started_at: when the step in progress started; None in the first step of a process, a validation or a save.
        last: seconds of the last step that was measured.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=_PAST_STEPS)
        self.started_at: float | None = None
        self.last = 0.0

    @property
    def median(self) -> float | None:
        """Median seconds of the past steps; None before the second."""
        return statistics.median(tuple(self._durations)) if self._durations else None

    def end_step(self) -> None:
        """End a step and start the next."""
        now = self._clock()
        if self.started_at is not None:
            self.last = now - self.started_at
            self._durations.append(self.last)
        self.started_at = now

    def pause(self) -> None:
        """Stop the clock, for a validation or a checkpoint."""
        self.started_at = None

    def resume(self) -> None:
        """Start the clock again, if it was stopped."""
        if self.started_at is None:
            self.started_at = self._clock()


class Watchdog:
    """Context in which a thread watches the steps of a rank.

    Args:
        timer: its steps.
        timeout: `trainer.step_timeout`; None writes stack traces on SIGQUIT only.
        directory: the run directory.
        ranks: the ranks of the run.
    """

    def __init__(self, timer: StepTimer, timeout: float | None, directory: Path, ranks: DistributedContext) -> None:
        self._timer = timer
        self._timeout = timeout
        self._name = f"{STACKS}/rank-{ranks.rank}.txt"
        self._directory = directory
        self._ranks = ranks
        self._file = -1
        self._closed = threading.Event()

    def __enter__(self) -> Watchdog:
        try:
            self._file = open_owned(self._directory, self._name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError:  # a full disk, for example, which is reported by what must be written
            self._file = os.dup(2)
        if self._ranks.world_size > 1:  # a process alone keeps the meaning of Ctrl-\
            faulthandler.register(signal.SIGQUIT, self._file)
        if self._timeout is not None:
            threading.Thread(target=self._watch, args=(self._timeout,), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop watching, and remove the file if nothing was written."""
        self._closed.set()
        if self._ranks.world_size > 1:
            faulthandler.unregister(signal.SIGQUIT)
        with suppress(OSError):
            if not (self._directory / self._name).stat().st_size:
                (self._directory / self._name).unlink()
                (self._directory / STACKS).rmdir()
        os.close(self._file)

    def _watch(self, timeout: float) -> None:
        """Add up the time that a step takes while this thread runs: not that of a suspended job."""
        step, waited, before = None, 0.0, time.monotonic()
        while not self._closed.wait(_POLL_SECONDS):
            now = time.monotonic()
            elapsed, before = min(now - before, 2 * _POLL_SECONDS), now
            if self._timer.started_at != step:
                step, waited = self._timer.started_at, 0.0
            elif step is not None:
                waited += elapsed
            limit = max(timeout, _FACTOR * (self._timer.median or 0.0)) if waited > timeout else timeout
            if waited > limit:
                self._end(waited, limit)

    def _end(self, waited: float, limit: float) -> None:
        with suppress(OSError):
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            head = f"{when} rank {self._ranks.rank} on {socket.gethostname()}, {waited:.0f} seconds in a step\n"
            os.write(self._file, head.encode())
            faulthandler.dump_traceback(self._file)
        time.sleep(_OTHERS_SECONDS)
        if not self._closed.is_set():
            self._ranks.end_hung(
                f"no step for {waited:.0f} seconds (limit {limit:.0f}, `trainer.step_timeout`); the stack traces are "
                f"in {self._directory / STACKS}"
            )
