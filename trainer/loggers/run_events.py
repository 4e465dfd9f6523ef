"""events.jsonl: the events of a run's life, a line each, over all its starts. Does not import torch.

Rank 0 writes what happens to the run, and the agent of a node what happens to its processes. A line is written at once,
so a run that is killed keeps what it has written; a line that was cut off is skipped by `read_events`.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..utils.errors import UserError
from ..utils.owned_files import open_owned

EVENTS_FILE = "events.jsonl"


class RunEvents:
    """Writer of the events of a run.

    Args:
        directory: the run directory; None, or one that does not exist, writes nothing.

    Attributes:
        has_started: `start` was written.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._unwritten = b""
        self.has_started = False

    def write(self, event: str, **values: Any) -> None:
        """Append an event with its values and the time."""
        self.has_started |= event == "start"
        self._unwritten += json.dumps({"time": round(time.time(), 3), "event": event, **values}).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write events that could not be written, as on a full disk, where they are not worth ending a run for."""
        if self._directory is None or not self._directory.is_dir():
            self._unwritten = b""
        elif self._unwritten:
            with suppress(OSError, UserError):  # a planted link is refused when the run directory is opened
                file = open_owned(self._directory, EVENTS_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND)
                try:
                    if (size := os.fstat(file).st_size) and os.pread(file, 1, size - 1) != b"\n":
                        self._unwritten = b"\n" + self._unwritten  # the last one was cut off
                    self._unwritten = self._unwritten[os.write(file, self._unwritten) :]
                finally:
                    os.close(file)


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Return the complete events of a run, by time."""
    events: list[dict[str, Any]] = []
    with suppress(OSError, UserError):
        file = open_owned(directory, EVENTS_FILE, os.O_RDONLY)
        with os.fdopen(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with suppress(ValueError, RecursionError):
                    if isinstance(event := json.loads(line), dict) and isinstance(event.get("time"), (int, float)):
                        events.append(event)
    return sorted(events, key=lambda event: event["time"])
