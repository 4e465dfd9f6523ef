"""Graceful stop on SIGINT, SIGTERM and time limits.

A run stops between two steps, and on a signal also between two validation batches; the resumed run then starts with
that validation. Signals and clocks differ between ranks, so after every step each rank contributes its flags, an
`AllReduceFlags` reduces them, and all ranks act on the result.
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

from ..utils.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED
from ..utils.text import parse_duration

_ECHO_SECONDS = 2.0
"""Deduplicate SIGTERM received from both scheduler and launcher within this time."""
_EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}

AllReduceFlags = Callable[[int], int]
"""All-reduce (bitwise or) the flags of all ranks; a collective, called by all ranks at the same points."""


class StopFlag(IntFlag):
    """Stop and save conditions of a rank after a step."""

    TERMINATED = 1
    INTERRUPTED = 2
    MAX_TIME = 4
    MAX_TIME_PER_RUN = 8
    SAVE = 16
    """`train_time_interval` has passed."""


SIGNAL_FLAGS = StopFlag.TERMINATED | StopFlag.INTERRUPTED
"""Flags that interrupt a validation."""
_SIGNALS = {StopFlag.TERMINATED: signal.SIGTERM, StopFlag.INTERRUPTED: signal.SIGINT}
_LIMITS = {StopFlag.MAX_TIME: "trainer.max_time", StopFlag.MAX_TIME_PER_RUN: "exp_manager.max_time_per_run"}


def local_flags(flags: int) -> int:
    """Return the flags as is: the `AllReduceFlags` of a single process."""
    return flags


class StopHandler:
    """Context manager in which SIGINT and SIGTERM stop the run after its step; a second signal kills it at once.

    Args:
        max_time: `trainer.max_time`, `DD:HH:MM:SS` from now on, or None for no limit.
        max_time_per_run: `exp_manager.max_time_per_run` in the same format.
    """

    def __init__(self, max_time: str | None = None, max_time_per_run: str | None = None) -> None:
        self.signal: signal.Signals | None = None
        self._limits = {
            flag: text
            for flag, text in ((StopFlag.MAX_TIME, max_time), (StopFlag.MAX_TIME_PER_RUN, max_time_per_run))
            if text is not None
        }
        self._start = time.monotonic()
        self._signal_at = self._start
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopHandler:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.getsignal(number) for number in _EXIT_CODES}
        self.install_signal_handlers()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def install_signal_handlers(self) -> None:
        """Install the signal handlers; to be called again in a fit, as Lightning replaces them."""
        for number in self._previous:
            signal.signal(number, self._handle)

    @property
    def flags(self) -> StopFlag:
        """The flags of this process."""
        flags = StopFlag(0)
        for flag, number in _SIGNALS.items():
            if self.signal is number:
                flags |= flag
        elapsed = time.monotonic() - self._start
        for flag, text in self._limits.items():
            if elapsed >= parse_duration(text):
                flags |= flag
        return flags

    def apply_flags(self, flags: int) -> str | None:
        """Apply all-reduced flags: a signal received by another rank counts as our own.

        Returns:
            The reason to stop now, or None to continue.
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
        """The reason to stop now by the flags of this process alone, or None to continue."""
        return self.apply_flags(self.flags)

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 otherwise."""
        return EXIT_OK if self.signal is None else _EXIT_CODES[self.signal]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None:
            if number == self.signal == signal.SIGTERM and now - self._signal_at < _ECHO_SECONDS:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = signal.Signals(number)
        self._signal_at = now
