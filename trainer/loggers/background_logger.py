"""Interface of a metric logger, and a logger that runs another one in a background thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Protocol

from ..utils.text import pluralize

_MAX_QUEUED_RECORDS = 4096
_CLOSE_TIMEOUT_SECONDS = 60.0


class MetricLogger(Protocol):
    """Interface of a metric logger."""

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Log the metrics of a step; `group` is `train` or `validation`."""
        ...

    def close(self, *, failed: bool) -> None:
        """Flush and close; `failed`: the run ended with an error."""
        ...


class BackgroundLogger:
    """Run another logger in a background thread.

    The first error of the thread is raised once, by the next `log`; records that could not be sent are counted.

    Args:
        logger: the wrapped logger.
        close_timeout: longest time `close` waits for queued records.
    """

    def __init__(self, logger: MetricLogger, close_timeout: float = _CLOSE_TIMEOUT_SECONDS) -> None:
        self._logger = logger
        self._close_timeout = close_timeout
        self._records: queue.Queue[tuple[int, Mapping[str, float], str] | None] = queue.Queue(_MAX_QUEUED_RECORDS)
        self._error: Exception | None = None
        self._raised = False
        self._num_lost = 0
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=type(logger).__name__, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Queue a record; never blocks."""
        try:
            self._records.put_nowait((step, dict(metrics), group))
        except queue.Full:
            self._num_lost += 1
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def close(self, *, failed: bool) -> None:
        """Wait up to `close_timeout` seconds for queued records.

        Raises:
            RuntimeError: records were not sent.
        """
        self._failed = failed
        deadline = time.monotonic() + self._close_timeout
        try:
            self._records.put(None, timeout=self._close_timeout)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        lost = self._num_lost + self._records.qsize()
        if lost or self._error is not None:
            raise RuntimeError(f"{pluralize(lost, 'record')} could not be sent") from self._error
        if self._thread.is_alive():
            raise RuntimeError(f"it has not finished within {self._close_timeout:g} s")

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                self._logger.log(*record)
            except Exception as error:
                self._error = self._error or error
                self._num_lost += 1
        try:
            self._logger.close(failed=self._failed)
        except Exception as error:
            self._error = self._error or error
