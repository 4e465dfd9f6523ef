"""`stoker convert --overwrite`: replaces what an earlier conversion wrote, and nothing else."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hf_folders import random_model, save

from stoker.trainer.cli.main import main
from stoker.trainer.conversion import output_folder
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_IO, EXIT_OK, UserError

BYTES = ("--tokenizer", "byte-level")


def convert(source: Path, target: Path, *options: str) -> int:
    tokenizer = () if (source / "checkpoints").exists() else BYTES
    return main(["convert", str(source), str(target), *tokenizer, *options])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "llama"
    save(random_model("llama"), folder)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def test_earlier_outputs_are_replaced(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    for _ in range(2):
        assert convert(theirs, ours, "--overwrite") == EXIT_OK, capsys.readouterr().err
        assert convert(ours, back, "--overwrite") == EXIT_OK, capsys.readouterr().err
    first = content(ours / "checkpoints"), content(back)
    assert convert(theirs, ours) == EXIT_BAD_INPUT
    assert "already exists; give a new folder, or replace it with --overwrite" in capsys.readouterr().err
    assert convert(theirs, ours, "--overwrite", "--dtype", "bf16") == EXIT_OK
    assert convert(ours, back, "--overwrite") == EXIT_OK
    assert content(ours / "checkpoints") != first[0]
    assert content(back) != first[1]
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "back"}


def test_a_folder_of_other_names_is_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the root of the file system, where processes come and go."""
    (tmp_path / "usr").mkdir()
    (tmp_path / "model.safetensors.index.json").touch()
    monkeypatch.setattr(Path, "rglob", lambda *_: pytest.fail("walked"))
    with pytest.raises(UserError, match="does not look like the output"):
        output_folder.check_target(tmp_path, overwrite=True)


def test_an_output_in_several_files_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32", "torch_dtype": "float32"}')
    for name in ("model.safetensors.index.json", "model-00001-of-00001.safetensors"):
        (tmp_path / name).touch()
    output_folder.check_target(tmp_path, overwrite=True)


def _add(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")

    return change


def _link(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")

    return change


CHANGES = {
    "a file of the user": _add("notes.txt"),
    "a configuration of the user": _add("conf/experiment/mine.yaml"),
    "a configuration at the top": _add("conf/mine.yaml"),
    "a later checkpoint": _add("checkpoints/step-5/manifest.json"),
    "a run": _add("config.resolved.json"),
    "a linked folder": _link("conf"),
    "a linked file": _link("checkpoints/step-0/config.json"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_a_conversion_did_not_write_is_not_replaced(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None]
) -> None:
    ours = tmp_path / "ours"
    assert convert(theirs, ours) == EXIT_OK
    change(ours)
    before = content(tmp_path)
    capsys.readouterr()
    assert convert(theirs, ours, "--overwrite") == EXIT_BAD_INPUT
    assert "does not look like the output of `stoker convert` and is not replaced" in capsys.readouterr().err
    assert content(tmp_path) == before


def test_a_model_of_transformers_a_link_and_the_source_are_not_replaced(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, copy, link = tmp_path / "ours", tmp_path / "copy", tmp_path / "link"
    assert convert(theirs, ours) == EXIT_OK
    save(random_model("llama"), copy)
    link.symlink_to(ours)
    before = content(tmp_path)
    capsys.readouterr()
    for source, target, message in [
        (ours, copy, "does not look like the output"),
        (theirs, link, "is a link"),
        (ours, ours, "which is read"),
    ]:
        assert convert(source, target, "--overwrite") == EXIT_BAD_INPUT
        assert message in capsys.readouterr().err
    assert content(tmp_path) == before
    assert link.is_symlink()


@pytest.mark.parametrize("failing", ["conversion", "rename"])
def test_the_old_output_stays_if_the_new_one_fails(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    ours = tmp_path / "ours"
    assert convert(theirs, ours) == EXIT_OK
    before = content(ours)
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if ".tmp-" in path.name:
            raise OSError(28, os.strerror(28))
        return rename(path, target)

    if failing == "rename":
        monkeypatch.setattr(Path, "rename", fails)
    else:
        monkeypatch.setattr(output_folder, "fsync_directory", lambda folder: fails(Path("x.tmp-1"), folder))
    assert convert(theirs, ours, "--overwrite") == EXIT_IO
    assert "No space left" in capsys.readouterr().err
    assert content(ours) == before
    assert {path.name for path in tmp_path.iterdir()} == {"ours"}
