"""Loggers: what reaches them, that a failing one does not stop the others, that a resumed run is the same run."""

import csv
import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tiny_run import tiny_config

from stoker.trainer.config.schema.exp_manager import ExpManagerBlock
from stoker.trainer.loggers import logger_backends
from stoker.trainer.loggers.background_logger import BackgroundLogger
from stoker.trainer.loggers.logger_backends import (
    CSVLogger,
    LoggedRun,
    TensorBoardLogger,
    check_loggers,
    open_loggers,
)
from stoker.trainer.loggers.run_logger import RunLogger
from stoker.trainer.utils.errors import UserError


def tiny_logged_run(directory, **keys):
    config = tiny_config(directory, **keys)
    return LoggedRun(config.root.name, config.root.exp_manager, config.document)


def open_for(directory, resumed_at=0, **keys):
    directory.mkdir(exist_ok=True)
    keys = {f"exp_manager__{name}": value for name, value in keys.items()}
    return open_loggers(tiny_logged_run(directory, **keys), directory, resumed_at)


# ---------------------------------------------------------------- packages, CSV, TensorBoard


def test_a_missing_package_is_one_line_with_its_cure(monkeypatch):
    monkeypatch.setattr(logger_backends.importlib.util, "find_spec", lambda name: None)
    check_loggers(ExpManagerBlock())
    for name in ("wandb", "mlflow"):
        with pytest.raises(UserError, match=rf"pip install 'stoker\[{name}\]'") as error:
            check_loggers(ExpManagerBlock.model_validate({f"create_{name}_logger": True}))
        assert len(error.value.lines) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device on which every write fails")
def test_a_full_disk_is_one_line(tmp_path):
    log = RunLogger(tmp_path, None)
    full = os.open("/dev/full", os.O_WRONLY)
    assert log._log is not None
    os.dup2(full, log._log.fileno())
    os.close(full)
    with pytest.raises(UserError, match=r"^cannot write the run's logs: No space left on device$"):
        log.log_to_file("done")
    with suppress(OSError):  # of the line that is still buffered
        log.close()


def rows(path):
    with path.open(newline="") as file:
        return [{name: value for name, value in row.items() if name != "time"} for row in csv.DictReader(file)]


def test_a_table_gets_a_column_when_a_figure_first_appears(tmp_path):
    sink = CSVLogger(tiny_logged_run(tmp_path), tmp_path, 0)
    sink.log(1, {"loss": 3.5}, "train")
    sink.log(1, {"val_loss": 4.0}, "validation")
    sink.log(2, {"loss": 0.1 + 0.2}, "train")
    assert rows(tmp_path / "metrics.csv") == [
        {"step": "1", "loss": "3.5", "val_loss": ""},
        {"step": "1", "loss": "", "val_loss": "4.0"},
        {"step": "2", "loss": "0.30000000000000004", "val_loss": ""},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_the_table_of_a_resumed_run_begins_with_what_metrics_jsonl_kept(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n1,1.0\n2,2.0\n3,3.0\n2,tor")
    kept = [{"step": step, "loss": float(step)} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    sink = CSVLogger(tiny_logged_run(tmp_path), tmp_path, 0)
    sink.log(3, {"loss": 30.0}, "train")
    assert [row["loss"] for row in rows(tmp_path / "metrics.csv")] == ["1.0", "2.0", "30.0"]


def test_tensorboard_gets_its_settings(tmp_path):
    settings = {"max_queue": 3, "flush_secs": 7, "filename_suffix": ".here"}
    sink = TensorBoardLogger(tiny_logged_run(tmp_path, exp_manager__summary_writer_kwargs=settings), tmp_path, 0)
    sink.log(1, {"loss": 1.0}, "train")
    writer = sink._writer
    sink.close(failed=False)
    assert [path.name.endswith(".here") for path in (tmp_path / "tensorboard").iterdir()] == [True]
    assert (writer.max_queue, writer.flush_secs) == (3, 7)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device on which every write fails")
def test_a_full_disk_ends_tensorboard_without_a_traceback(tmp_path, monkeypatch):
    """Its thread fails at the first write; the next call of the writer raises that error."""
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: reported.append(failure.exc_type))
    full = SimpleNamespace(open=lambda *_, **__: Path("/dev/full").open("wb", 0))  # noqa: SIM115
    monkeypatch.setattr("tensorboard.compat.tensorflow_stub.io.gfile.io", full)
    with pytest.raises(OSError, match="No space left"):
        TensorBoardLogger(tiny_logged_run(tmp_path), tmp_path, 0)
    other = threading.Thread(target=lambda: 1 / 0)  # pyrefly: ignore[division-by-zero]
    other.start()
    other.join()
    assert reported == [ZeroDivisionError]


# ---------------------------------------------------------------- sending from a thread


class Slow:
    """A sink that waits to be let go, and fails when told."""

    def __init__(self, error=None):
        self.go = threading.Event()
        self.error = error
        self.seen = []

    def log(self, step, metrics, group):
        self.go.wait(10)
        if self.error is not None:
            raise self.error
        self.seen.append((step, dict(metrics), group))

    def close(self, *, failed):
        self.seen.append(failed)


def test_a_slow_sink_holds_nobody_up_and_gets_everything():
    slow = Slow()
    sink = BackgroundLogger(slow)
    for step in (1, 2, 3):
        sink.log(step, {"loss": float(step)}, "train")
    assert slow.seen == []
    slow.go.set()
    sink.close(failed=True)
    assert slow.seen == [*((step, {"loss": float(step)}, "train") for step in (1, 2, 3)), True]


def test_a_dead_sink_is_given_up_after_a_while():
    slow = Slow()
    sink = BackgroundLogger(slow, close_timeout=0.1)
    sink.log(1, {"loss": 1.0}, "train")
    with pytest.raises(RuntimeError):
        sink.close(failed=False)
    slow.go.set()


def test_an_error_in_the_thread_is_raised_once_where_figures_are_logged():
    slow = Slow(error=ConnectionError("no route"))
    sink = BackgroundLogger(slow)
    slow.go.set()
    sink.log(1, {"loss": 1.0}, "train")
    while sink._error is None:
        pass
    with pytest.raises(ConnectionError, match="no route"):
        sink.log(2, {"loss": 1.0}, "train")
    sink.log(3, {"loss": 1.0}, "train")
    with pytest.raises(RuntimeError, match="could not be sent"):
        sink.close(failed=False)


# ---------------------------------------------------------------- W&B and MLflow, by stand-ins


@pytest.fixture
def wandb(monkeypatch):
    module = ModuleType("wandb")
    calls: list[Any] = []

    class LayerChunk:
        def define_metric(self, name, **how):
            calls.append(("define", name, how.get("step_metric")))

        def log(self, figures):
            calls.append(("log", figures))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    def init(**settings):
        calls.append(("init", settings))
        return LayerChunk()

    module.__dict__.update(init=init, Settings=lambda **settings: settings, calls=calls)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def open_wandb(directory, resumed_at=0, **kwargs):
    keys = {"create_wandb_logger": True, "wandb_logger_kwargs": {"project": "p", **kwargs}}
    return open_for(directory, resumed_at, **keys)["W&B"]


def test_wandb_gets_the_run_and_its_figures_over_our_step(wandb, tmp_path):
    sink = open_wandb(tmp_path, entity="e", tags=["t"], offline=True, job_type="j", notes="n", group="g")
    sink.log(5, {"loss": 1.0}, "train")
    sink.close(failed=False)
    (_, init), *rest = wandb.calls
    wanted = {"project": "p", "name": tmp_path.name, "entity": "e", "group": "g", "tags": ["t"], "mode": "offline"}
    wanted |= {"job_type": "j", "notes": "n"}
    assert init.items() >= wanted.items()
    assert init["config"]["name"] == "tiny"
    assert (init["resume"], init["dir"]) == ("allow", str(tmp_path))
    assert ("define", "*", "trainer/global_step") in rest
    assert rest[-2:] == [("log", {"train/loss": 1.0, "trainer/global_step": 5}), ("finish", 0)]


def test_wandb_sees_no_secret_of_the_command_line(wandb, tmp_path, monkeypatch):
    """Its client takes `sys.argv` down when it starts."""
    monkeypatch.setattr(sys, "argv", ["stoker", "train", "a.api_key=hush", "b=1"])
    real, seen = wandb.init, []
    wandb.init = lambda **settings: seen.append(sys.argv) or real(**settings)
    open_wandb(tmp_path).close(failed=False)
    assert seen == [["stoker", "train", "a.api_key=***", "b=1"]]
    assert sys.argv[2] == "a.api_key=hush"


def test_only_a_resumed_run_is_the_same_run_in_wandb(wandb, tmp_path):
    for name, resumed_at in (("a", 0), ("a", 4), ("b", 0), ("a", 0)):
        open_wandb(tmp_path / name, resumed_at).close(failed=False)
    ids = [call[1]["id"] for call in wandb.calls if call[0] == "init"]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    open_wandb(tmp_path / "a", 4, id="mine").close(failed=True)
    assert [call[1]["id"] for call in wandb.calls if call[0] == "init"][-1] == "mine"
    assert wandb.calls[-1] == ("finish", 1)


def test_a_client_that_refuses_is_an_error_before_training(wandb, tmp_path):
    def refuse(**settings):
        raise RuntimeError("api_key not configured\nrun wandb login")

    wandb.init = refuse
    with pytest.raises(UserError, match="W&B cannot start: api_key not configured run wandb login; export") as error:
        open_wandb(tmp_path)
    assert len(error.value.lines) == 1


@pytest.fixture
def mlflow(monkeypatch):
    state = SimpleNamespace(uri=None, experiments={}, runs={}, batches=[], ended=[])

    class Client:
        def __init__(self, tracking_uri):
            state.uri = tracking_uri

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id=name) if name in state.experiments else None

        def create_experiment(self, name, **where):
            state.experiments[name] = where
            return name

        def create_run(self, experiment_id, tags, run_name):
            key = f"run{len(state.runs)}"
            state.runs[key] = {"experiment": experiment_id, "tags": tags, "name": run_name}
            return SimpleNamespace(info=SimpleNamespace(run_id=key))

        def get_run(self, run_id):
            assert run_id in state.runs
            return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

        def update_run(self, run_id, status):
            state.runs[run_id]["status"] = status

        def log_batch(self, run_id, metrics):
            state.batches += [(run_id, *metric) for metric in metrics]

        def set_terminated(self, run_id, status):
            state.ended.append((run_id, status))

    modules = {name: ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.tracking")}
    modules["mlflow.entities"].__dict__["Metric"] = lambda *values: values
    modules["mlflow.tracking"].__dict__["MlflowClient"] = Client
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return state


def open_mlflow(directory, resumed_at=0, **kwargs):
    return open_for(directory, resumed_at, create_mlflow_logger=True, mlflow_logger_kwargs=kwargs)["MLflow"]


def test_mlflow_gets_the_run_and_its_figures(mlflow, tmp_path):
    sink = open_mlflow(tmp_path, tags={"a": 1}, prefix="x/")
    sink.log(5, {"val_loss": 2.0}, "validation")
    sink.close(failed=True)
    assert mlflow.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert mlflow.runs["run0"] == {"experiment": "tiny", "tags": {"a": "1"}, "name": tmp_path.name}
    [(run_id, name, value, _, step)] = mlflow.batches
    assert (run_id, name, value, step) == ("run0", "x/validation/val_loss", 2.0, 5)
    assert mlflow.ended == [("run0", "FAILED")]


def test_only_a_resumed_run_is_the_same_run_in_mlflow(mlflow, tmp_path):
    for resumed_at in (0, 4, 0):
        open_mlflow(tmp_path, resumed_at).close(failed=False)
    assert [run_id for run_id, _ in mlflow.ended] == ["run0", "run0", "run1"]
    assert mlflow.runs["run0"]["status"] == "RUNNING"
    open_mlflow(tmp_path, run_id="run1").close(failed=False)
    assert mlflow.ended[-1][0] == "run1"


def test_where_mlflow_writes(mlflow, tmp_path, monkeypatch):
    open_mlflow(tmp_path, tracking_uri="https://host:5000", experiment_name="e").close(failed=False)
    assert mlflow.uri == "https://host:5000"
    assert list(mlflow.experiments) == ["e"]
    open_mlflow(tmp_path, experiment_name="f", artifact_location="s3://b").close(failed=False)
    assert mlflow.experiments["f"] == {"artifact_location": "s3://b"}
    open_mlflow(tmp_path, save_dir=str(tmp_path / "store")).close(failed=False)
    assert mlflow.uri == f"sqlite:///{tmp_path}/store/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://other")
    open_mlflow(tmp_path).close(failed=False)
    assert mlflow.uri == "https://other"


@pytest.mark.parametrize("content", ["", "[]", '{"wandb": "../x"}', '{"wandb": 7}', "x" * 10_000])
def test_a_file_that_holds_no_identity_starts_a_new_run(wandb, tmp_path, content):
    (tmp_path / "loggers.json").write_text(content)
    open_wandb(tmp_path, 4).close(failed=False)
    assert len(wandb.calls[0][1]["id"]) == 8
