"""`trainer.max_epochs` and fractional validation intervals: how many steps they are, and that a run ends there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import load, problems
from run_metrics import metric_rows
from safetensors.torch import load_file
from tiers import looped
from tiny_run import tiny_config

from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.core.run_length import resolve_run_length
from stoker.trainer.train import TrainingResult, run_training
from stoker.trainer.utils.errors import UserError

BATCH = ["model.micro_batch_size=2", "model.global_batch_size=4", "trainer.val_check_interval=100"]


@looped(
    ("overrides", "samples", "expected"),
    [
        (["trainer.max_steps=100"], 43, (100, None, 100)),
        (["trainer.max_epochs=1"], 43, (10, 1, 100)),
        (["trainer.max_epochs=3"], 43, (32, 3, 100)),  # 129 samples: batches cross the ends of epochs
        (["trainer.max_epochs=3", "trainer.max_steps=-1"], 43, (32, 3, 100)),
        (["trainer.max_epochs=3", "trainer.max_steps=20"], 43, (20, None, 100)),
        (["trainer.max_epochs=3", "trainer.max_steps=32"], 43, (32, 3, 100)),
        (["trainer.max_epochs=-1", "trainer.max_steps=20"], 43, (20, None, 100)),
        (["trainer.max_steps=20", "trainer.val_check_interval=0.25"], 43, (20, None, 5)),
        (["trainer.max_steps=20", "trainer.val_check_interval=1.0"], 43, (20, None, 20)),
        (["trainer.max_steps=20", "trainer.val_check_interval=1"], 43, (20, None, 1)),
        (["trainer.max_steps=20", "trainer.val_check_interval=0.001"], 43, (20, None, 1)),
        (["trainer.max_epochs=3", "trainer.val_check_interval=0.5"], 43, (32, 3, 5)),
        (["trainer.max_epochs=3", "trainer.max_steps=20", "trainer.val_check_interval=0.5"], 43, (20, None, 5)),
        # 2 + 2 + 2 + 2 samples, then 4 a step
        (["trainer.max_epochs=1", "model.rampup_batch_size=[2,2,8]"], 17, (6, 1, 100)),
    ],
)
def test_lengths(overrides: list[str], samples: int, expected: tuple[int, int | None, int]) -> None:
    keys = resolve_run_length(resolve_run(load("data=mock", *BATCH, *overrides).root), samples).trainer
    assert (keys.max_steps, keys.max_epochs, keys.val_check_interval) == expected
    assert type(keys.val_check_interval) is int


def test_an_epoch_without_a_batch_is_an_error() -> None:
    run = resolve_run(load("data=mock", *BATCH, "trainer.max_epochs=5").root)
    with pytest.raises(UserError, match="3 training samples, less than one global batch"):
        resolve_run_length(run, 3)


@pytest.mark.parametrize("more", [[], ["trainer.max_epochs=-1"], ["trainer.max_epochs=null"]])
def test_a_run_must_end(more: list[str]) -> None:
    problem = problems("trainer.max_steps=-1", *more)["trainer.max_steps"]
    assert "`max_steps` (-1) needs `max_epochs`" in problem.rule
    assert not load("data=mock", "trainer.max_steps=-1", "trainer.max_epochs=2").findings


@pytest.mark.parametrize("override", ["trainer.max_epochs=0", "trainer.max_epochs=1.5", "trainer.max_steps=0"])
def test_no_other_values(override: str) -> None:
    assert list(problems(override)) == [override.partition("=")[0]]


def train(folder: Path, **changes: Any) -> TrainingResult:
    few = {"trainer__overfit_batches": 5, "trainer__max_steps": -1, "trainer__val_check_interval": 0.4}
    return run_training(tiny_config(folder, **{**few, **changes}))


def test_a_run_ends_after_its_epochs_and_resumes_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sched = {"model__optim": {"lr": 1e-3, "sched": {"max_steps": 10}}}
    whole = train(tmp_path / "whole", trainer__max_epochs=2, **sched)
    assert (whole.step, whole.stop_reason) == (10, None)
    assert "10 steps (2 epochs) of" in capsys.readouterr().out
    assert [row["step"] for row in metric_rows(tmp_path / "whole") if "val_loss" in row] == [2, 4, 6, 8, 10]
    first = train(tmp_path / "parts", trainer__max_epochs=1, **sched)
    assert first.step == 5
    again = train(tmp_path / "parts", trainer__max_epochs=1, **sched)
    assert again.step == 5
    assert "step 5 of `trainer.max_epochs` (1: 5); raise it" in capsys.readouterr().out
    second = train(tmp_path / "parts", trainer__max_epochs=2, **sched)
    assert second.step == 10
    assert whole.checkpoint is not None
    assert second.checkpoint is not None
    for path in whole.checkpoint.glob("*.safetensors"):
        one, other = load_file(path), load_file(second.checkpoint / path.name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_schedule_ends_with_the_last_epoch(tmp_path: Path) -> None:
    epochs = train(tmp_path / "epochs", trainer__max_epochs=2)
    steps = train(tmp_path / "steps", trainer__max_steps=10, trainer__val_check_interval=2)
    assert epochs.checkpoint is not None
    assert steps.checkpoint is not None
    for path in epochs.checkpoint.glob("*.safetensors"):
        one, other = load_file(path), load_file(steps.checkpoint / path.name)
        assert all(torch.equal(one[name], other[name]) for name in one)
