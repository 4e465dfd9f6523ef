"""Launcher: start one worker process per local device, watch them and report the outcome. Does not import torch.

Workers send their outcome through a pipe, and the launcher reports the error once. Each worker has its own session, so
that signals reach it once, through the launcher. Its stdin is a pipe from the launcher: when it closes, because the
launcher was killed, the worker exits.
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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.parameter_layout import parallel_layout
from ..config.run_config import RunConfig
from ..utils.environment import worker_environment
from ..utils.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, UserError, save_traceback
from ..utils.signals import EXIT_CODES, handlers_set, signals_blocked
from .placement import Placement
from .step_counter import StepCounters

GRACE_SECONDS = 8.0
"""Time for the other workers to exit by themselves after one has failed."""
_POLL_SECONDS = 0.05
_STACKS_SECONDS = 0.5
_CAUSES = ("user", "crash", "hung", "lost")
"""Kinds of outcomes, from the cause of a failure to its consequences."""


@dataclass
class Worker:
    """A worker process and its outcome."""

    rank: int
    process: subprocess.Popen[bytes]
    outcome_pipe: int
    ended_at: float | None = None
    outcome: dict[str, Any] | None = None
    _received: bytes = field(default=b"", repr=False)

    def poll(self) -> bool:
        """Return True if it has exited; also drain the outcome pipe, whose buffer is smaller than a long traceback."""
        if self.ended_at is not None:
            return True
        has_ended = self.process.poll() is not None
        # Do not read until EOF: an orphaned child of the worker may hold the pipe open.
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.outcome_pipe, 1 << 16):
                self._received += data
        if has_ended:
            self.ended_at = time.monotonic()
            os.close(self.outcome_pipe)
            with contextlib.suppress(ValueError):
                self.outcome = json.loads(self._received)
        return has_ended

    @property
    def exit_code(self) -> int | None:
        """Exit code, or minus the signal that killed it; None while it runs."""
        if self.ended_at is None:
            return None
        return self.process.returncode if self.outcome is None else self.outcome["code"]

    @property
    def is_suspended(self) -> bool:
        """True if the process is suspended (SIGSTOP); False if unknown."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in "Tt"

    def request_stacks(self) -> None:
        """Have it write its stack traces, even if it is suspended (`watchdog.py`)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, signal.SIGQUIT)
            os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the worker and all its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Failure:
    """The failure of a local worker that took the others down.

    Attributes:
        lines: what to tell the user.
        exit_code: exit code of the run.
        is_cause: this worker failed by itself; False if it lost others, perhaps on another node.
        rank: its rank.
        place: its place in the mesh, empty without one.
        step: its last completed step.
    """

    lines: list[str]
    exit_code: int
    is_cause: bool
    rank: int
    place: str
    step: int


def launch(config: RunConfig, placement: Placement, imports: Sequence[str] = ()) -> int:
    """Run the training on all devices of this node alone; return the exit code.

    Raises:
        UserError: the error of the failed worker.
    """
    with (
        LocalWorkers(config, placement, imports) as workers,
        handlers_set(lambda number, _: workers.forward(number), tuple(EXIT_CODES)),
    ):
        workers.start()
        while not workers.poll():
            time.sleep(_POLL_SECONDS)
    failure = workers.failure()
    if failure is None:
        return workers.exit_code
    raise UserError(failure.lines, failure.exit_code)


class LocalWorkers:
    """The worker processes of this node, from their start until all have ended; a context that kills those left.

    Args:
        config: the configuration.
        placement: number of workers, here and on all nodes.
        imports: user modules that they import first.
        session: prefix of this start's keys in the store of the nodes' agents; None for a store of the first worker.
    """

    def __init__(
        self, config: RunConfig, placement: Placement, imports: Sequence[str] = (), session: str | None = None
    ) -> None:
        self._config = config
        self._placement = placement
        self._imports = imports
        self._session = session
        self._workers: list[Worker] = []
        self._mesh = parallel_layout(config.root.model, placement.world_size)
        self._steps = StepCounters(placement.ranks_per_node)
        self._signal: signal.Signals | None = None
        self._failure: Failure | None = None

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers that are left; those that do not respond after a failure write their stack traces first."""
        left = [worker for worker in self._workers if worker.process.poll() is None]
        if self._failure is not None and left:
            for worker in left:
                worker.request_stacks()
            time.sleep(_STACKS_SECONDS)
        for worker in self._workers:
            worker.kill()
            worker.process.wait()
            if worker.process.stdin is not None:
                with contextlib.suppress(OSError):
                    worker.process.stdin.close()
            worker.poll()
        self._steps.close()

    @property
    def exit_code(self) -> int:
        """Exit code of workers that have not failed: 0, or that of the signal which stopped them."""
        codes = {worker.exit_code for worker in self._workers}
        if self._signal is not None and codes != {EXIT_OK}:
            return EXIT_CODES[self._signal]
        return max(code or EXIT_OK for code in codes)

    @property
    def process_ids(self) -> dict[int, int]:
        """Process id of each local rank."""
        return {number: worker.process.pid for number, worker in enumerate(self._workers)}

    def poll(self) -> bool:
        """Return True once all workers have ended, or one has failed and the others did not follow."""
        ended = [worker for worker in self._workers if worker.poll()]
        early = [worker.exit_code for worker in ended if _stopped_early(worker)]
        if early and self._signal is None:  # the others would wait for it
            self.forward(signal.SIGINT if early[0] == EXIT_INTERRUPTED else signal.SIGTERM)
        failed = [worker.ended_at for worker in ended if worker.ended_at is not None and not _succeeded(worker)]
        left = [worker for worker in self._workers if worker.exit_code is None]
        has_ended = not left or (
            bool(failed)
            and (time.monotonic() - min(failed) > GRACE_SECONDS or all(worker.is_suspended for worker in left))
        )
        if has_ended and self._failure is None:  # before `close` kills the rest
            self._failure = self._find_failure()
        return has_ended

    def failure(self) -> Failure | None:
        """Return the failure of workers that have ended; None if they have not failed."""
        return self._failure

    def forward(self, number: int) -> None:
        """Send a signal to all workers."""
        self._signal = signal.Signals(number)
        for worker in self._workers:
            if worker.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(number)

    def _find_failure(self) -> Failure | None:
        if all(worker.exit_code == EXIT_OK for worker in self._workers):
            return None
        codes = {worker.exit_code for worker in self._workers}
        if len(codes) == 1 and codes.pop() in EXIT_CODES.values():
            return None
        failure = self._root_failure()
        if self._signal is not None:
            signal_code = EXIT_CODES[self._signal]
            if all(
                worker.exit_code in (-self._signal, -signal.SIGKILL, signal_code, EXIT_OK) for worker in self._workers
            ):
                return None
            if failure.exit_code == EXIT_FAILURE:
                return replace(failure, exit_code=signal_code)
        return failure

    def _root_failure(self) -> Failure:
        """Return the failure of the worker that failed first, rather than of those it took down."""
        failed = sorted(
            (worker for worker in self._workers if worker.ended_at is not None and not _succeeded(worker)),
            key=lambda worker: worker.ended_at or 0.0,
        )
        hung = [worker for worker in self._workers if worker.exit_code is None]
        for worker in failed:
            if worker.exit_code == -signal.SIGABRT and any(each.is_suspended for each in hung):
                continue  # NCCL aborts a rank that waits for another longer than its timeout
            if worker.exit_code is not None and worker.exit_code < 0 and -worker.exit_code != self._signal:
                name = signal.Signals(-worker.exit_code).name
                return self._failed(worker, [f"{self._name(worker)} was killed by {name}{self._progress(worker)}"])
        reported = [(worker, worker.outcome) for worker in failed if worker.outcome and worker.outcome["lines"]]
        reported.sort(key=lambda found: _CAUSES.index(found[1]["kind"]))
        if hung and (not reported or reported[0][1]["kind"] in ("hung", "lost")):
            worker = min(hung, key=lambda worker: not worker.is_suspended)
            state = "was stopped (SIGSTOP) and did not respond" if worker.is_suspended else "did not respond"
            return self._failed(worker, [f"{self._name(worker)} {state}{self._progress(worker)}; the run was ended"])
        if not reported:
            worker = next(worker for worker in self._workers if worker.exit_code != EXIT_OK)
            state = f"ended with exit code {worker.exit_code}{self._progress(worker)} without an error message"
            return self._failed(worker, [f"{self._name(worker)} {state}"])
        worker, first = reported[0]
        lines = list(first["lines"])
        if first["kind"] != "user":
            lines[0] = f"{self._name(worker)}{self._progress(worker)}: {lines[0]}"
        lines = _save_trace(lines) if first["kind"] == "crash" else lines
        return self._failed(worker, lines, first["code"], is_cause=first["kind"] in ("user", "crash"))

    def _failed(self, worker: Worker, lines: list[str], code: int = EXIT_FAILURE, *, is_cause: bool = True) -> Failure:
        return Failure(lines, code, is_cause, worker.rank, self._mesh.place_text(worker.rank), self._step(worker))

    def _name(self, worker: Worker) -> str:
        """Return rank, place in the mesh, machine and process of a worker."""
        place = self._mesh.place_text(worker.rank)
        where = f" on {socket.gethostname()}" if self._placement.num_nodes > 1 else ""
        return f"rank {worker.rank}{where} ({f'{place}, ' if place else ''}process {worker.process.pid})"

    def _step(self, worker: Worker) -> int:
        return self._steps.read(worker.rank % self._placement.ranks_per_node)

    def _progress(self, worker: Worker) -> str:
        step = self._step(worker)
        return f" after step {step:,}" if step else " before its first step"

    def start(self) -> None:
        """Start the workers."""
        place = self._placement
        listener = None
        if place.rendezvous is None:  # only local processes may connect
            listener = socket.create_server(("127.0.0.1", 0))
            address = listener.getsockname()[:2]
        else:
            address = place.rendezvous
        for local_rank in range(place.ranks_per_node):
            rank = place.node_rank * place.ranks_per_node + local_rank
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            shared = [write_end, self._steps.descriptor]
            shared += [listener.fileno()] if listener and rank == 0 else []
            with signals_blocked(EXIT_CODES):  # until the rank has handlers for them
                process = subprocess.Popen(
                    [sys.executable, "-m", "stoker.trainer.cli.rank_entry"],
                    stdin=subprocess.PIPE,
                    env=worker_environment(
                        rank=rank,
                        world_size=place.world_size,
                        local_rank=local_rank,
                        ranks_per_node=place.ranks_per_node,
                        address=address,
                        # Set at process start: user modules imported by the worker may import torch.
                        env_vars=self._config.root.env_vars,
                    ),
                    pass_fds=shared,
                    start_new_session=True,
                )
            os.close(write_end)
            self._workers.append(Worker(rank, process, read_end))
            task = {
                "command": sys.argv,
                "imports": list(self._imports),
                "document": self._config.document,
                "provenance": self._config.provenance(),
                "digest": self._config.digest,
                "rank": rank,
                "world_size": place.world_size,
                "local_rank": local_rank,
                "node": place.node_rank,
                "num_nodes": place.num_nodes,
                "address": address,
                "listener": listener.fileno() if listener and rank == 0 else None,
                "session": self._session,
                "outcome": write_end,
                "steps": self._steps.descriptor,
            }
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has exited already, which `poll` reports
                process.stdin.write(json.dumps(task).encode() + b"\n")
                process.stdin.flush()
            if self._signal is not None:  # the signal may have arrived before this worker was started
                self.forward(self._signal)
        if listener is not None:
            listener.close()


def _save_trace(lines: list[str]) -> list[str]:
    """Move the traceback after the first line to a file; return `lines` unchanged if it cannot be written."""
    path = save_traceback("\n".join(lines) + "\n")
    return lines if path is None else [f"{lines[0]}; the traceback is in {path}"]


def _stopped_early(worker: Worker) -> bool:
    """Return True if a signal ended the worker before its run handled signals."""
    return worker.outcome is None and worker.exit_code in EXIT_CODES.values()


def _succeeded(worker: Worker) -> bool:
    return worker.exit_code in (EXIT_OK, *EXIT_CODES.values())
