"""Run directories that are taken: the key that leads elsewhere is the one that is in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_config

from stoker.trainer.errors import EXIT_IO, UserError
from stoker.trainer.run_directory import open_run_directory


@pytest.mark.parametrize(
    ("changes", "checkpoints", "key"),
    [
        ({}, "run/checkpoints", "explicit_log_dir"),
        ({"explicit_log_dir": None, "exp_dir": "runs", "version": "v"}, "runs/tiny/v/checkpoints", "name or exp_dir"),
        ({"checkpoint_callback_params": {"dirpath": "kept"}}, "kept", "checkpoint_callback_params.dirpath"),
    ],
)
def test_the_key_that_leads_elsewhere_is_named(
    changes: dict[str, Any], checkpoints: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / checkpoints / "step-1").mkdir(parents=True)
    named = {f"exp_manager__{name}": value for name, value in changes.items()}
    config = tiny_config(tmp_path / "run", exp_manager__resume_if_exists=False, **named)
    with pytest.raises(UserError, match=rf"already holds.*with another exp_manager\.{key}$"):
        open_run_directory(config)


def test_a_directory_that_is_in_use_or_cannot_be_written(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run")
    with (
        open_run_directory(config),
        pytest.raises(UserError, match=r"another process trains in.*another exp_manager\.explicit_log_dir$"),
    ):
        open_run_directory(config)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"set exp_manager\.explicit_log_dir to a directory") as caught:
        open_run_directory(tiny_config(tmp_path / "file" / "run"))
    assert caught.value.exit_code == EXIT_IO
