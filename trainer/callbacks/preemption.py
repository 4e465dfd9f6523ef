"""Graceful stop on signals (Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP) and time limits.

A run stops between two steps, and on a signal also between two validation batches; the resumed run then starts with
that validation. Signals and clocks differ between ranks, so after every step each rank contributes its flags, an
`AllReduceFlags` reduces them, and all ranks act on the result.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from enum import IntFlag
from types import FrameType
from typing import Any

from ..utils.errors import EXIT_IO, EXIT_OK
from ..utils.signals import EXIT_CODES, TERMINATION_SIGNALS, restore_handlers, set_handlers
from ..utils.text import parse_duration

_ECHO_SECONDS = 2.0
"""Deduplicate SIGTERM received from both scheduler and launcher within this time."""
_INSISTENT = (signal.SIGINT, signal.SIGTERM)
"""Signals of which a second one kills the run. The others announce a SIGTERM: with it the run is still saving."""

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
    USER_1 = 32
    USER_2 = 64
    HANGUP = 128
    FAILING = 256
    """The logs cannot be written: the run ends with an error, after it has saved."""
    CALLBACK = 512
    """A callback of the user has set `trainer.should_stop`."""


_FLAGS = {
    "SIGTERM": StopFlag.TERMINATED,
    "SIGUSR1": StopFlag.USER_1,
    "SIGUSR2": StopFlag.USER_2,
    "SIGHUP": StopFlag.HANGUP,
}
_SIGNALS = {StopFlag.INTERRUPTED: signal.SIGINT, **{_FLAGS[number.name]: number for number in TERMINATION_SIGNALS}}
INTERRUPTING_FLAGS = StopFlag(sum(_SIGNALS)) | StopFlag.FAILING
"""Flags that interrupt a validation."""
_LIMITS = {StopFlag.MAX_TIME: "trainer.max_time", StopFlag.MAX_TIME_PER_RUN: "exp_manager.max_time_per_run"}


def local_flags(flags: int) -> int:
    """Return the flags as is: the `AllReduceFlags` of a single process."""
    return flags


class StopHandler:
    """Context manager in which signals stop the run after its step; a second SIGINT or SIGTERM kills it at once.

    Args:
        max_time: `trainer.max_time`, `DD:HH:MM:SS` from now on, or None for no limit.
        max_time_per_run: `exp_manager.max_time_per_run` in the same format.

    Attributes:
        signal: the signal that stops the run, or None.
        is_failing: the run ends with an error, after it has saved its last finished step.
    """

    def __init__(self, max_time: str | None = None, max_time_per_run: str | None = None) -> None:
        self.signal: signal.Signals | None = None
        self.is_failing = False
        self._limits = {
            flag: text
            for flag, text in ((StopFlag.MAX_TIME, max_time), (StopFlag.MAX_TIME_PER_RUN, max_time_per_run))
            if text is not None
        }
        self._start = time.monotonic()
        self._signal_at = self._start
        self._previous: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> StopHandler:
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._previous = set_handlers(self._handle, tuple(EXIT_CODES))
        return self

    def __exit__(self, *exception: object) -> None:
        restore_handlers(self._previous)
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
        if flags & StopFlag.FAILING:
            self.is_failing = True
            return "logs that cannot be written"
        if flags & StopFlag.CALLBACK:
            return "a callback"
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
        """130 after SIGINT, 143 after the others, 0 without a signal; 74 if the logs cannot be written."""
        if self.signal is None:
            return EXIT_IO if self.is_failing else EXIT_OK
        return EXIT_CODES[self.signal]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number not in _INSISTENT:
            if self.signal is None:
                self.signal = signal.Signals(number)
            if signal.Signals(number).name == "SIGHUP":
                self._detach_terminals()
            return
        now = time.monotonic()
        if self.signal in _INSISTENT:
            if number == self.signal == signal.SIGTERM and now - self._signal_at < _ECHO_SECONDS:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = signal.Signals(number)
        self._signal_at = now

    def _detach_terminals(self) -> None:
        """Discard further output: writing to a terminal that was closed is an error."""
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(null, descriptor)
        os.close(null)
