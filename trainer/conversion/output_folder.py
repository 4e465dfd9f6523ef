"""Atomic creation and replacement of the folder that a conversion writes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.hf_files import ADAPTER_CONFIG, ADAPTER_TENSORS, CONFIG, read_object
from ..utils.durable_files import fsync_directory
from ..utils.errors import EXIT_IO, UserError

_HF_NAMES = re.compile(r"[\w-]+\.(safetensors\.index\.json|json|txt|model|jinja|safetensors)")
_STOKER_PARTS = {"checkpoints", "conf", "tokenizer"}


def check_target(target: Path, *, overwrite: bool = False) -> None:
    """Check that a folder can be created, or with `overwrite` replaced.

    Raises:
        UserError: the path exists and is not an empty folder, nor with `overwrite` the output of an earlier conversion.
    """
    if not os.path.lexists(target) or (_is_folder(target) and not any(target.iterdir())):
        return
    if not overwrite:
        again = ", or replace it with --overwrite" if _is_output(target) else ", or remove it"
        raise UserError(f"{target} already exists; give a new folder{again}")
    if not _is_output(target):
        what = "is a link" if target.is_symlink() else "does not look like the output of `stoker convert`"
        raise UserError(f"--overwrite: {target} {what} and is not replaced; give a new folder, or remove it")


def check_is_apart(target: Path, source: Path) -> None:
    """Check that replacing a folder would not remove what is converted.

    Raises:
        UserError: one of the paths is in the other.
    """
    ours, theirs = target.resolve(), source.resolve()
    if target.exists() and source.exists() and (ours.is_relative_to(theirs) or theirs.is_relative_to(ours)):
        raise UserError(f"{target} and {source}, which is read, are one in the other; give a new folder")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_output(target: Path) -> bool:
    """Return True if a folder holds what a conversion writes, and nothing else: no other files, and no links."""
    if not _is_folder(target):
        return False
    if any(path.name not in _STOKER_PARTS and not _HF_NAMES.fullmatch(path.name) for path in target.iterdir()):
        return False  # before the walk: the folder may be any, even the root of the file system
    inside = list(target.rglob("*"))  # does not follow links to folders
    if not inside or any(path.is_symlink() or not (path.is_file() or path.is_dir()) for path in inside):
        return False
    names = {path.relative_to(target).parts[0] for path in inside}
    if "checkpoints" in names:
        steps = [path.name for path in (target / "checkpoints").glob("*")]
        is_checkpoint = steps == ["step-0"] and (target / "checkpoints" / "step-0" / "manifest.json").is_file()
        configs = {path.name for path in (target / "conf").rglob("*") if path.is_file()}
        return is_checkpoint and names <= _STOKER_PARTS and configs <= {"converted.yaml"}
    if names == {ADAPTER_CONFIG, ADAPTER_TENSORS}:
        return True
    try:
        config = read_object(target, CONFIG)
    except UserError:
        return False
    # transformers writes its version, and one of the two names of the dtype.
    is_ours = config is not None and "transformers_version" not in config and {"dtype", "torch_dtype"} <= config.keys()
    return is_ours and all(path.is_file() and _HF_NAMES.fullmatch(path.name) for path in inside)


@contextmanager
def atomic_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Context that creates a folder atomically: renamed to `target` on success, removed on an exception.

    With `overwrite`, an earlier output at `target` is renamed first and removed last, so that a process killed in
    between leaves the old folder, the new one, or both.

    Yields:
        The temporary folder to write to, next to `target`.

    Raises:
        UserError: `target` already exists, or disk full, read-only or no permission (exit code 74).
    """
    check_target(target, overwrite=overwrite)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for folder in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
                fsync_directory(folder)
            check_target(target, overwrite=overwrite)  # again: another process may have written there since
            _replace(target, temporary)
            fsync_directory(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}", EXIT_IO) from error


def _replace(target: Path, new: Path) -> None:
    """Rename a folder to `target`, in place of an earlier one, which comes back if that fails."""
    if not target.is_dir():
        new.rename(target)
        return
    old = target.with_name(f"{target.name}.old-{os.getpid()}")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old)
