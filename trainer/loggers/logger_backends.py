"""Metric loggers besides metrics.jsonl: TensorBoard, CSV, Weights & Biases, MLflow.

Each is a `MetricLogger`. Network loggers run in a background thread, so a slow or dead server never blocks a training
step. No secret passes through here: the W&B and MLflow clients read theirs from the environment.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ..config.run_config import RunConfig
from ..config.schema.exp_manager import ExpManagerBlock, MlflowBlock, SummaryWriterBlock, WandbBlock
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
    for name, wanted in (("wandb", keys.create_wandb_logger), ("mlflow", keys.create_mlflow_logger)):
        if wanted and importlib.util.find_spec(name) is None:
            raise UserError(
                f"`exp_manager.create_{name}_logger` needs the package {name}: pip install 'stoker[{name}]', "
                f"or set exp_manager.create_{name}_logger=False"
            )


def open_loggers(config: RunConfig, directory: Path, resumed_at: int) -> dict[str, MetricLogger]:
    """Open the enabled loggers, by name.

    Args:
        config: configuration of the run.
        directory: the run directory; its metrics.jsonl holds no step after `resumed_at`.
        resumed_at: the step the run resumes from; 0 for a new run.

    Raises:
        UserError: a logger cannot start.
    """
    keys = config.root.exp_manager
    sinks: dict[str, MetricLogger] = {}
    try:
        if keys.create_tensorboard_logger:
            sinks["TensorBoard"] = TensorBoardLogger(directory / "tensorboard", keys.summary_writer_kwargs, resumed_at)
        if keys.create_csv_logger:
            sinks["CSV"] = CSVLogger(directory / "metrics.csv", directory / "metrics.jsonl")
        if keys.create_wandb_logger:
            wandb = WandbLogger(keys.wandb_logger_kwargs, directory, config.document, resume=resumed_at > 0)
            sinks["W&B"] = BackgroundLogger(wandb)
        if keys.create_mlflow_logger:
            mlflow = MLflowLogger(keys.mlflow_logger_kwargs, directory, config.root.name, resume=resumed_at > 0)
            sinks["MLflow"] = BackgroundLogger(mlflow)
    except BaseException:
        for sink in sinks.values():
            sink.close(failed=True)
        raise
    return sinks


class TensorBoardLogger:
    """TensorBoard event files.

    Args:
        directory: directory of the event files.
        keys: settings of the writer.
        resumed_at: events of later steps are purged; the resumed run logs those steps again.
    """

    def __init__(self, directory: Path, keys: SummaryWriterBlock, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # lazily: the import takes a second

        self._writer: Any = SummaryWriter(
            str(directory), purge_step=resumed_at + 1 if resumed_at else None, **keys.model_dump()
        )

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Log one scalar per metric, named `group/metric`."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self, *, failed: bool) -> None:
        """Flush and close."""
        self._writer.close()


class CSVLogger:
    """CSV table with one row per line of metrics.jsonl; missing metrics are empty cells.

    Args:
        path: the CSV file; rewritten from `records`.
        records: the run's metrics.jsonl so far.
    """

    def __init__(self, path: Path, records: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
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
    """Weights & Biases.

    Args:
        keys: settings.
        directory: the run directory.
        document: the configuration, environment variables unresolved.
        resume: continue the W&B run that an earlier process of this run directory started.

    Raises:
        UserError: the client cannot start.
    """

    def __init__(self, keys: WandbBlock, directory: Path, document: Mapping[str, Any], *, resume: bool) -> None:
        wandb: Any = importlib.import_module("wandb")
        run_id = keys.id or (_read_run_id(directory, "wandb") if resume else None) or secrets.token_hex(4)
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
                    config=dict(document),
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
    """MLflow tracking.

    Args:
        keys: settings.
        directory: the run directory.
        name: name of the run; the default experiment name.
        resume: continue the MLflow run that an earlier process of this run directory started.

    Raises:
        UserError: the server or store cannot be used.
    """

    def __init__(self, keys: MlflowBlock, directory: Path, name: str, *, resume: bool) -> None:
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        self._prefix = keys.prefix
        uri = keys.tracking_uri or snapshot().get("MLFLOW_TRACKING_URI")
        if uri is None:
            folder = directory
            if keys.save_dir:
                folder = user_path(keys.save_dir, "exp_manager.mlflow_logger_kwargs.save_dir").absolute()
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{folder}/mlflow.db"
        try:
            self._client: Any = tracking.MlflowClient(tracking_uri=uri)
            known = keys.run_id or (_read_run_id(directory, "mlflow") if resume else None)
            if known is not None:
                self._run_id: str = self._client.get_run(known).info.run_id
                self._client.update_run(self._run_id, status="RUNNING")
            else:
                self._run_id = self._create_run(keys, directory, keys.experiment_name or name)
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
        self._sink = logger
        self._seconds = close_timeout
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
        deadline = time.monotonic() + self._seconds
        try:
            self._records.put(None, timeout=self._seconds)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        lost = self._num_lost + self._records.qsize()
        if lost or self._error is not None:
            raise RuntimeError(f"{pluralize(lost, 'record')} could not be sent") from self._error
        if self._thread.is_alive():
            raise RuntimeError(f"it has not finished within {self._seconds:g} s")

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                self._sink.log(*record)
            except Exception as error:
                self._error = self._error or error
                self._num_lost += 1
        try:
            self._sink.close(failed=self._failed)
        except Exception as error:
            self._error = self._error or error


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
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return run_id if isinstance(run_id, str) and _RUN_ID.fullmatch(run_id) else None


def _save_run_id(directory: Path, package: str, run_id: str) -> None:
    known = {name: found for name in ("wandb", "mlflow") if (found := _read_run_id(directory, name))}
    atomic_write(directory / _RUN_IDS_FILE, (json.dumps({**known, package: run_id}, indent=2) + "\n").encode())
