"""Going on from a checkpoint with other data or another shape: what has changed is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_config

from stoker.trainer.checkpoint.reader import Checkpoint, RunState, find_checkpoint
from stoker.trainer.core.resume import check_resume_compatibility
from stoker.trainer.train import TrainingResult, run_training
from stoker.trainer.utils.errors import UserError


def run(folder: Path, steps: int, **changes: Any) -> TrainingResult:
    return run_training(tiny_config(folder, trainer__max_steps=steps, trainer__limit_val_batches=0, **changes))


def refused(folder: Path, **changes: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        run(folder, 2, **changes)
    return caught.value.lines


def test_other_data_are_named(tmp_path: Path) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("to be or not to be " * 40)
    other.write_text("that is the question " * 40)
    run(tmp_path / "run", 1, model__data={"data_impl": "text", "path": str(one)})
    lines = refused(tmp_path / "run", model__data={"data_impl": "text", "path": str(other)})
    assert lines[1:] == [
        f"`model.data.path` was {one} in step-1 and is {other} now",
        "use the same data, or start a new run from these weights: model.restore_from_path="
        f"{tmp_path / 'run' / 'checkpoints' / 'step-1'}, with another exp_manager.explicit_log_dir",
    ]
    one.write_text("whether it is nobler " * 40)
    lines = refused(tmp_path / "run", model__data={"data_impl": "text", "path": str(one)})
    assert lines[1] == f"the data at `model.data.path` ({one}) have changed since"


def test_another_tokenizer_is_named(tmp_path: Path) -> None:
    text, step = tmp_path / "text.txt", tmp_path / "run" / "checkpoints" / "step-1"
    text.write_text("to be or not to be " * 40)
    data: dict[str, Any] = {"model__data": {"data_impl": "text", "path": str(text)}}
    run(tmp_path / "run", 1, **data, model__tokenizer={"library": "char"})
    what = f"checkpoint {step} was trained with a different tokenizer than `model.tokenizer`"
    assert refused(tmp_path / "run", **data, model__tokenizer={"kwargs": {"a": 1}}) == [
        what,
        "`model.tokenizer.library` was char in step-1 and is byte-level now",
        "`model.tokenizer.kwargs.a` was None in step-1 and is 1 now",
        "use the same one: model.tokenizer.library=char ~model.tokenizer.kwargs.a",
    ]
    document = json.loads((step / "tokenizer.json").read_text())
    checkpoint, _ = find_checkpoint(tmp_path / "run")
    root = tiny_config(tmp_path / "run", **data, model__tokenizer={"library": "char"}).root
    with pytest.raises(UserError, match="whose files may have changed since; use the same one"):
        check_resume_compatibility(checkpoint, checkpoint.state, document | {"characters": ["a"]}, root)


def test_another_vocabulary_of_mock_data_is_named(tmp_path: Path) -> None:
    run(tmp_path / "run", 1)
    lines = refused(tmp_path / "run", model__override_vocab_size=300)
    assert lines[1] == "`model.override_vocab_size` was None in step-1 and is 300 now"


def test_another_python_is_named_where_its_library_is_the_data(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model__data={"data_impl": "pystd"})
    (tmp_path / "config.json").write_text(json.dumps(config.document))
    now = RunState(
        step=1, consumed_samples=4, seed=1, global_batch_size=4, micro_batch_size=2, sequence_length=16,
        precision="fp32", optimizer={}, data_fingerprint="new", versions={"python": "3.11.8"},
    )  # fmt: skip
    then = now.model_copy(update={"data_fingerprint": "old", "versions": {"python": "3.11.7"}})
    with pytest.raises(UserError, match=r"standard library of the running Python: 3\.11\.7 then, 3\.11\.8 now"):
        check_resume_compatibility(Checkpoint(tmp_path, then, ()), now, {}, config.root)
    with pytest.raises(UserError, match=rf"new run from these weights: model\.peft\.restore_from_path={tmp_path},"):
        check_resume_compatibility(Checkpoint(tmp_path, then, ("adapter.safetensors",)), now, {}, config.root)


def test_keys_of_the_model_that_no_shape_tells_of_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", 1)
    capsys.readouterr()
    run(tmp_path / "run", 2, model__hidden_dropout=0.3, model__activation="relu", model__fp8=True)
    said = capsys.readouterr().out
    assert "`model.fp8` was None in step-1 and is True now" in said
    assert "model.fp8_recipe" not in said
    assert "`model.hidden_dropout` was 0.1 in step-1 and is 0.3 now" in said
    assert "`model.activation` is relu, but these weights were trained with gelu" in said
    assert "attention_dropout" not in said
    more = {"logits_soft_cap": 30.0, "label_smoothing": 0.1, "embedding_dropout": 0.2, "override_vocab_size": 300}
    more |= {"do_layer_norm_weight_decay": True, "rampup_batch_size": [2, 2, 100]}
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 40)
    same: dict[str, Any] = {"model__data": {"data_impl": "text", "path": str(text)}}
    run(tmp_path / "other", 1, **same, exp_manager__ema__enable=True)
    capsys.readouterr()
    run(tmp_path / "other", 2, **same, **{f"model__{name}": value for name, value in more.items()})
    said = capsys.readouterr().out
    assert "`exp_manager.ema.enable` was True in step-1 and is False now" in said
    assert "`model.logits_soft_cap` is 30.0, but these weights were trained with None" in said
    assert all(f"`model.{name}` was " in said for name in more if name != "logits_soft_cap")
    assert "after a ramp-up from 2 samples" in said


def test_other_batches_of_an_overfitting_run_are_named(tmp_path: Path) -> None:
    run(tmp_path / "run", 1, trainer__overfit_batches=1)
    lines = refused(tmp_path / "run", trainer__overfit_batches=1, model__global_batch_size=8)
    assert lines[0].endswith(", the first 4 samples, now " + lines[0].rpartition("now ")[2])
    assert lines[0].endswith(", the first 8 samples")
    assert lines[1] == "`model.global_batch_size` was 4 in step-1 and is 8 now"


def test_the_same_recipe_of_fp8_in_other_words_is_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", 1, model__fp8=True)
    run(tmp_path / "run", 2, model__fp8=True, model__fp8_recipe="tensorwise", model__fp8_interval=1)
    assert "fp8_recipe" not in capsys.readouterr().out
    run(tmp_path / "run", 3, model__fp8=True, model__fp8_recipe="rowwise")
    assert "`model.fp8_recipe` was tensorwise in step-2 and is rowwise now" in capsys.readouterr().out


def test_keys_that_change_the_shape_are_named_first(tmp_path: Path) -> None:
    run(tmp_path / "run", 1)
    lines = refused(tmp_path / "run", model__hidden_size=16, model__num_layers=2, model__hidden_dropout=0.0)
    assert lines[:2] == [
        "`model.num_layers` was 1 in step-1 and is 2 now",
        "`model.hidden_size` was 32 in step-1 and is 16 now",
    ]
    assert "does not fit the model of this configuration" in lines[2]


def test_keys_that_change_the_shape_of_an_adapter_are_named_first(tmp_path: Path) -> None:
    run(tmp_path / "base", 1)
    adapter = {"model__restore_from_path": str(tmp_path / "base"), "model__peft__peft_scheme": "lora"}
    run(tmp_path / "run", 1, **adapter, model__peft__lora_tuning__adapter_dim=3)
    lines = refused(tmp_path / "run", **adapter, model__peft__lora_tuning__adapter_dim=4)
    assert lines[0] == "`model.peft.lora_tuning.adapter_dim` was 3 in step-1 and is 4 now"
    assert "does not fit the model of this configuration" in lines[1]
