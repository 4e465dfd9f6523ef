"""Dataloader workers as threads of this process, which start at once; what they exchange is still pickled."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.trainer.data import dataloader_workers


class Killed(BaseException):
    """Raised by what a worker does: the worker ends as if by a signal."""


class _Process:
    """Interface of multiprocessing's process."""

    def __init__(self, target: Any, args: tuple[Callable[[Any], Any], Connection], name: str, daemon: bool) -> None:
        self.pid = None
        self.exitcode = None
        self._prepare, self._connection = args
        self._thread = threading.Thread(target=self._run, daemon=daemon)

    def start(self) -> None:
        self.pid = os.getpid()
        self._connection = Connection(os.dup(self._connection.fileno()))  # the caller closes its own
        self._thread.start()

    def kill(self) -> None:
        if self._thread.is_alive():
            with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        with self._connection:
            try:
                dataloader_workers.serve(self._prepare, self._connection)
            except Killed:
                self.exitcode = -signal.SIGKILL


def worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the workers of every dataloader as threads."""
    spawn = multiprocessing.get_context("spawn")
    context = SimpleNamespace(Pipe=spawn.Pipe, Process=_Process)
    fake = SimpleNamespace(get_context=lambda kind: context, current_process=multiprocessing.current_process)
    monkeypatch.setattr(dataloader_workers, "multiprocessing", fake)
