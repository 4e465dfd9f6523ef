"""Audit hook that records the side effects of a test: files written, programs started, code loaded, network access."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CODE = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "pickle.find_class"}
_NETWORK = {"socket.connect", "socket.getaddrinfo", "urllib.Request"}
_FILES = {"os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "os.truncate": 0}


@dataclass
class SideEffects:
    """Recorded side effects.

    Attributes:
        written: absolute paths that were written, created or removed.
        started: command lines of started programs.
        forbidden: audit events that reading a file must not cause: code execution and network access.
    """

    written: list[Path] = field(default_factory=list)
    started: list[list[str]] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)

    def written_outside(self, *folders: Path) -> list[Path]:
        """Return the written paths outside of these folders, except devices and `__pycache__`."""
        allowed = [folder.absolute() for folder in (*folders, Path("/dev"))]
        outside = [path for path in self.written if not any(path.is_relative_to(folder) for folder in allowed)]
        return [path for path in outside if "__pycache__" not in path.parts and ".pyc" not in path.suffixes]


_watching: list[SideEffects] = []
_is_installed = False
_os_open = os.open


@contextmanager
def watched() -> Iterator[SideEffects]:
    """Record the side effects of this process; audit hooks cannot be removed, so one hook is installed once."""
    global _is_installed
    if not _is_installed:
        sys.addaudithook(_hook)
        _is_installed = True
    seen = SideEffects()
    _watching.append(seen)
    with patch("os.open", _open):
        try:
            yield seen
        finally:
            _watching.remove(seen)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """Open a file as `os.open`, whose audit event does not tell the directory of a relative path."""
    return _os_open(path if dir_fd is None else _path(path, dir_fd), flags, mode)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching:
        return
    for seen in _watching:
        if event == "open" and _is_write(*arguments):
            seen.written.append(_path(arguments[0]))
        elif event in _FILES:
            seen.written.append(_path(arguments[_FILES[event]], arguments[-1]))
        elif event == "subprocess.Popen":
            seen.started.append([str(word) for word in arguments[1]])
        elif event in _CODE or event in _NETWORK:
            seen.forbidden.append(event)


def _is_write(path: Any, mode: Any, flags: Any) -> bool:
    if isinstance(path, int):
        return False
    return bool(isinstance(flags, int) and flags & _WRITES) or bool(isinstance(mode, str) and set(mode) & set("wax+"))


def _path(path: Any, directory: Any = -1) -> Path:
    """Return an absolute path; a relative one is below the directory of a file descriptor, if that is not -1."""
    is_below = isinstance(directory, int) and directory >= 0
    return Path(os.readlink(f"/proc/self/fd/{directory}") if is_below else "", os.fsdecode(path)).absolute()
