"""Writer of the report of a run: `report.json` while it runs, `report.html` at its end, however it ends.

A report is not worth a run: what cannot be written, or made, is a warning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..report.run_data import RECORD_FILE, read_run
from ..utils.durable_files import atomic_write
from ..utils.errors import UserError
from ..utils.redaction import redact
from ..utils.text import one_line


class RunReport:
    """Writer of the report of a run.

    A context manager: on exit it writes the page, if anything was recorded.

    Args:
        directory: the run directory; None writes nothing.
        log: logs a line.
    """

    def __init__(self, directory: Path | None, log: Callable[[str], None]) -> None:
        self._directory = directory
        self._log = log
        self._warned = False
        self._record: dict[str, Any] = {}

    def keep_earlier(self) -> None:
        """Keep what earlier starts have recorded, besides a failure, until `record_start`."""
        self._try(lambda path: self._add(path, {k: v for k, v in read_run(path).record.items() if k != "failure"}))

    def record_start(self, describe: Callable[[], dict[str, Any]]) -> None:
        """Replace everything recorded by what `describe` returns, and write `report.json`."""
        self._record = {}
        self.record(describe)

    def record(self, describe: Callable[[], dict[str, Any]]) -> None:
        """Add what `describe` returns, and write `report.json`."""
        self._try(lambda directory: self._add(directory, describe()))

    def __enter__(self) -> RunReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._record:
            return
        if error is not None and not isinstance(error, UserError):  # of which the events tell
            failure = f"{type(error).__name__}: {one_line(error)}"[:500]
            self.record(lambda: {"failure": redact(failure)})
        self._try(_write_page)

    def _add(self, directory: Path, fields: dict[str, Any]) -> None:
        self._record |= fields
        atomic_write(directory / RECORD_FILE, (json.dumps(self._record, indent=1) + "\n").encode())

    def _try(self, write: Callable[[Path], None]) -> None:
        if self._directory is None:
            return
        try:
            write(self._directory)
        except Exception as error:
            if not self._warned:
                self._warned = True
                with suppress(UserError, OSError):  # if the log cannot be written either
                    self._log(f"warning: no report: {type(error).__name__}: {one_line(error, 300)}")


def _write_page(directory: Path) -> None:
    from ..report.page import write_report

    write_report(directory)
