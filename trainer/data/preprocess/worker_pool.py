"""Worker process pool: distributes parts and collects the results."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from ...utils.errors import UserError
from .worker_process import run_worker

_WAIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Task:
    """One part of the work.

    Attributes:
        key: its position in the order of the documents.
        message: the request to the worker.
        data: the bytes of a compressed input, or None.
        weight: bytes of input files, for progress.
    """

    key: tuple[int, int]
    message: Mapping[str, Any]
    data: bytes | None
    weight: int


@dataclass
class _Worker:
    process: BaseProcess
    connection: Any
    task: Task | None = field(default=None)


class WorkerPool:
    """Spawned (not forked) worker processes, which end with the context.

    Args:
        settings: common to all parts; serializable as JSON.
    """

    def __init__(self, count: int, settings: Mapping[str, Any]) -> None:
        self._count = count
        self._settings = json.dumps(settings).encode()
        self._workers: list[_Worker] = []

    def run(
        self,
        tasks: Iterator[Task],
        on_answer: Callable[[Task, Mapping[str, Any]], None],
        on_wait: Callable[[], None],
    ) -> None:
        """Run all tasks.

        Args:
            tasks: read one ahead of the free workers.
            on_answer: called with each task and the worker's answer, in any order.
            on_wait: called at least twice a second.

        Raises:
            UserError: a worker was killed.
        """
        next_task = next(tasks, None)
        while next_task is not None or any(worker.task for worker in self._workers):
            free = next((worker for worker in self._workers if worker.task is None), None)
            if next_task is not None and free is None and len(self._workers) < self._count:
                free = self._start()
            if next_task is not None and free is not None:
                self._send(free, next_task)
                next_task = next(tasks, None)
                continue
            busy: dict[Any, _Worker] = {
                worker.connection: worker for worker in self._workers if worker.task is not None
            }
            for connection in wait(list(busy), _WAIT_SECONDS):
                worker = busy[connection]
                task = worker.task
                assert task is not None
                on_answer(task, self._receive(worker))
                worker.task = None
            on_wait()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self._workers:
            worker.connection.close()
            if kind is not None:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()

    def _start(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=run_worker, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        worker = _Worker(process, ours)
        self._workers.append(worker)
        try:
            ours.send_bytes(self._settings)
        except OSError:
            raise self._killed(worker) from None
        return worker

    def _send(self, worker: _Worker, task: Task) -> None:
        worker.task = task
        try:
            worker.connection.send_bytes(json.dumps({**task.message, "has_data": task.data is not None}).encode())
            if task.data is not None:
                worker.connection.send_bytes(task.data)
        except OSError:
            raise self._killed(worker) from None

    def _receive(self, worker: _Worker) -> Any:
        try:
            return json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._killed(worker) from None

    def _killed(self, worker: _Worker) -> UserError:
        worker.process.join()
        code = worker.process.exitcode or 0
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return UserError(
            f"a worker process ended by {cause}"
            + (", as when memory runs out: use fewer --workers" if code == -9 else "")
            + "; the finished parts are kept: run the same command to resume"
        )
