"""Metric loggers besides metrics.jsonl: TensorBoard, CSV, Weights & Biases, MLflow.

Each is a `MetricLogger` and a row of `BACKENDS`, constructed from:

    config      the configuration of the run
    directory   the run directory; its metrics.jsonl holds no step after `resumed_at`
    resumed_at  the step the run resumes from; 0 for a new run

Network loggers run in a background thread, so a slow or dead server never blocks a training step. No secret passes
through here: the W&B and MLflow clients read theirs from the environment.

Not Lightning's loggers: on resume its CSV logger deletes the earlier rows, its TensorBoard logger adds a file, and its
MLflow logger joins prefix and metric differently.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..config.run_config import RunConfig
from ..config.schema.exp_manager import ExpManagerBlock, MlflowBlock
from ..utils.durable_files import atomic_write
from ..utils.environment import snapshot, user_path
from ..utils.errors import UserError
from ..utils.redaction import redact, redact_arguments
from ..utils.text import pluralize

_MAX_QUEUED_RECORDS = 4096
_CLOSE_TIMEOUT_SECONDS = 60.0
_RUN_IDS_FILE = "loggers.json"
_RUN_ID = re.compile(r"[\w\-]{1,64}")
_MAX_RUN_IDS_BYTES = 4096


class MetricLogger(Protocol):
    """Interface of a metric logger."""

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Log the metrics of a step; `group` is `train` or `validation`."""
        ...

    def close(self, *, failed: bool) -> None:
        """Flush and close; `failed`: the run ended with an error."""
        ...


def check_loggers(keys: ExpManagerBlock) -> None:
    """Check that the packages of the enabled loggers are installed, before anything is built.

    Raises:
        UserError: a package is missing; the message has the command that installs it.
    """
    for name, backend in _enabled_backends(keys):
        if backend.is_remote and importlib.util.find_spec(name) is None:
            raise UserError(
                f"`exp_manager.create_{name}_logger` needs the package {name}: pip install 'stoker[{name}]', "
                f"or set exp_manager.create_{name}_logger=False"
            )


def open_loggers(config: RunConfig, directory: Path, resumed_at: int) -> dict[str, MetricLogger]:
    """Open the enabled loggers, by their names in messages.

    Raises:
        UserError: a logger cannot start.
    """
    loggers: dict[str, MetricLogger] = {}
    try:
        for _, backend in _enabled_backends(config.root.exp_manager):
            logger = backend.open(config, directory, resumed_at)
            loggers[backend.title] = BackgroundLogger(logger) if backend.is_remote else logger
    except BaseException:
        for logger in loggers.values():
            logger.close(failed=True)
        raise
    return loggers


class TensorBoardLogger:
    """TensorBoard event files; events after the step of a resume are purged, as those steps are logged again."""

    def __init__(self, config: RunConfig, directory: Path, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # lazily: the import takes a second

        settings = config.root.exp_manager.summary_writer_kwargs.model_dump()
        purge_step = resumed_at + 1 if resumed_at else None
        self._writer: Any = SummaryWriter(str(directory / "tensorboard"), purge_step=purge_step, **settings)

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Log one scalar per metric, named `group/metric`."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self, *, failed: bool) -> None:
        """Flush and close."""
        self._writer.close()


class CSVLogger:
    """`metrics.csv`: one row per line of metrics.jsonl, from which it is rewritten; missing metrics are empty cells."""

    def __init__(self, config: RunConfig, directory: Path, resumed_at: int) -> None:
        self._path = directory / "metrics.csv"
        self._rows: list[dict[str, Any]] = []
        records = directory / "metrics.jsonl"
        if records.exists():
            with records.open(encoding="utf-8") as lines:
                self._rows = [json.loads(line) for line in lines]
        self._columns = list(dict.fromkeys(["step", *(name for row in self._rows for name in row)]))
        self._write_all()

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Append a row; a metric not seen before adds a column, so the table is rewritten."""
        row = {"step": step, **metrics, "time": round(time.time(), 3)}
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        self._columns += new
        if new:
            self._write_all()
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def close(self, *, failed: bool) -> None:
        """Do nothing: every row is already written."""

    def _write_all(self) -> None:
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, self._columns)
        writer.writeheader()
        writer.writerows(self._rows)
        atomic_write(self._path, table.getvalue().encode())


class WandbLogger:
    """Weights & Biases; a resumed run continues the W&B run of the process before it, if that used this directory.

    Raises:
        UserError: the client cannot start.
    """

    def __init__(self, config: RunConfig, directory: Path, resumed_at: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        keys = config.root.exp_manager.wandb_logger_kwargs
        run_id = keys.id or (_read_run_id(directory, "wandb") if resumed_at else None) or secrets.token_hex(4)
        save_dir = user_path(keys.save_dir, "exp_manager.wandb_logger_kwargs.save_dir") if keys.save_dir else directory
        try:
            with _redacted_argv():
                self._run: Any = wandb.init(
                    project=keys.project,
                    name=keys.name or directory.name,
                    entity=keys.entity,
                    group=keys.group,
                    job_type=keys.job_type,
                    tags=keys.tags or None,
                    notes=keys.notes,
                    dir=str(save_dir),
                    id=run_id,
                    resume="allow",
                    mode="offline" if keys.offline else None,
                    config=dict(config.document),  # environment variables unresolved
                    # The run prints its own lines; no client output, and no capture of the terminal.
                    settings=wandb.Settings(silent=True, console="off"),
                )
        except Exception as error:
            fix = "export WANDB_API_KEY, or WANDB_MODE=offline to sync later"
            raise _cannot_start("wandb", "W&B", error, fix) from error
        # A step metric of our own: W&B drops rows whose built-in step does not increase, and a resumed run may log
        # steps that an earlier process has already sent.
        self._run.define_metric("trainer/global_step")
        self._run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        _save_run_id(directory, "wandb", run_id)

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Log one row, with metrics named `group/metric`."""
        self._run.log({**{f"{group}/{name}": value for name, value in metrics.items()}, "trainer/global_step": step})

    def close(self, *, failed: bool) -> None:
        """Flush, and set the exit code of the W&B run."""
        self._run.finish(exit_code=int(failed))


class MLflowLogger:
    """MLflow tracking; a resumed run continues the MLflow run of the process before it, if that used this directory.

    Raises:
        UserError: the server or store cannot be used.
    """

    def __init__(self, config: RunConfig, directory: Path, resumed_at: int) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        keys = config.root.exp_manager.mlflow_logger_kwargs
        self._metric: Any = Metric
        self._prefix = keys.prefix
        uri = keys.tracking_uri or snapshot().get("MLFLOW_TRACKING_URI")
        if uri is None:
            folder = directory
            if keys.save_dir:
                folder = user_path(keys.save_dir, "exp_manager.mlflow_logger_kwargs.save_dir").absolute()
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{folder}/mlflow.db"
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
            known = keys.run_id or (_read_run_id(directory, "mlflow") if resumed_at else None)
            if known is not None:
                self._run_id: str = self._client.get_run(known).info.run_id
                self._client.update_run(self._run_id, status="RUNNING")
            else:
                self._run_id = self._create_run(keys, directory, keys.experiment_name or config.root.name)
        except Exception as error:
            fix = f"is there a server or store at {redact(uri)}?"
            raise _cannot_start("mlflow", "MLflow", error, fix) from error
        _save_run_id(directory, "mlflow", self._run_id)

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Log metrics named `group/metric`."""
        now = int(time.time() * 1000)
        entries = [self._metric(f"{self._prefix}{group}/{name}", value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=entries)

    def close(self, *, failed: bool) -> None:
        """Set the status of the MLflow run."""
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")

    def _create_run(self, keys: MlflowBlock, directory: Path, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            location = {"artifact_location": keys.artifact_location} if keys.artifact_location else {}
            experiment_id = self._client.create_experiment(experiment, **location)
        else:
            experiment_id = found.experiment_id
        run = self._client.create_run(
            experiment_id,
            run_name=keys.run_name or directory.name,
            tags={name: str(value) for name, value in keys.tags.items()},
        )
        return run.info.run_id


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


class _Backend(NamedTuple):
    """A kind of logger.

    Attributes:
        title: its name in messages.
        open: the class; see the arguments above.
        is_remote: it sends to a server: in a background thread, with an optional package of the name of its key.
    """

    title: str
    open: Callable[[RunConfig, Path, int], MetricLogger]
    is_remote: bool = False


BACKENDS = {
    "tensorboard": _Backend("TensorBoard", TensorBoardLogger),
    "csv": _Backend("CSV", CSVLogger),
    "wandb": _Backend("W&B", WandbLogger, is_remote=True),
    "mlflow": _Backend("MLflow", MLflowLogger, is_remote=True),
}
"""The loggers of `exp_manager.create_NAME_logger`, by NAME."""


def _enabled_backends(keys: ExpManagerBlock) -> Iterator[tuple[str, _Backend]]:
    return ((name, backend) for name, backend in BACKENDS.items() if getattr(keys, f"create_{name}_logger"))


@contextmanager
def _redacted_argv() -> Iterator[None]:
    """Redact `sys.argv`, which the W&B client records without a setting to turn that off."""
    argv = sys.argv
    sys.argv = redact_arguments(argv)
    try:
        yield
    finally:
        sys.argv = argv


def _cannot_start(package: str, name: str, error: Exception, fix: str) -> UserError:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return UserError(
        f"`exp_manager.create_{package}_logger`: {name} cannot start: {text}; {fix}, or set "
        f"exp_manager.create_{package}_logger=False"
    )


def _read_run_id(directory: Path, package: str) -> str | None:
    """Return the logger's run id that an earlier process saved, or None; validated, as users may edit the file."""
    path = directory / _RUN_IDS_FILE
    try:
        if path.stat().st_size > _MAX_RUN_IDS_BYTES:
            return None
        run_id = json.loads(path.read_text(encoding="utf-8"))[package]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return run_id if isinstance(run_id, str) and _RUN_ID.fullmatch(run_id) else None


def _save_run_id(directory: Path, package: str, run_id: str) -> None:
    known = {name: found for name in ("wandb", "mlflow") if (found := _read_run_id(directory, name))}
    atomic_write(directory / _RUN_IDS_FILE, (json.dumps({**known, package: run_id}, indent=2) + "\n").encode())
