"""Callbacks and loggers of users' own in `stoker train`."""

import json
import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as lightning
from pytorch_lightning.loggers import CSVLogger, Logger
from run_metrics import metric_rows
from tiny_run import tiny_config

import stoker
from stoker.trainer.callbacks.user_callbacks import UserCallbacks, _decode, _encode
from stoker.trainer.train import run_training


class Recorder(pl.Callback):
    """Records the hooks called, with the step; stops at a step."""

    def __init__(self, stop_at=None):
        self.calls, self.metrics, self.count, self.stop_at = [], {}, 0, stop_at

    def on_fit_start(self, trainer, pl_module):
        self.calls.append("fit_start")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.count += 1
        self.calls.append(trainer.global_step)
        pl_module.log("count", float(self.count))
        trainer.should_stop = trainer.global_step == self.stop_at

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.calls.append("optimizer")

    def on_validation_start(self, trainer, pl_module):
        assert "val_loss" not in trainer.callback_metrics or trainer.global_step > 4
        self.calls.append("validation_start")

    def on_validation_end(self, trainer, pl_module):
        self.calls.append("validation_end")
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}

    def state_dict(self):
        return {"count": self.count, "best": torch.tensor([1.5, math.inf]), "nested": [{"a": None}]}

    def load_state_dict(self, state_dict):
        self.count, self.loaded = state_dict["count"], state_dict


class Records(Logger):
    @property
    def name(self):
        return "records"

    @property
    def version(self):
        return "0"

    def __init__(self):
        super().__init__()
        self.rows: list[Any] = []
        self.parameters: Any = None
        self.status = ""

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        self.parameters = params

    def finalize(self, status):
        self.status = status


def rows(directory, name):
    return [(row["step"], row[name]) for row in metric_rows(directory) if name in row]


def test_callbacks_and_loggers_see_the_run(tmp_path):
    recorder, records = Recorder(), Records()
    result = run_training(tiny_config(tmp_path / "run"), callbacks=[recorder], loggers=[records])
    plain = run_training(tiny_config(tmp_path / "plain"))
    assert result.step == 8
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], weight), "callbacks change nothing"
    step = ["optimizer", 1, "optimizer", 2, "optimizer", 3, "optimizer", 4]
    validation = ["validation_start", "validation_end"]
    assert recorder.calls == ["fit_start", *step, *validation, "optimizer", 5, "optimizer", 6, "optimizer", 7,
                              "optimizer", 8, *validation]  # fmt: skip
    assert result.validation is not None
    assert recorder.metrics["val_loss"] == pytest.approx(result.validation.loss)
    assert {"loss", "grad_norm"} <= recorder.metrics.keys()
    assert rows(tmp_path / "run", "count") == [(2, 2.0), (4, 4.0), (6, 6.0), (8, 8.0)]
    assert rows(tmp_path / "run", "val_loss") == rows(tmp_path / "plain", "val_loss")
    assert records.parameters["name"] == "tiny"
    assert records.status == "success"
    logged = {name: [step for step, row in records.rows if name in row] for name in ("loss", "val_loss", "count")}
    assert logged["loss"] == [1, 2, 4, 6, 8]
    assert logged["val_loss"] == [4, 8]
    assert len(logged["count"]) == 4, "once, not by both ways"


def test_state_is_resumed_and_a_callback_may_stop_the_run(tmp_path):
    first = run_training(tiny_config(tmp_path), callbacks=[Recorder(stop_at=3)])
    assert (first.step, first.stop_reason, first.exit_code) == (3, "a callback", 0)
    assert first.checkpoint is not None
    second = Recorder()
    assert run_training(tiny_config(tmp_path), callbacks=[second]).step == 8
    assert second.count == 8
    assert second.loaded["best"].tolist() == [1.5, math.inf]
    assert second.loaded["nested"] == [{"a": None}]
    counts = rows(tmp_path, "count")
    assert counts[-1] == (8, 8.0)
    assert all(step == count for step, count in counts)


def test_early_stopping_of_lightning_stops_after_a_validation(tmp_path):
    stops = lightning.EarlyStopping("val_loss", mode="max", patience=1, min_delta=100.0)
    result = run_training(tiny_config(tmp_path, trainer__max_steps=20), callbacks=[stops])
    assert (result.step, result.stop_reason) == (8, "a callback")
    assert (tmp_path / "checkpoints" / "step-8").is_dir()


def test_components_are_selected_by_name(tmp_path, nothing_registered, capsys):
    made = []
    stoker.register("callback", "mine")(lambda: made.append(Recorder()) or made[-1])
    stoker.register("logger", "csv")(lambda: CSVLogger(tmp_path / "csv"))
    run_training(tiny_config(tmp_path / "run", trainer__callbacks=["mine"], exp_manager__loggers=["csv"]))
    assert made[0].count == 8
    (table,) = (tmp_path / "csv").rglob("metrics.csv")
    assert "val_loss" in table.read_text()


class Unsaveable(pl.Callback):
    def state_dict(self):
        return {"seen": {1}}


class Backward(pl.Callback):
    def on_after_backward(self, trainer, pl_module):
        pass


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (lightning.ModelCheckpoint(), "exp_manager.checkpoint_callback_params saves checkpoints"),
        (lightning.StochasticWeightAveraging(0.1), "exp_manager.ema averages weights"),
        (lightning.TQDMProgressBar(), "trainer.enable_progress_bar"),
        (Backward(), "overrides on_after_backward, which stoker train never calls"),
        (object(), "object is not a callback"),
        (Recorder, "Recorder is a class; give an instance, Recorder()"),
        (Unsaveable(), "state_dict() of callback Unsaveable holds a set"),
    ],
)
def test_callbacks_that_cannot_act_are_refused_before_anything_is_written(tmp_path, callback, says):
    with pytest.raises(stoker.UserError) as error:
        run_training(tiny_config(tmp_path / "run"), callbacks=[callback])
    assert says in error.value.lines[0]
    assert not (tmp_path / "run").exists()


def test_all_reasons_are_told_at_once(nothing_registered):
    stoker.register("callback", "broken")(lambda needed: needed)
    with pytest.raises(stoker.UserError) as error:
        UserCallbacks(["broken", "none"], [Recorder(), Recorder(), Backward()])
    lines = error.value.lines
    assert len(lines) == 4
    assert "missing 1 required positional argument" in lines[0]
    assert "no callback 'none' is installed or registered" in lines[1]
    assert "Recorder is given twice" in lines[3]
    with pytest.raises(stoker.UserError, match="object is not a logger"):
        run_training(tiny_config("unused"), loggers=[object()])  # pyrefly: ignore[bad-argument-type]


def test_state_that_json_cannot_hold_is_an_error():
    assert _decode(json.loads(json.dumps(_encode({"x": [math.inf, torch.eye(2, dtype=torch.bool)]}, "")))) is not None
    with pytest.raises(stoker.UserError, match=r"state_dict\(\) of callback x holds a set"):
        _encode({"x": [{1, 2}]}, "state_dict() of callback x")
    with pytest.raises(stoker.UserError, match="holds a dict"):
        _encode({1: 2}, "y")
