"""A new folder that is there completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..utils.durable_files import sync_directory
from ..utils.errors import EXIT_IO, UserError


def check_new(target: Path) -> None:
    """See that nothing is in the way of a new folder.

    Raises:
        UserError: there is something.
    """
    if os.path.lexists(target) and not (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        raise UserError(f"{target} is there already; give the name of a new folder, or take it away")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name `target` when all is well, and is removed otherwise.

    Yields:
        The folder, beside `target`.

    Raises:
        UserError: `target` is there already, or the disk is full, read-only or not ours (exit code 74).
    """
    check_new(target)
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
