"""`model.restore_from_path`: a run that starts with the weights of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import tiny_config

from stoker.trainer.train import TrainingResult, run_training
from stoker.trainer.utils.errors import UserError


def run(folder: Path, **changes: Any) -> TrainingResult:
    return run_training(tiny_config(folder, **changes))


def weights(result: TrainingResult) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in result.model.named_parameters()}


def test_a_run_begins_with_the_weights_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path / "first", trainer__max_steps=3)
    # A rate of nearly zero shows what the second run began with.
    small = {"trainer__max_steps": 1, "model__seed": 99, "model__optim": {"lr": 1e-30, "weight_decay": 0.0}}
    capsys.readouterr()
    second = run(tmp_path / "second", **small, model__restore_from_path=str(tmp_path / "first"))
    assert "weights from" in capsys.readouterr().out
    other = run(tmp_path / "third", **small)
    for name, value in weights(first).items():
        torch.testing.assert_close(weights(second)[name], value, rtol=0, atol=1e-12)
    assert any(not torch.equal(value, weights(other)[name]) for name, value in weights(first).items())
    assert second.step == 1, "it counts from 0"


def test_a_resumed_run_goes_on_from_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "first", trainer__max_steps=1)
    begin = {"model__restore_from_path": str(tmp_path / "first")}
    run(tmp_path / "second", trainer__max_steps=2, **begin)
    capsys.readouterr()
    run(tmp_path / "second", trainer__max_steps=3, exp_manager__resume_if_exists=True, **begin)
    said = capsys.readouterr().out
    assert "resuming from" in said
    assert "weights from" not in said


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    run(tmp_path / "first", trainer__max_steps=1)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 20)
    for changes, says in (
        ({"model__restore_from_path": str(tmp_path / "nowhere")}, "no usable checkpoint"),
        (
            {"model__restore_from_path": str(tmp_path / "first"), "model__num_layers": 3},
            r"(?s)does not fit the model.*layers\.1.*use stoker finetune, which takes all model keys from there",
        ),
        (
            {"model__restore_from_path": str(tmp_path / "first"), "model__family": "bert"},
            "holds a model of `family: gpt`, but `model.family` is bert",
        ),
        (
            {
                "model__restore_from_path": str(tmp_path / "first"),
                "model__tokenizer": {"library": "char"},
                "model__data": {"data_impl": "text", "path": str(text)},
                "trainer__limit_val_batches": 0,
            },
            "a different tokenizer",
        ),
    ):
        with pytest.raises(UserError, match=says):
            run(tmp_path / f"second {len(says)}", trainer__max_steps=1, **changes)


def test_keys_that_no_shape_tells_of_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "first", trainer__max_steps=1)
    capsys.readouterr()
    changes = {"model__activation": "relu", "model__layernorm_epsilon": 1e-3, "model__hidden_dropout": 0.25}
    run(tmp_path / "second", trainer__max_steps=1, model__restore_from_path=str(tmp_path / "first"), **changes)
    said = capsys.readouterr().out
    assert "`model.activation` is relu, but these weights were trained with gelu" in said
    assert "`model.layernorm_epsilon` is 0.001" in said
    assert said.count("these weights were trained with") == 2
