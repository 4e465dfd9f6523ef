"""Links planted in directories that stoker writes are refused, and nothing is written through them."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from tiers import looped
from tiny_run import tiny_config

from stoker.trainer.checkpoint.run_directory import open_run_directory, save_run_record
from stoker.trainer.cli import multirun
from stoker.trainer.core.debug_runs import fast_dev_run
from stoker.trainer.data.preprocess.journal import Journal
from stoker.trainer.loggers import logger_backends
from stoker.trainer.loggers.logger_backends import LoggedRun, open_loggers
from stoker.trainer.loggers.run_logger import RunLogger
from stoker.trainer.train import run_training
from stoker.trainer.utils.durable_files import atomic_write, replaced_file
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, UserError
from stoker.trainer.utils.owned_files import make_owned_directory, open_owned, open_to_append

WRITTEN_FILES = (
    *("run.lock", "config.resolved.json", "environment.json", "metrics.jsonl", "run.log", "metrics.csv"),
    *("loggers.json", "expert_load.json", "expert_load.png", "quickstart.json", "report.json", "report.html"),
)


class Planted:
    """A directory with a link `name` to a file or directory outside it."""

    def __init__(self, root: Path, name: str, *, is_directory: bool = False) -> None:
        self.owned, self._outside = root / "run", root / "outside"
        link = self.owned / name
        link.parent.mkdir(parents=True)
        if is_directory:
            self._outside.mkdir()
            (self._outside / "step-1.tmp-1").mkdir()
            (self._outside / "journal.jsonl").write_text("precious")
        else:
            self._outside.write_text("precious")
        link.symlink_to(self._outside)
        self._before = self._content()

    def _content(self) -> list[tuple[str, str]]:
        paths = [self._outside, *self._outside.rglob("*")]
        return [(str(path), path.read_text() if path.is_file() else "") for path in sorted(paths)]

    def is_unchanged(self) -> bool:
        return self._content() == self._before

    def refused(self, act: Callable[[], object]) -> None:
        """Check that `act` is an error of one line that names the link, and that nothing outside changed."""
        with pytest.raises(UserError) as caught:
            act()
        assert caught.value.exit_code == EXIT_BAD_INPUT
        (line,) = caught.value.lines
        assert "is a link, through which stoker would write outside its directory; remove the link" in line
        assert str(self.owned) in line
        assert self._content() == self._before


@looped("name", [*WRITTEN_FILES, "checkpoints", "tensorboard", "files", "profile"])
def test_a_run_refuses_links_in_place_of_what_it_writes(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = Planted(tmp_path_factory.mktemp("planted"), name, is_directory=name not in WRITTEN_FILES)
    place.refused(lambda: run_training(tiny_config(place.owned)))


def test_a_fast_dev_run_refuses_a_link_in_place_of_its_directory(tmp_path: Path) -> None:
    place = Planted(tmp_path, "fast_dev_run", is_directory=True)
    place.refused(lambda: fast_dev_run(tiny_config(place.owned, trainer__fast_dev_run=True)))


def test_a_run_in_a_directory_reached_through_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "kept").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "one").mkdir()
    (tmp_path / "disk" / "one" / "of_mine").symlink_to("/etc/passwd")
    kept = {"dirpath": str(tmp_path / "kept" / "saved")}
    config = tiny_config(
        tmp_path / "runs" / "one",
        trainer__max_steps=1,
        trainer__profiler="simple",
        exp_manager__create_csv_logger=True,
        exp_manager__checkpoint_callback_params=kept,
    )
    assert run_training(config).exit_code == 0
    assert (tmp_path / "disk" / "saved" / "step-1" / "manifest.json").is_file()
    assert {"run.log", "metrics.csv", "profile"} <= {path.name for path in (tmp_path / "disk" / "one").iterdir()}


@looped(
    ("name", "act"),
    [
        ("run.log", lambda path: RunLogger(path.parent, None)),
        ("metrics.jsonl", lambda path: RunLogger(path.parent, None, resumed_at=1)),
        ("config.resolved.json", lambda path: tiny_config(path.parent).save(path)),
        ("any", lambda path: atomic_write(path, b"")),
        ("any", lambda path: replaced_file(path).__enter__()),
        ("any", lambda path: open_to_append(path.parent, "any")),
        ("a/b", lambda path: open_owned(path.parents[1], "a/b", 0)),
    ],
)
def test_links_planted_later_are_refused_when_a_file_is_opened(
    name: str, act: Callable[[Path], object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = Planted(tmp_path_factory.mktemp("planted"), name)
    place.refused(lambda: act(place.owned / name))


@looped("name", ["tensorboard", "tensorboard/events.out.tfevents.1.host.2.0"])
def test_tensorboard_refuses_links(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = Planted(tmp_path_factory.mktemp("planted"), name, is_directory="/" not in name)
    config = tiny_config(place.owned, exp_manager__create_tensorboard_logger=True)
    run = LoggedRun(config.root.name, config.root.exp_manager, config.document)
    place.refused(lambda: open_loggers(run, place.owned, 0))


def test_copied_files_are_not_written_through_links(tmp_path: Path) -> None:
    place = Planted(tmp_path, "files/notes.txt")
    (tmp_path / "notes.txt").write_text("new")
    config = tiny_config(place.owned, exp_manager__files_to_copy=[str(tmp_path / "notes.txt")])
    with open_run_directory(config) as directory:
        import torch

        place.refused(lambda: save_run_record(config, directory, torch.device("cpu"), []))


def test_a_directory_below_is_not_reached_through_a_link(tmp_path: Path) -> None:
    place = Planted(tmp_path, "a", is_directory=True)
    place.refused(lambda: make_owned_directory(place.owned, "a"))
    place.refused(lambda: open_owned(place.owned, "a/new", 0))
    assert make_owned_directory(place.owned, "b/c").is_dir()


def test_a_leftover_temporary_file_is_not_followed(tmp_path: Path) -> None:
    place = Planted(tmp_path, ".metrics.csv.tmp")
    atomic_write(place.owned / "metrics.csv", b"new")
    assert (place.owned / "metrics.csv").read_text() == "new"
    assert (tmp_path / "outside").read_text() == "precious"


def test_a_fifo_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """Opening one without a reader would block the run."""
    os.mkfifo(tmp_path / "run.log")
    with pytest.raises(UserError, match=r"cannot write the run's logs: .*run\.log: "):
        RunLogger(tmp_path, None)
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(UserError, match=r"run\.lock is not a regular file, .* remove it"):
        open_run_directory(tiny_config(tmp_path))


@looped(("name", "is_directory"), [("out.parts", True), ("out.parts/lock", False), ("out.parts/journal.jsonl", False)])
def test_preprocess_refuses_links_in_its_folder(
    name: str, is_directory: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = Planted(tmp_path_factory.mktemp("planted"), name, is_directory=is_directory)
    place.refused(lambda: Journal(place.owned / "out", {}, start_over=False))


@looped("name", ["multirun.json", "1"])
def test_a_sweep_refuses_links_in_its_directory(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = Planted(tmp_path_factory.mktemp("planted"), name, is_directory=name == "1")
    words = [f"hydra.sweep.dir={place.owned}", "exp_manager.resume_if_exists=true", "model.seed=1,2"]
    place.refused(lambda: multirun.sweep(None, None, words, lambda *_: 0, print))


@looped("flags", [os.O_APPEND, os.O_TRUNC])
def test_a_hard_link_is_not_written_through(flags: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("planted")
    (root / "outside").write_text("precious")
    (root / "run").mkdir()
    (root / "run" / "run.log").hardlink_to(root / "outside")
    with pytest.raises(UserError, match=r"run\.log is a hard link, .*; make it a file of its own: cp -p ") as caught:
        open_owned(root / "run", "run.log", os.O_WRONLY | os.O_CREAT | flags)
    assert (root / "outside").read_text() == "precious"
    subprocess.run(caught.value.lines[0].partition("its own: ")[2], shell=True, check=True)
    os.close(open_owned(root / "run", "run.log", os.O_WRONLY | os.O_CREAT | flags))
    assert (root / "run" / "run.log").read_text() == ("precious" if flags == os.O_APPEND else "")


@looped(("kind", "name"), [("Wandb", "wandb"), ("MLflow", "mlflow.db"), ("MLflow", "mlflow.db-wal")])
def test_remote_loggers_refuse_links(
    kind: str, name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the client of the package is called."""
    place = Planted(tmp_path_factory.mktemp("planted"), name, is_directory=name == "wandb")
    names = {"wandb": (), "mlflow": (), "mlflow.entities": ("Metric",), "mlflow.tracking": ("MlflowClient",)}
    for module, attributes in names.items():
        fake = types.ModuleType(module)
        for attribute in attributes:
            setattr(fake, attribute, None)
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = tiny_config(place.owned)
    run = LoggedRun(config.root.name, config.root.exp_manager, config.document)
    with pytest.raises(UserError, match=r"is a link, through which stoker would write outside its directory"):
        getattr(logger_backends, f"{kind}Logger")(run, place.owned, 0)
    assert place.is_unchanged()
