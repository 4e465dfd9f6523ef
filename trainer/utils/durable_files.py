"""Atomic, durable file writes; separate from `safetensors_io.py`, which imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


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
    """
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
        with temporary.open("xb" if writer else "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
