"""Files in directories that stoker owns, such as a run directory: opened without following links planted in them.

On a shared disk others may place links where a run writes, symbolic or hard, and it would overwrite what they point to;
a copy made of hard links (`cp -al`) would change with the run. The path of the
directory itself is the user's and may contain links.
"""

from __future__ import annotations

import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TextIO

from .errors import UserError


def open_owned(directory: Path, name: str, flags: int) -> int:
    """Open a file of a directory; no part of `name` below it may be a link. Return the file descriptor.

    Args:
        directory: the directory; it exists.
        name: relative path of the file; directories in it are created.
        flags: of `os.open`.

    Raises:
        UserError: a part of `name` is a link, the file is not a regular file, or it has another hard link and is
            written.
        OSError: it cannot be opened.
    """
    *parents, last = name.split("/")
    handle = _open_directory(directory, "/".join(parents))
    try:
        # a FIFO would block the opening for writing
        file = os.open(last, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=handle)
    except OSError as error:
        check_owned(directory, name)
        raise OSError(error.errno, error.strerror, str(directory / name)) from None
    finally:
        os.close(handle)
    status, path = os.fstat(file), directory / name
    refusal = None
    if not stat.S_ISREG(status.st_mode):
        refusal = _refusal(path, "not a regular file", "remove it")
    elif status.st_nlink > 1 and flags & (os.O_APPEND | os.O_TRUNC):
        mine, copy = shlex.quote(str(path)), shlex.quote(f"{path}.new")
        refusal = _refusal(path, "a hard link", f"make it a file of its own: cp -p {mine} {copy} && mv {copy} {mine}")
    if refusal is not None:
        os.close(file)
        raise UserError(refusal)
    if flags & os.O_TRUNC:  # not before the checks
        os.ftruncate(file, 0)
    return file


def open_to_append(directory: Path, name: str, newline: str | None = None) -> TextIO:
    """Open a text file of a directory with `open_owned`, to append to it."""
    descriptor = open_owned(directory, name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return os.fdopen(descriptor, "a", encoding="utf-8", newline=newline)


def read_owned_text(directory: Path, name: str, limit: int = 16 << 20) -> str:
    """Read a text file of a directory with `open_owned`; one with more than `limit` characters is cut there.

    Raises:
        UserError: it is a link, or not a regular file.
        OSError: it cannot be read.
    """
    file = open_owned(directory, name, os.O_RDONLY)
    with os.fdopen(file, encoding="utf-8", errors="replace") as text:
        return text.read(limit)


def make_owned_directory(directory: Path, name: str) -> Path:
    """Create a directory below another, which exists; no part of `name` may be a link. Return its path.

    Raises:
        UserError: a part of `name` is a link.
        OSError: it cannot be created.
    """
    os.close(_open_directory(directory, name))
    return directory / name


def check_owned(directory: Path, *names: str, cure: str = "remove the link") -> None:
    """Check that no part of the relative paths `names` below a directory is a link; they need not exist.

    Raises:
        UserError: some are; a line for each.
    """
    paths = [directory / part for name in names for part in (name, *PurePath(name).parents)]
    links = [path for path in dict.fromkeys(paths) if path != directory and path.is_symlink()]
    if links:
        raise UserError([_refusal(path, "a link", cure) for path in links])


def _open_directory(directory: Path, name: str) -> int:
    """Return the descriptor of a directory below another, created if it is missing."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in filter(None, name.split("/")):
        try:
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=handle)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
        except OSError as error:
            check_owned(directory, name)
            raise OSError(error.errno, error.strerror, str(directory / name)) from None
        finally:
            os.close(handle)
        handle = inner
    return handle


def _refusal(path: Path, what: str, cure: str) -> str:
    return f"{path} is {what}, through which stoker would write outside its directory; {cure}"
