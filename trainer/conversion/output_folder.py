"""Atomic creation of a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..utils.durable_files import sync_directory
from ..utils.errors import EXIT_IO, UserError


def check_target_is_free(target: Path) -> None:
    """Check that a new folder can be created.

    Raises:
        UserError: the path exists and is not an empty folder.
    """
    if os.path.lexists(target) and not (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        raise UserError(f"{target} already exists; give a new folder, or remove it")


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Context that creates a folder atomically: renamed to `target` on success, removed on an exception.

    Yields:
        The temporary folder to write to, next to `target`.

    Raises:
        UserError: `target` already exists, or disk full, read-only or no permission (exit code 74).
    """
    check_target_is_free(target)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for folder in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
                sync_directory(folder)
            if target.is_dir():
                target.rmdir()
            temporary.rename(target)
            sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}", EXIT_IO) from error
