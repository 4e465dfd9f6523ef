"""Atomic, durable file writes; separate from `safetensors_io.py`, which imports torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .owned_files import check_owned


def fsync_directory(path: Path) -> None:
    """Fsync a directory, so that file creations and renames in it survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically and durably: readers see the old or the new content, never a part.

    Not safe for concurrent writers: the temporary file has a fixed name next to `path`.

    Raises:
        UserError: the file is a link.
        OSError: it cannot be written.
    """
    check_owned(path.parent, path.name)
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path, writer: str = "") -> Iterator[IO[bytes]]:
    """Context that opens a temporary file, which replaces `path` on success and is removed on an exception.

    Args:
        writer: unique name of this writer, if several processes may write the file at once.
    """
    temporary = path.with_name(f".{path.name}{writer and '.'}{writer}.tmp")
    try:
        if not writer:
            temporary.unlink(missing_ok=True)  # left by a killed process, or a link that opening would follow
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Context that yields a new path next to `path`, for a library to write; at its end that file replaces `path`.

    Raises:
        UserError: the file is a link.
    """
    check_owned(path.parent, path.name)
    temporary = path.with_name(f".{secrets.token_hex(8)}.{path.name}")  # not to be guessed, so nothing is planted there
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
