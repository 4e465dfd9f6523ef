"""When to stop before the last step: SIGINT, SIGTERM, and the limits on time. A run stops between two steps, and for a
signal between two batches of a validation too, with which the process that goes on then begins.

Signals and clocks differ from process to process, so nothing is decided on them alone: after every step each process
brings what it has seen as flags, `Agree` combines those of all, and every process acts on the same ones.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from enum import IntFlag
from types import FrameType
from typing import Any

from ..utils.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED

_ECHO_SECONDS = 2.0
"""A scheduler sends SIGTERM to every process of a job, and the launcher hands on its own: twice is once then."""
_EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}

Agree = Callable[[int], int]
"""Flags of this process to those of any process; every process calls it at the same points of the run."""


class Flag(IntFlag):
    """What one process sees after a step and all must act on."""

    TERMINATED = 1
    INTERRUPTED = 2
    MAX_TIME = 4
    MAX_TIME_PER_RUN = 8
    SAVE = 16
    """`train_time_interval` has passed."""


SIGNALS = Flag.TERMINATED | Flag.INTERRUPTED
"""Those that leave no time: a validation is broken off for them."""
_SIGNALS = {Flag.TERMINATED: signal.SIGTERM, Flag.INTERRUPTED: signal.SIGINT}
_LIMITS = {Flag.MAX_TIME: "trainer.max_time", Flag.MAX_TIME_PER_RUN: "exp_manager.max_time_per_run"}


def alone(flags: int) -> int:
    """`Agree` of a run of one process."""
    return flags


class StopRequest:
    """A context in which SIGINT and SIGTERM ask the run to stop after its step; a second signal ends it at once.

    Args:
        max_time: `trainer.max_time`, `DD:HH:MM:SS` from now on, or None for no limit.
        max_time_per_run: `exp_manager.max_time_per_run`, likewise.
    """

    def __init__(self, max_time: str | None = None, max_time_per_run: str | None = None) -> None:
        self.signal: signal.Signals | None = None
        self._limits = {
            flag: text
            for flag, text in ((Flag.MAX_TIME, max_time), (Flag.MAX_TIME_PER_RUN, max_time_per_run))
            if text is not None
        }
        self._start = time.monotonic()
        self._signal_at = self._start
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.getsignal(number) for number in _EXIT_CODES}
        self.install()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def install(self) -> None:
        """Set the handlers, again if need be: Lightning replaces them when a fit starts."""
        for number in self._previous:
            signal.signal(number, self._handle)

    @property
    def flags(self) -> Flag:
        """What this process has seen so far."""
        flags = Flag(0)
        for flag, number in _SIGNALS.items():
            if self.signal is number:
                flags |= flag
        passed = time.monotonic() - self._start
        for flag, text in self._limits.items():
            if passed >= seconds_of(text):
                flags |= flag
        return flags

    def adopt(self, flags: int) -> str | None:
        """Act on what the processes agreed on: a signal that another one got counts as ours.

        Returns:
            Why the run should stop now, in words, or None to go on.
        """
        for flag, number in _SIGNALS.items():
            if flags & flag:
                if self.signal is None:
                    self.signal = number
                return number.name
        for flag, key in _LIMITS.items():
            if flags & flag:
                return f"{key}={self._limits.get(flag, 'reached')}"
        return None

    @property
    def reason(self) -> str | None:
        """Why the run should stop now as far as this process knows, in words, or None to go on."""
        return self.adopt(self.flags)

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 otherwise."""
        return EXIT_DONE if self.signal is None else _EXIT_CODES[self.signal]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None:
            if number == self.signal == signal.SIGTERM and now - self._signal_at < _ECHO_SECONDS:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = signal.Signals(number)
        self._signal_at = now


def seconds_of(duration: str) -> int:
    """`DD:HH:MM:SS` in seconds."""
    days, hours, minutes, seconds = (int(part) for part in duration.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
