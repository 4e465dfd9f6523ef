"""Run what comes from an untrusted source in a process of its own: the parent's side."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class IsolatedProcess:
    """A script that does not import stoker, limits its own memory and CPU time, and answers requests until `close`.

    A request is a line of JSON and perhaps bytes; so is an answer, whose `size` is the number of the bytes.
    """

    def __init__(self, script: Path, arguments: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._owner = os.getpid()
        self.close = weakref.finalize(self, _end, self.process, self._owner)

    @property
    def is_own(self) -> bool:
        """False in a fork, which must not use the pipes of its parent."""
        return self._owner == os.getpid()

    def request(
        self, message: Mapping[str, Any], data: bytes = b"", *, seconds: float
    ) -> tuple[dict[str, Any], bytes] | None:
        """Return the answer to a request; None if the process ended before, as it does after `seconds`."""
        source, target = self.process.stdout, self.process.stdin
        assert source is not None
        assert target is not None
        line = json.dumps(message).encode()
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            target.write(line + b"\n" + data)
            target.flush()
            answer = json.loads(source.readline())
            found = source.read(answer.get("size", 0))
        except (OSError, ValueError):  # the process ended before it had read or answered the request
            return None
        finally:
            timer.cancel()
        return (answer, found) if len(found) == answer.get("size", 0) else None


def import_path(package: str) -> str:
    """Return the folder that a package is imported from, which a script adds to its own import path.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return str(Path(found.origin).parent.parent)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process, unless this one is a fork of its parent."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            try:
                pipe.close()
            except OSError:  # a broken pipe, with data left to write
                continue
    if owner == os.getpid():
        process.kill()
        process.wait()
