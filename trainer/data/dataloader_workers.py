"""Worker processes of the dataloader: each prepares every n-th item, and one that dies is replaced.

Items are pure functions of their position: those that a dead worker has not delivered are prepared again, and the run
is bitwise the same. With torch's DataLoader it would end, at any instant of a step: its workers share a queue, which a
killed one may leave locked, and named semaphores, which a worker that still starts when the run exits does not find.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch
from torch._utils import ExceptionWrapper

from ..utils.errors import EXIT_FAILURE, UserError
from ..utils.signals import EXIT_CODES

_REQUESTS = 2
"""Items requested of each worker in advance."""
_MAX_DEATHS = 3
_END_SECONDS = 5.0
_CURE = "lower `model.data.num_workers`, or set it to 0 to prepare batches in a thread"

Item = TypeVar("Item")
Result = TypeVar("Result")


class WorkerLostError(UserError):
    """A worker died several times before it delivered an item."""


class WorkerPool(Generic[Item, Result]):
    """Iterable of `prepare(item)` for a sequence of items, in their order, computed by worker processes.

    An exception of `prepare` is raised at its item. To be iterated once, in any thread.

    Args:
        prepare: a pure function that can be pickled.
        items: a sequence without end, of what can be pickled.
        num_workers: number of processes.
        report: logs a line when a worker is replaced.
    """

    def __init__(
        self,
        prepare: Callable[[Item], Result],
        items: Iterable[Item],
        num_workers: int,
        report: Callable[[str], None] = print,
    ) -> None:
        self._items = items
        self._report = report
        self._workers = [_Worker(number, prepare) for number in range(num_workers)]
        self._lock = threading.Lock()
        self._closed = False
        atexit.register(self.close)  # before multiprocessing's own, which would let this see a worker die

    def __iter__(self) -> Iterator[Result]:
        """Start the workers and yield the results until `close`.

        Raises:
            WorkerLostError: a worker died three times before it delivered an item.
        """
        items = iter(self._items)
        for worker in self._workers:
            self._start(worker)
        if self._closed:
            return
        for _ in range(_REQUESTS):
            for worker in self._workers:
                worker.request(next(items))
        for worker in cycle(self._workers):
            while (result := worker.receive()) is None and not self._closed:
                self._replace(worker)
            if self._closed:
                return
            worker.request(next(items))
            if isinstance(result, ExceptionWrapper):
                result.reraise()
            if isinstance(result, UserError):
                raise result
            yield result  # pyrefly: ignore[invalid-yield]

    def close(self) -> None:
        """Kill the workers, also those that are still starting."""
        with self._lock:
            self._closed = True
            atexit.unregister(self.close)
            for worker in self._workers:
                worker.kill()

    def _start(self, worker: _Worker) -> None:
        with self._lock:
            if not self._closed:
                worker.start()

    def _replace(self, worker: _Worker) -> None:
        with self._lock:
            if self._closed:
                return
            death = worker.bury()
            if worker.deaths == _MAX_DEATHS:
                text = f"dataloader worker {worker.number} {death}, for the third time without a batch; {_CURE}"
                raise WorkerLostError(text, EXIT_FAILURE)
            worker.start()
        self._report(
            f"warning: dataloader worker {worker.number} {death}; another one prepares its batches again. If this "
            f"recurs, {_CURE}"
        )


class _Worker:
    """A worker process, and the items requested of it."""

    def __init__(self, number: int, prepare: Callable[[Any], Any]) -> None:
        self.number = number
        self.deaths = 0
        self._prepare = prepare
        self._requested: deque[Any] = deque()
        self._process: Any = None
        self._connection: Any = None

    def start(self) -> None:
        """Start the process, and request of it what an earlier one has not delivered."""
        # A fork would copy locks held by threads of this process.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(self._prepare, theirs), name=f"dataloader worker {self.number}", daemon=True
        )
        with _signals_blocked(), theirs, suppress(BrokenPipeError):  # it died while it started, which `receive` notices
            self._process.start()
        for item in self._requested:
            self._send(item)

    def request(self, item: Any) -> None:
        """Request an item."""
        self._requested.append(item)
        self._send(item)

    def receive(self) -> Any:
        """Return the next requested item; None if the process has died."""
        try:
            result = self._connection.recv()
        except (EOFError, OSError):
            return None
        self._requested.popleft()
        self.deaths = 0
        return result

    def bury(self) -> str:
        """Wait for the end of a process that has died; return how it ended."""
        self._connection.close()
        self.deaths += 1
        if self._process.pid is None:
            return "died while it started"
        self._process.join(_END_SECONDS)
        self.kill()
        code = self._process.exitcode or 0
        if code >= 0:
            return f"(process {self._process.pid}) ended with exit code {code}"
        cause = ", as when memory runs out" if -code == signal.SIGKILL else ""
        return f"(process {self._process.pid}) was killed by {signal.Signals(-code).name}{cause}"

    def kill(self) -> None:
        """Kill the process, if it was started, and wait for its end."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.join()

    def _send(self, item: Any) -> None:
        with suppress(OSError):  # it has died, which `receive` notices
            self._connection.send(item)


def _work(prepare: Callable[[Any], Any], connection: Connection) -> None:
    """Run a worker process."""
    threading.Thread(target=_exit_with_parent, name="parent", daemon=True).start()
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_exit_on_sigterm_from, args=(os.getppid(),), name="sigterm", daemon=True).start()
    torch.set_num_threads(1)
    serve(prepare, connection)


def serve(prepare: Callable[[Any], Any], connection: Connection) -> None:
    """Prepare the items that come through a connection, until it is closed."""
    with suppress(EOFError, OSError):  # the parent has exited
        while True:
            item = connection.recv()
            try:
                result: Any = prepare(item)
            except UserError as error:  # as a value: its lines are for the user, without a traceback
                result = error
            except Exception:
                result = ExceptionWrapper(where=f"in {multiprocessing.current_process().name}")
            connection.send(result)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is no worker"
    parent.join()
    os._exit(1)


def _exit_on_sigterm_from(parent: int) -> None:
    """Exit on the SIGTERM with which multiprocessing ends workers; ignore those of others."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Context in which new processes inherit the stop signals as blocked, from their first instruction.

    Terminals and schedulers send them to all processes, but the run needs its workers until it has finished the step.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    tracker = {signal.SIGINT, signal.SIGTERM}  # which the resource tracker unblocks and ignores
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(EXIT_CODES) - tracker)
    try:
        resource_tracker.ensure_running()  # here, as it would unblock these also for what is started after it
        signal.pthread_sigmask(signal.SIG_BLOCK, tracker if hasattr(signal, "sigwaitinfo") else {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
