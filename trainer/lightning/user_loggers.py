"""Lightning loggers of users' own: they get the metrics of a run, and what callbacks log with `self.log`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...models.config.extensions import load_extension
from ..utils.errors import UserError
from .lightning_imports import Logger


def build_loggers(names: Sequence[str], given: Sequence[Logger]) -> list[Logger]:
    """Return the loggers registered under the names of `exp_manager.loggers`, and those given.

    Raises:
        UserError: one cannot be built, or is no logger of Lightning's; lists every reason.
    """
    problems: list[str] = []
    loggers: list[Any] = []
    for name in names:
        try:
            loggers.append(load_extension("logger", name)())
        except (LookupError, ValueError, TypeError) as error:
            problems.append(f"`exp_manager.loggers` ({name}): {error}")
    loggers += given
    problems += [
        f"{type(logger).__name__} is not a logger; derive it from pytorch_lightning.loggers.Logger"
        for logger in loggers
        if not isinstance(logger, Logger)
    ]
    if problems:
        raise UserError(problems)
    return loggers


class UserLogger:
    """`MetricLogger` of a logger of Lightning's; metrics are named as in metrics.jsonl."""

    def __init__(self, logger: Logger, document: Mapping[str, Any]) -> None:
        self._logger = logger
        logger.log_hyperparams(dict(document))

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Log the metrics of a step."""
        self._logger.log_metrics(dict(metrics), step)

    def close(self, *, failed: bool) -> None:
        """Save and finalize."""
        self._logger.save()
        self._logger.finalize("failed" if failed else "success")


class RunMetricsLogger(Logger):
    """Logger of a `pl.Trainer` that writes what callbacks log to metrics.jsonl and the loggers of the configuration.

    Args:
        write: called with a step and its metrics.
        directory: the run directory.
    """

    def __init__(self, write: Callable[[int, dict[str, float]], None], directory: str) -> None:
        super().__init__()
        self._write = write
        self._directory = directory

    @property
    def name(self) -> str:
        """Name in paths, which nothing is written to."""
        return "run"

    @property
    def version(self) -> str:
        """Version in paths, which nothing is written to."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run directory."""
        return self._directory

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write metrics of a step, which Lightning counts from 0; it adds the epoch, which is always 0."""
        found = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        if found and step is not None:
            self._write(step + 1, found)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.resolved.json holds the configuration."""
