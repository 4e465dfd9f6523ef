"""Metric loggers besides metrics.jsonl: TensorBoard, CSV, Weights & Biases, MLflow.

Each is a `MetricLogger`, its keys in `LoggerKeys`, and a row of `BACKENDS`; constructed from:

    run         the configuration of the run
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
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from ...models.config.key_block import ConfigBlock, NonEmptyText, block_default, extension_field
from ..utils.durable_files import atomic_write
from ..utils.environment import snapshot, user_path
from ..utils.errors import UserError
from ..utils.owned_files import check_owned, make_owned_directory, open_to_append
from ..utils.redaction import redact, redact_arguments
from ..utils.text import one_line
from .background_logger import BackgroundLogger, MetricLogger

_RUN_IDS_FILE = "loggers.json"
_RUN_ID = re.compile(r"[\w\-]{1,64}")
_MAX_RUN_IDS_BYTES = 4096


class SummaryWriterBlock(ConfigBlock):
    """`exp_manager.summary_writer_kwargs.*`: supported arguments of TensorBoard's SummaryWriter."""

    max_queue: int = Field(10, ge=1)
    """Maximum number of pending events before a flush."""
    flush_secs: int = Field(120, ge=1)
    """Seconds between flushes."""
    filename_suffix: str = Field("", pattern=r"^[\w.\-]{0,64}$")
    """Suffix of the event file names."""


class WandbBlock(ConfigBlock):
    """`exp_manager.wandb_logger_kwargs.*`: settings of Weights & Biases; the API key comes from WANDB_API_KEY only."""

    project: NonEmptyText | None = None
    """Project of the run; must be given, null: WANDB_PROJECT, or W&B's `uncategorized`."""
    name: NonEmptyText | None = None
    """Name of the run; null: the name of the run directory."""
    entity: NonEmptyText | None = None
    """User or team; null: the default of your account."""
    group: NonEmptyText | None = None
    """Group of the run."""
    job_type: NonEmptyText | None = None
    """Job type within a group."""
    tags: list[NonEmptyText] = Field(default=[])
    """Tags of the run."""
    notes: NonEmptyText | None = None
    """Longer description of the run."""
    save_dir: NonEmptyText | None = None
    """Directory of W&B's files; null: the run directory."""
    id: Annotated[str, Field(pattern=r"^[\w\-]{1,64}$")] | None = None
    """Run id; null: a new id, which is reused when the run is resumed."""
    offline: bool = False
    """Log offline; upload later with `wandb sync`."""


class MlflowBlock(ConfigBlock):
    """`exp_manager.mlflow_logger_kwargs.*`: settings of MLflow; credentials come from its environment variables."""

    experiment_name: NonEmptyText | None = None
    """Experiment of the run; null: the name of the run."""
    run_name: NonEmptyText | None = None
    """Name of the run; null: the name of the run directory."""
    tracking_uri: NonEmptyText | None = None
    """Tracking server or store; null: MLFLOW_TRACKING_URI, else a database in `save_dir`."""
    save_dir: NonEmptyText | None = None
    """Directory of the database `mlflow.db` if there is no tracking server; null: the run directory."""
    prefix: str = Field("", max_length=64)
    """Prefix of metric names."""
    tags: dict[str, str | int | float | bool] = Field(default={})
    """Tags of the run."""
    artifact_location: NonEmptyText | None = None
    """Artifact location of a new experiment; null: chosen by the server."""
    run_id: Annotated[str, Field(pattern=r"^[\w\-]{1,64}$")] | None = None
    """Existing MLflow run to log to; null: a new one, which is reused when the run is resumed."""


class LoggerKeys(ConfigBlock):
    """Loggers of a run, in `exp_manager`."""

    create_tensorboard_logger: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    summary_writer_kwargs: SummaryWriterBlock = block_default(SummaryWriterBlock)
    """Arguments of TensorBoard's SummaryWriter."""
    create_wandb_logger: bool = False
    """Log to Weights & Biases (extra `wandb`)."""
    wandb_logger_kwargs: WandbBlock = block_default(WandbBlock)
    """Settings of Weights & Biases."""
    create_mlflow_logger: bool = False
    """Log to MLflow (extra `mlflow`)."""
    mlflow_logger_kwargs: MlflowBlock = block_default(MlflowBlock)
    """Settings of MLflow."""
    create_csv_logger: bool = extension_field(False)
    """Write metrics.csv beside metrics.jsonl."""
    loggers: list[NonEmptyText] = extension_field([])
    """Lightning loggers of your own, by the names they are registered under (docs/extend.md)."""


class LoggedRun(NamedTuple):
    """Configuration of a run, for its loggers.

    Attributes:
        name: name of the run.
        keys: keys of the loggers.
        document: the whole configuration, with environment variables unresolved.
    """

    name: str
    keys: LoggerKeys
    document: Mapping[str, Any]


def check_loggers(keys: LoggerKeys) -> None:
    """Check that the packages of the enabled loggers are installed, before anything is built.

    Raises:
        UserError: packages are missing; the message has the commands that install them.
    """
    missing = [
        f"`exp_manager.create_{name}_logger` needs the package {name}: pip install 'stoker[{name}]', or set "
        f"exp_manager.create_{name}_logger=False"
        for name, backend in _enabled_backends(keys)
        if backend.is_remote and importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UserError(missing)


def open_loggers(run: LoggedRun, directory: Path, resumed_at: int) -> dict[str, MetricLogger]:
    """Open the enabled loggers, by their names in messages.

    Raises:
        UserError: a logger cannot start.
    """
    loggers: dict[str, MetricLogger] = {}
    try:
        for _, backend in _enabled_backends(run.keys):
            logger = backend.open(run, directory, resumed_at)
            loggers[backend.title] = BackgroundLogger(logger) if backend.is_remote else logger
    except BaseException:
        for logger in loggers.values():
            logger.close(failed=True)
        raise
    return loggers


class TensorBoardLogger:
    """TensorBoard event files; events after the step of a resume are purged, as those steps are logged again."""

    def __init__(self, run: LoggedRun, directory: Path, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # lazily: the import takes a second

        settings = run.keys.summary_writer_kwargs.model_dump()
        purge_step = resumed_at + 1 if resumed_at else None
        folder = make_owned_directory(directory, "tensorboard")
        _silence_event_thread()
        check_owned(folder, *(path.name for path in folder.iterdir()))  # its names hold no more than time and host
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge_step, **settings)

    def log(self, step: int, metrics: Mapping[str, float], group: str) -> None:
        """Log one scalar per metric, named `group/metric`."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self, *, failed: bool) -> None:
        """Flush and close."""
        self._writer.close()


def _silence_event_thread() -> None:
    """Print no traceback of TensorBoard's writing thread: the next call of the writer raises its error again."""
    previous = threading.excepthook
    if getattr(previous, "__name__", "") == "report_other_threads":
        return

    def report_other_threads(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__name__ != "_AsyncWriterThread":
            previous(failure)

    threading.excepthook = report_other_threads


class CSVLogger:
    """`metrics.csv`: one row per line of metrics.jsonl, from which it is rewritten; missing metrics are empty cells."""

    def __init__(self, run: LoggedRun, directory: Path, resumed_at: int) -> None:
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
        with open_to_append(self._path.parent, self._path.name, newline="") as file:
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

    def __init__(self, run: LoggedRun, directory: Path, resumed_at: int) -> None:
        import wandb

        keys = run.keys.wandb_logger_kwargs
        run_id = keys.id or (_read_run_id(directory, "wandb") if resumed_at else None) or secrets.token_hex(4)
        save_dir = user_path(keys.save_dir, "exp_manager.wandb_logger_kwargs.save_dir") if keys.save_dir else directory
        if save_dir is directory:
            check_owned(directory, "wandb", cure="remove the link, or set exp_manager.wandb_logger_kwargs.save_dir")
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
                    config=dict(run.document),
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

    def __init__(self, run: LoggedRun, directory: Path, resumed_at: int) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        keys = run.keys.mlflow_logger_kwargs
        self._metric: Any = Metric
        self._prefix = keys.prefix
        uri = keys.tracking_uri or snapshot().get("MLFLOW_TRACKING_URI")
        if uri is None:
            folder = directory
            if keys.save_dir:
                folder = user_path(keys.save_dir, "exp_manager.mlflow_logger_kwargs.save_dir").absolute()
            else:  # the database, and what SQLite may write beside it
                check_owned(directory, *(f"mlflow.db{end}" for end in ("", "-journal", "-wal", "-shm")))
            folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{folder}/mlflow.db"
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
            known = keys.run_id or (_read_run_id(directory, "mlflow") if resumed_at else None)
            if known is not None:
                self._run_id: str = self._client.get_run(known).info.run_id
                self._client.update_run(self._run_id, status="RUNNING")
            else:
                self._run_id = self._create_run(keys, directory, keys.experiment_name or run.name)
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


class _Backend(NamedTuple):
    """A kind of logger.

    Attributes:
        title: its name in messages.
        open: the class; see the arguments above.
        settings: key of the block with its settings; empty without one.
        is_remote: it sends to a server: in a background thread, with an optional package of the name of its key.
    """

    title: str
    open: Callable[[LoggedRun, Path, int], MetricLogger]
    settings: str = ""
    is_remote: bool = False


BACKENDS = {
    "tensorboard": _Backend("TensorBoard", TensorBoardLogger, "summary_writer_kwargs"),
    "csv": _Backend("CSV", CSVLogger),
    "wandb": _Backend("W&B", WandbLogger, "wandb_logger_kwargs", is_remote=True),
    "mlflow": _Backend("MLflow", MLflowLogger, "mlflow_logger_kwargs", is_remote=True),
}
"""The loggers of `exp_manager.create_NAME_logger`, by NAME."""


def _enabled_backends(keys: LoggerKeys) -> Iterator[tuple[str, _Backend]]:
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
    text = one_line(error, 300) or type(error).__name__
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
