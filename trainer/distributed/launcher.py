"""Starts one process per device on this machine, watches them, and tells how the run ended. No torch here.

The launcher is the one voice of a run: workers send how they ended through a pipe, and the launcher prints it once.
Workers live in sessions of their own, so a signal reaches them once, through the launcher. Their standard input is a
pipe from the launcher: when it closes, because the launcher was killed, they end themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ..config.run_config import RunConfig
from ..utils.environment import worker_environment
from ..utils.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, UserError, keep_trace
from .placement import Placement

GRACE_SECONDS = 8.0
"""Time for the others to end by themselves once one rank is gone."""
_POLL_SECONDS = 0.05
_STOPPED = {signal.SIGTERM: EXIT_TERMINATED, signal.SIGINT: EXIT_INTERRUPTED}


@dataclass
class Worker:
    """One process and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    outcome_pipe: int
    ended_at: float | None = None
    outcome: dict[str, Any] | None = None
    _told: bytes = field(default=b"", repr=False)

    def poll(self) -> bool:
        """Whether it has ended; reads what it says of its outcome, as a pipe holds less than a long traceback."""
        if self.ended_at is not None:
            return True
        has_ended = self.process.poll() is not None
        # Not until the end of the pipe: a process that the worker has left behind may hold it open.
        with contextlib.suppress(BlockingIOError):
            while text := os.read(self.outcome_pipe, 1 << 16):
                self._told += text
        if has_ended:
            self.ended_at = time.monotonic()
            os.close(self.outcome_pipe)
            with contextlib.suppress(ValueError):
                self.outcome = json.loads(self._told)
        return has_ended

    @property
    def code(self) -> int | None:
        """The exit code it wanted, or minus the signal that killed it; None while it runs."""
        if self.ended_at is None:
            return None
        return self.process.returncode if self.outcome is None else self.outcome["code"]

    @property
    def is_stopped(self) -> bool:
        """Whether the process is suspended (SIGSTOP), as far as the system tells."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in "Tt"

    def kill(self) -> None:
        """End it and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def launch(config: RunConfig, placement: Placement, imports: Sequence[str] = ()) -> int:
    """Run the training on all devices of this machine; returns the exit code of the run.

    Args:
        config: of the run.
        placement: its processes.
        imports: the modules that `--import` named.

    Raises:
        UserError: what the workers could not do, in their words.
    """
    with _Launch(config, placement, imports) as run:
        return run.wait()


class _Launch:
    def __init__(self, config: RunConfig, placement: Placement, imports: Sequence[str]) -> None:
        self._config = config
        self._placement = placement
        self._imports = imports
        self._workers: list[Worker] = []
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Launch:
        for number in _STOPPED:
            self._previous[number] = signal.signal(number, self._forward)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.process.wait()
            if worker.process.stdin is not None:
                with contextlib.suppress(OSError):
                    worker.process.stdin.close()
            worker.poll()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wait(self) -> int:
        """Watch the workers until the last has ended."""
        while True:
            ended = [worker for worker in self._workers if worker.poll()]
            if len(ended) == len(self._workers):
                break
            failed = [worker.ended_at for worker in ended if worker.ended_at is not None and not _went_well(worker)]
            if failed and time.monotonic() - min(failed) > GRACE_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        return self._conclude()

    def _conclude(self) -> int:
        if all(worker.code == EXIT_DONE for worker in self._workers):
            return EXIT_DONE
        codes = {worker.code for worker in self._workers}
        if len(codes) == 1 and (code := codes.pop()) in _STOPPED.values():
            return code or EXIT_BUG
        lines, code = self._blame()
        if self._signal is not None:
            asked = _STOPPED[self._signal]
            if all(worker.code in (-self._signal, -signal.SIGKILL, asked, EXIT_DONE) for worker in self._workers):
                return asked
            code = asked if code == EXIT_BUG else code
        raise UserError(lines, code)

    def _blame(self) -> tuple[list[str], int]:
        """Of all that ended badly or not at all, the one that the others only suffered from, and its exit code."""
        where = f" on {socket.gethostname()}" if self._placement.nodes > 1 else ""
        bad = sorted(
            (worker for worker in self._workers if worker.ended_at is not None and not _went_well(worker)),
            key=lambda worker: worker.ended_at or 0.0,
        )
        for worker in bad:
            if worker.code is not None and worker.code < 0 and -worker.code != self._signal:
                name = signal.Signals(-worker.code).name
                return [f"rank {worker.rank}{where} (process {worker.process.pid}) was killed by {name}"], EXIT_BUG
        told = [(worker.rank, worker.outcome) for worker in bad if worker.outcome and worker.outcome["lines"]]
        told.sort(key=lambda found: found[1]["kind"] == "lost")
        silent = [worker for worker in self._workers if worker.code is None]
        if silent and (not told or told[0][1]["kind"] == "lost"):
            worker = min(silent, key=lambda worker: not worker.is_stopped)
            how = "was stopped (SIGSTOP) and did not answer" if worker.is_stopped else "did not answer"
            return [f"rank {worker.rank}{where} (process {worker.process.pid}) {how}; the run was ended"], EXIT_BUG
        if not told:
            worker = next(worker for worker in self._workers if worker.code != EXIT_DONE)
            return [f"rank {worker.rank}{where} ended with exit code {worker.code} and said nothing"], EXIT_BUG
        rank, first = told[0]
        lines = list(first["lines"])
        if first["kind"] != "user":
            lines[0] = f"rank {rank}{where}: {lines[0]}"
        return (_with_trace_in_file(lines) if first["kind"] == "crash" else lines), first["code"]

    def _start(self) -> None:
        place = self._placement
        listener = None
        if place.address is None:  # a run on this machine alone: nobody else may connect
            listener = socket.create_server(("127.0.0.1", 0))
            address = listener.getsockname()[:2]
        else:
            address = place.address
        for local_rank in range(place.per_node):
            rank = place.node * place.per_node + local_rank
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            shared = [write_end] + ([listener.fileno()] if listener and rank == 0 else [])
            with _interrupts_held():
                process = subprocess.Popen(
                    [sys.executable, "-m", "stoker.trainer.cli.rank_entry"],
                    stdin=subprocess.PIPE,
                    env=worker_environment(
                        rank=rank,
                        world_size=place.world_size,
                        local_rank=local_rank,
                        per_node=place.per_node,
                        address=address,
                        # Now: modules of the user's own, imported before the configuration is read, may load torch.
                        env_vars=self._config.root.env_vars,
                    ),
                    pass_fds=shared,
                    start_new_session=True,
                )
            os.close(write_end)
            self._workers.append(Worker(rank, process, read_end))
            order = {
                "command": sys.argv,
                "imports": list(self._imports),
                "document": self._config.document,
                "digest": self._config.digest,
                "rank": rank,
                "world_size": place.world_size,
                "local_rank": local_rank,
                "address": address,
                "listener": listener.fileno() if listener and rank == 0 else None,
                "outcome": write_end,
            }
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already: that will be told
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
            if self._signal is not None:  # it may have come before this worker was one of those it is handed to
                self._forward(self._signal, None)
        if listener is not None:
            listener.close()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        for worker in self._workers:
            if worker.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(number)


def _with_trace_in_file(lines: list[str]) -> list[str]:
    """The first line alone; the traceback below it goes into a file, or stays where no file can be written."""
    path = keep_trace("\n".join(lines) + "\n")
    return lines if path is None else [f"{lines[0]}; the traceback is in {path}"]


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start a process in which SIGINT waits to be let through: a starting interpreter would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _went_well(worker: Worker) -> bool:
    return worker.code in (EXIT_DONE, *_STOPPED.values())
