"""Run directories that are taken: the key that leads elsewhere is the one that is in use."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_config

from stoker.trainer.checkpoint.reader import find_checkpoint
from stoker.trainer.checkpoint.run_directory import open_run_directory
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_IO, UserError


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


def test_checkpoints_elsewhere_are_found_and_not_forgotten(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    place = {"exp_manager__checkpoint_callback_params": {"dirpath": str(kept)}}
    run_training(tiny_config(run, trainer__max_steps=1, **place))
    assert find_checkpoint(run)[0].path == kept / "step-1"
    metrics = (run / "metrics.jsonl").read_text()
    for resume in (True, False):
        with pytest.raises(UserError, match=rf"dirpath={kept}, .*resume_from_checkpoint={kept}/step-1, or"):
            run_training(tiny_config(run, exp_manager__resume_if_exists=resume))
    assert (run / "metrics.jsonl").read_text() == metrics
    run_training(tiny_config(run, trainer__max_steps=2, **place))
    run_training(tiny_config(run, trainer__max_steps=3, exp_manager__resume_from_checkpoint=str(kept / "step-2")))
    assert find_checkpoint(run)[0].path == run / "checkpoints" / "step-3"
    nothing_saved = tmp_path / "other"
    run_training(
        tiny_config(nothing_saved, trainer__max_steps=4, **place, exp_manager__create_checkpoint_callback=False)
    )
    with pytest.raises(UserError, match="give a run directory"):
        find_checkpoint(nothing_saved)
    shutil.rmtree(kept)
    run_training(tiny_config(run, trainer__max_steps=4, **place, exp_manager__resume_from_checkpoint=str(run)))
    shutil.rmtree(kept)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match=f"saved its checkpoints to {kept}, where none are now"):
        find_checkpoint(run)


def refuse(config: RunConfig) -> None:
    """A run that is refused after it has begun to write its log."""
    with open_run_directory(config) as directory:
        (directory.path / "run.log").write_text("refused\n")
        raise UserError("no")


def test_a_run_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    """Neither its directory nor what was missing above it, unless they were there."""
    (tmp_path / "there").mkdir()
    saved = tmp_path / "saved" / "step-1"
    places = {"dirpath": str(tmp_path / "new" / "kept")}
    for run in (tmp_path / "a" / "b", tmp_path / "there" / "b"):
        config = tiny_config(run, exp_manager__checkpoint_callback_params=places)
        with pytest.raises(UserError, match="no"):
            refuse(config)
        assert [path.name for path in tmp_path.iterdir()] == ["there"]
        assert not list((tmp_path / "there").iterdir())
    with pytest.raises(UserError, match="no"):
        refuse(tiny_config(tmp_path / "there"))
    assert (tmp_path / "there").is_dir()
    saved.mkdir(parents=True)
    taken = {"dirpath": str(saved.parent)}
    with pytest.raises(UserError, match="already holds"):
        open_run_directory(
            tiny_config(
                tmp_path / "a", exp_manager__resume_if_exists=False, exp_manager__checkpoint_callback_params=taken
            )
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "there"]


def test_a_refused_run_takes_nothing_from_one_that_trains(tmp_path: Path) -> None:
    """Both find the directory missing; one has it, the other must not remove it."""
    config = tiny_config(tmp_path / "run")
    with open_run_directory(config) as first, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "exists", lambda self: self not in (first.path, first.checkpoints))
        with pytest.raises(UserError, match="another process trains in"):
            open_run_directory(config)
        patch.undo()
        assert (first.path / "run.lock").exists()
        first.created.clear()
    assert first.path.is_dir()


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
