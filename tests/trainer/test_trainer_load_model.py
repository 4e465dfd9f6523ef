"""Models loaded from a checkpoint: errors about weights that are not the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_config

from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError


def test_a_checkpoint_without_manifest_is_no_hugging_face_folder(tmp_path: Path) -> None:
    """It has the names of files of one, so its error was about `model_type`."""
    for name in ("config.json", "state.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="no usable checkpoint"):
        load_model(tmp_path, "cpu")
    (tmp_path / "state.json").unlink()
    (tmp_path / "manifest.json").symlink_to("manifest.json")
    with pytest.raises(UserError, match="no usable checkpoint"):
        load_model(tmp_path, "cpu")


def test_a_base_that_is_too_small_is_told_to_be_another(tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> Path:
        run_training(tiny_config(tmp_path / name, trainer__max_steps=1, trainer__limit_val_batches=0, **changes))
        return tmp_path / name

    base, small = run("base"), run("small", model__hidden_size=8, model__ffn_hidden_size=8)
    adapter = run("adapter", model__restore_from_path=str(base), model__peft__peft_scheme="lora")
    assert load_model(adapter, "cpu", base).state.base
    with pytest.raises(UserError, match=r"trained on .*; the weights in .*/small/checkpoints/step-1 differ from those"):
        load_model(adapter, "cpu", small)
