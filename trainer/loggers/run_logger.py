"""Run logger: metrics and log lines to metrics.jsonl, run.log, the terminal and the loggers of `logger_backends.py`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..utils.durable_files import atomic_write
from ..utils.errors import EXIT_IO, UserError
from ..utils.owned_files import open_owned, open_to_append
from ..utils.text import one_line, pluralize
from .background_logger import MetricLogger
from .logger_backends import LoggedRun, open_loggers
from .progress_bar import ProgressDisplay
from .step_report import StepReport


class RunLogger:
    """Log metrics and lines of a run to files, terminal and loggers. Active on rank 0; `disabled` on the others.

    A context manager: on exit it closes everything, and the loggers learn if the run failed.

    Attributes:
        failure: the first failed write since `defer_failures`; None without one.

    Args:
        directory: the run directory; None writes nothing (`disabled`).
        progress: the terminal; None prints nothing.
        resumed_at: the step the run resumes from; metrics of later steps are dropped, as those steps are run again.
        drop_validation: also drop the validation metrics of that step.

    Raises:
        UserError: the files cannot be written (exit code 74).
    """

    def __init__(
        self,
        directory: Path | None,
        progress: ProgressDisplay | None,
        *,
        resumed_at: int = 0,
        drop_validation: bool = False,
    ) -> None:
        self._progress = progress
        self._metrics = self._log = None
        self._loggers: dict[str, MetricLogger] = {}
        self._added: dict[str, MetricLogger] = {}
        self._warned: set[str] = set()
        self._defers = False
        self.failure: UserError | None = None
        if directory is None:
            return
        try:
            _drop_lines_after(directory / "metrics.jsonl", resumed_at, drop_validation)
            self._metrics = open_to_append(directory, "metrics.jsonl")
            self._log = open_to_append(directory, "run.log")
        except OSError as error:
            self.close(failed=True)
            raise _cannot_write(error) from error
        except UserError:
            self.close(failed=True)
            raise

    @classmethod
    def open(
        cls,
        run: LoggedRun,
        directory: Path,
        progress: ProgressDisplay,
        *,
        resumed_at: int,
        drop_validation: bool = False,
    ) -> RunLogger:
        """Open the logger of rank 0, with the loggers of the configuration.

        Raises:
            UserError: the files cannot be written (exit code 74), or a logger cannot start.
        """
        logger = cls(directory, progress, resumed_at=resumed_at, drop_validation=drop_validation)
        try:
            logger._loggers = open_loggers(run, directory, resumed_at)
        except OSError as error:
            logger.close(failed=True)
            raise _cannot_write(error) from error
        except BaseException:
            logger.close(failed=True)
            raise
        return logger

    @classmethod
    def disabled(cls) -> RunLogger:
        """Return the disabled logger of every other rank."""
        return cls(None, None)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(failed=kind is not None)

    def defer_failures(self) -> None:
        """From here on keep the first failed write as `failure` instead of raising it, so that a step can be saved."""
        self._defers = True

    def fail(self, error: UserError) -> None:
        """Raise the error of a failed write, or keep it after `defer_failures`."""
        if not self._defers:
            raise error from error.__cause__
        self.failure = self.failure or error

    def log(self, line: str) -> None:
        """Log a line to the terminal and run.log."""
        if self._progress is not None:
            with self._failures():
                self._progress.print(line)
        self.log_to_file(line)

    def log_to_file(self, text: str) -> None:
        """Log text to run.log only."""
        if self._log is None:
            return
        with self._failures():
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._log.flush()

    def log_step(self, report: StepReport) -> None:
        """Log the metrics of a step."""
        self._write(report.step, report.to_metrics(), "train")
        if self._progress is not None:
            with self._failures():
                self.log_to_file(self._progress.show_step(report))

    def log_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a validation: `val_loss` and those measured with it."""
        self._write(step, metrics, "validation")
        if self._progress is not None:
            with self._failures():
                self.log_to_file(self._progress.show_validation(step, metrics))

    def add(self, name: str, logger: MetricLogger) -> None:
        """Log to another logger too."""
        self._added[name] = logger

    def log_values(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics of a user's callback, except to loggers that were added, which have them."""
        self._write(step, metrics, "train", added=False)

    def shorten(self, max_steps: int) -> None:
        """Show and log that the run ends after `max_steps`."""
        if self._progress is not None:
            self._progress.max_steps = max_steps
        self.log_to_file(f"shortened to {pluralize(max_steps, 'step')}, to end in time")

    def close(self, *, failed: bool = False) -> None:
        """Flush and close everything; a second call does nothing.

        Args:
            failed: the run ended with an error.
        """
        if self._progress is not None:
            self._progress.close()
        for name, logger in {**self._loggers, **self._added}.items():
            try:
                logger.close(failed=failed)
            except Exception as error:
                self._warn(name, error, closing=True)
        self._loggers, self._added = {}, {}
        for file in (self._metrics, self._log):
            if file is not None:
                with suppress(OSError):  # a failed write of the buffered rest has been reported before
                    file.close()
        self._metrics = self._log = None

    def _write(self, step: int, metrics: dict[str, float], group: str, *, added: bool = True) -> None:
        if self._metrics is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with self._failures():
            self._metrics.write(json.dumps({"step": step, **finite, "time": round(time.time(), 3)}) + "\n")
            self._metrics.flush()
        for name, logger in (self._loggers | (self._added if added else {})).items():
            try:
                logger.log(step, metrics, group)
            except Exception as error:
                self._warn(name, error)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Context of a write; an OSError in it is a failure of the log."""
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            failure = _cannot_write(error)
            failure.__cause__ = error
            self.fail(failure)

    def _warn(self, name: str, error: Exception, *, closing: bool = False) -> None:
        """Warn once that a logger fails, and keep training."""
        if name in self._warned and not closing:
            return
        self._warned.add(name)
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        text = one_line(f"{type(error).__name__}: {error}{cause}", 300)
        self.log(f"warning: {name} failed; training continues without it: {text}")


def _drop_lines_after(path: Path, step: int, validates_again: bool) -> None:
    """Truncate metrics.jsonl to complete lines of steps up to `step`; the last line of a killed run may be cut off.

    Args:
        path: the metrics.jsonl.
        step: the step the run resumes from.
        validates_again: also drop the validation of that step.
    """
    if not path.exists():
        return
    kept: list[str] = []
    with os.fdopen(open_owned(path.parent, path.name, os.O_RDONLY), encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                document = json.loads(line)
                repeated = validates_again and document["step"] == step and "val_loss" in document
                if line.endswith("\n") and document["step"] <= step and not repeated:
                    kept.append(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
    atomic_write(path, "".join(kept).encode())


def _cannot_write(error: OSError) -> UserError:
    where = f"{error.filename}: " if error.filename else ""  # a failed write, unlike an open, names no file
    return UserError(f"cannot write the run's logs: {where}{error.strerror or error}", EXIT_IO)
