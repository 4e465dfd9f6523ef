"""When to stop before the last step: SIGINT, SIGTERM and `trainer.max_time`. A run stops between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from .errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED

_EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


class StopRequest:
    """A context in which SIGINT and SIGTERM ask the run to stop after its step; a second signal ends it at once.

    Args:
        max_time: `DD:HH:MM:SS` from now on, or None for no limit.
    """

    def __init__(self, max_time: str | None = None) -> None:
        self.signal: signal.Signals | None = None
        self._deadline = None if max_time is None else time.monotonic() + seconds_of(max_time)
        self._max_time = max_time
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
    def reason(self) -> str | None:
        """Why the run should stop now, in words, or None to go on."""
        if self.signal is not None:
            return self.signal.name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"trainer.max_time={self._max_time}"
        return None

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 otherwise."""
        return EXIT_DONE if self.signal is None else _EXIT_CODES[self.signal]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = signal.Signals(number)


def seconds_of(max_time: str) -> int:
    """`DD:HH:MM:SS` in seconds."""
    days, hours, minutes, seconds = (int(part) for part in max_time.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
