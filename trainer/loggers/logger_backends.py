"""Where figures go besides metrics.jsonl: TensorBoard, CSV, Weights & Biases, MLflow.

Each is a `MetricSink`. What goes over a network is sent from a thread of its own, so a slow or dead server never holds
up a step. No secret passes through here: W&B and MLflow read theirs from the environment themselves.
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
from ..utils.durable_files import replace_file
from ..utils.environment import snapshot, user_path
from ..utils.errors import UserError
from ..utils.redaction import without_secrets, words_without_secrets
from ..utils.text import counted

_WAITING_RECORDS = 4096
_SECONDS_TO_FINISH = 60.0
_IDENTITIES = "loggers.json"
_IDENTITY = re.compile(r"[\w\-]{1,64}")
_MAX_IDENTITIES_BYTES = 4096


class MetricSink(Protocol):
    """A place that figures go to."""

    def log(self, step: int, figures: Mapping[str, float], group: str) -> None:
        """Take figures of a step; `group` is `train` or `validation`."""
        ...

    def close(self, *, failed: bool) -> None:
        """Flush and close; `failed` says that the run ended in an error."""
        ...


def check_loggers(keys: ExpManagerBlock) -> None:
    """Find out whether the packages of the loggers are installed, before anything is built.

    Raises:
        UserError: one is missing; gives the command that installs it.
    """
    for name, wanted in (("wandb", keys.create_wandb_logger), ("mlflow", keys.create_mlflow_logger)):
        if wanted and importlib.util.find_spec(name) is None:
            raise UserError(
                f"`exp_manager.create_{name}_logger` needs the package {name}: pip install 'stoker[{name}]', "
                f"or set exp_manager.create_{name}_logger=False"
            )


def open_sinks(config: RunConfig, directory: Path, resumed_at: int) -> dict[str, MetricSink]:
    """Every sink that the configuration asks for, by name.

    Args:
        config: of the run.
        directory: the run directory; its metrics.jsonl holds no step after `resumed_at`.
        resumed_at: the step the run goes on from; 0 for a new run.

    Raises:
        UserError: one of them cannot start.
    """
    keys = config.root.exp_manager
    sinks: dict[str, MetricSink] = {}
    try:
        if keys.create_tensorboard_logger:
            sinks["TensorBoard"] = TensorBoardSink(directory / "tensorboard", keys.summary_writer_kwargs, resumed_at)
        if keys.create_csv_logger:
            sinks["CSV"] = CsvSink(directory / "metrics.csv", directory / "metrics.jsonl")
        if keys.create_wandb_logger:
            wandb = WandbSink(keys.wandb_logger_kwargs, directory, config.document, goes_on=resumed_at > 0)
            sinks["W&B"] = Background(wandb)
        if keys.create_mlflow_logger:
            mlflow = MlflowSink(keys.mlflow_logger_kwargs, directory, config.root.name, goes_on=resumed_at > 0)
            sinks["MLflow"] = Background(mlflow)
    except BaseException:
        for sink in sinks.values():
            sink.close(failed=True)
        raise
    return sinks


class TensorBoardSink:
    """Event files for TensorBoard.

    Args:
        directory: of the event files.
        keys: settings of the writer.
        resumed_at: events of later steps are hidden; the run is about to measure them again.
    """

    def __init__(self, directory: Path, keys: SummaryWriterBlock, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of import

        self._writer: Any = SummaryWriter(
            str(directory), purge_step=resumed_at + 1 if resumed_at else None, **keys.model_dump()
        )

    def log(self, step: int, figures: Mapping[str, float], group: str) -> None:
        """One scalar for each figure, named `group/figure`."""
        for name, value in figures.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self, *, failed: bool) -> None:
        """Flush and close."""
        self._writer.close()


class CsvSink:
    """A table of all figures, one row for each line of metrics.jsonl; what a row does not have is empty.

    Args:
        path: of the table, which is made anew.
        records: the metrics.jsonl that it begins with.
    """

    def __init__(self, path: Path, records: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []
        if records.exists():
            with records.open(encoding="utf-8") as lines:
                self._rows = [json.loads(line) for line in lines]
        self._columns = list(dict.fromkeys(["step", *(name for row in self._rows for name in row)]))
        self._write_all()

    def log(self, step: int, figures: Mapping[str, float], group: str) -> None:
        """Add a row; with a figure that is new, the table is written again with one more column."""
        row = {"step": step, **figures, "time": round(time.time(), 3)}
        self._rows.append(row)
        new = [name for name in row if name not in self._columns]
        self._columns += new
        if new:
            self._write_all()
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def close(self, *, failed: bool) -> None:
        """Nothing to do: every row is on the disk."""

    def _write_all(self) -> None:
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, self._columns)
        writer.writeheader()
        writer.writerows(self._rows)
        replace_file(self._path, table.getvalue().encode())


class WandbSink:
    """Weights & Biases, by its own client.

    Args:
        keys: settings.
        directory: the run directory.
        document: the configuration, environment values unresolved.
        goes_on: take up the run that an earlier process of this run directory began.

    Raises:
        UserError: the client refuses to start.
    """

    def __init__(self, keys: WandbBlock, directory: Path, document: Mapping[str, Any], *, goes_on: bool) -> None:
        wandb: Any = importlib.import_module("wandb")
        identity = keys.id or (_identity_of(directory, "wandb") if goes_on else None) or secrets.token_hex(4)
        save_dir = user_path(keys.save_dir, "exp_manager.wandb_logger_kwargs.save_dir") if keys.save_dir else directory
        try:
            with _command_line_without_secrets():
                self._run: Any = wandb.init(
                    project=keys.project,
                    name=keys.name or directory.name,
                    entity=keys.entity,
                    group=keys.group,
                    job_type=keys.job_type,
                    tags=keys.tags or None,
                    notes=keys.notes,
                    dir=str(save_dir),
                    id=identity,
                    resume="allow",
                    mode="offline" if keys.offline else None,
                    config=dict(document),
                    # The terminal is ours; the client's own lines, and a copy of ours, would only be in the way.
                    settings=wandb.Settings(silent=True, console="off"),
                )
        except Exception as error:
            cure = "export WANDB_API_KEY, or WANDB_MODE=offline to sync later"
            raise _cannot_start("wandb", "W&B", error, cure) from error
        # Rows have a step of their own: a resumed run may measure steps again that an earlier process has sent.
        self._run.define_metric("trainer/global_step")
        self._run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        _keep_identity(directory, "wandb", identity)

    def log(self, step: int, figures: Mapping[str, float], group: str) -> None:
        """One row, with its figures named `group/figure`."""
        self._run.log({**{f"{group}/{name}": value for name, value in figures.items()}, "trainer/global_step": step})

    def close(self, *, failed: bool) -> None:
        """Send the rest, and whether the run failed."""
        self._run.finish(exit_code=int(failed))


class MlflowSink:
    """MLflow tracking, by its own client.

    Args:
        keys: settings.
        directory: the run directory.
        name: of the run, for the experiment.
        goes_on: take up the run that an earlier process of this run directory began.

    Raises:
        UserError: the server or store refuses.
    """

    def __init__(self, keys: MlflowBlock, directory: Path, name: str, *, goes_on: bool) -> None:
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
            known = keys.run_id or (_identity_of(directory, "mlflow") if goes_on else None)
            if known is not None:
                self._run_id: str = self._client.get_run(known).info.run_id
                self._client.update_run(self._run_id, status="RUNNING")
            else:
                self._run_id = self._begin(keys, directory, keys.experiment_name or name)
        except Exception as error:
            raise _cannot_start("mlflow", "MLflow", error, f"is there a server or store at {_shown(uri)}?") from error
        _keep_identity(directory, "mlflow", self._run_id)

    def log(self, step: int, figures: Mapping[str, float], group: str) -> None:
        """One metric for each figure, named `group/figure`."""
        now = int(time.time() * 1000)
        metrics = [self._metric(f"{self._prefix}{group}/{name}", value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        """Set the state of the run."""
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")

    def _begin(self, keys: MlflowBlock, directory: Path, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            where = {"artifact_location": keys.artifact_location} if keys.artifact_location else {}
            experiment_id = self._client.create_experiment(experiment, **where)
        else:
            experiment_id = found.experiment_id
        run = self._client.create_run(
            experiment_id,
            run_name=keys.run_name or directory.name,
            tags={name: str(value) for name, value in keys.tags.items()},
        )
        return run.info.run_id


class Background:
    """Hands figures to another sink from a thread of its own.

    The first error there is raised once, at the next `log`; figures that could not be sent are counted.

    Args:
        sink: the other one.
        seconds_to_finish: how long `close` waits for what has not been sent.
    """

    def __init__(self, sink: MetricSink, seconds_to_finish: float = _SECONDS_TO_FINISH) -> None:
        self._sink = sink
        self._seconds = seconds_to_finish
        self._records: queue.Queue[tuple[int, Mapping[str, float], str] | None] = queue.Queue(_WAITING_RECORDS)
        self._error: Exception | None = None
        self._raised = False
        self._lost = 0
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=type(sink).__name__, daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Mapping[str, float], group: str) -> None:
        """Queue figures; never waits."""
        try:
            self._records.put_nowait((step, dict(figures), group))
        except queue.Full:
            self._lost += 1
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def close(self, *, failed: bool) -> None:
        """Wait a while for what is queued.

        Raises:
            RuntimeError: figures were not sent.
        """
        self._failed = failed
        deadline = time.monotonic() + self._seconds
        try:
            self._records.put(None, timeout=self._seconds)
        except queue.Full:
            pass
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        lost = self._lost + self._records.qsize()
        if lost or self._error is not None:
            raise RuntimeError(f"{counted(lost, 'record')} could not be sent") from self._error
        if self._thread.is_alive():
            raise RuntimeError(f"it has not finished within {self._seconds:g} s")

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                self._sink.log(*record)
            except Exception as error:
                self._error = self._error or error
                self._lost += 1
        try:
            self._sink.close(failed=self._failed)
        except Exception as error:
            self._error = self._error or error


@contextmanager
def _command_line_without_secrets() -> Iterator[None]:
    """For a client that takes `sys.argv` down: it has no setting for that."""
    words = sys.argv
    sys.argv = words_without_secrets(words)
    try:
        yield
    finally:
        sys.argv = words


def _cannot_start(package: str, name: str, error: Exception, fix: str) -> UserError:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return UserError(
        f"`exp_manager.create_{package}_logger`: {name} cannot start: {text}; {fix}, or set "
        f"exp_manager.create_{package}_logger=False"
    )


def _shown(uri: str) -> str:
    return without_secrets(uri)


def _identity_of(directory: Path, package: str) -> str | None:
    """The run that an earlier process began, or None; the file is ours, but a user may have touched it."""
    path = directory / _IDENTITIES
    try:
        if path.stat().st_size > _MAX_IDENTITIES_BYTES:
            return None
        identity = json.loads(path.read_text(encoding="utf-8"))[package]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return identity if isinstance(identity, str) and _IDENTITY.fullmatch(identity) else None


def _keep_identity(directory: Path, package: str, identity: str) -> None:
    known = {name: found for name in ("wandb", "mlflow") if (found := _identity_of(directory, name))}
    replace_file(directory / _IDENTITIES, (json.dumps({**known, package: identity}, indent=2) + "\n").encode())
