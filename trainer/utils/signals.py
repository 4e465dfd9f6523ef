"""Signals that end a run, and their exit codes; until the run handles them, the process exits at once.

SIGTERM is what schedulers send; SLURM's `--signal` and submitit are often set to SIGUSR1 or SIGUSR2, which a requeued
job expects to be followed by a checkpoint, and SIGHUP is sent when a terminal closes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from .errors import EXIT_INTERRUPTED, EXIT_TERMINATED

TERMINATION_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP") if hasattr(signal, name)
)
"""Signals after which a run saves a checkpoint and exits with 143; Windows has only the first."""
EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, **dict.fromkeys(TERMINATION_SIGNALS, EXIT_TERMINATED)}
_MAIN_THREAD_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1  # sys/prctl.h

Handler = Callable[[int, FrameType | None], object]


def set_handlers(handler: Handler, numbers: tuple[signal.Signals, ...] = TERMINATION_SIGNALS) -> dict[int, Any]:
    """Handle the signals with `handler`, in the main thread only; return the previous handlers, for `restore_handlers`.

    SIGUSR1, SIGUSR2 and SIGHUP are left alone if they are ignored, as by nohup, or have a handler of the user's code.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    for number, before in previous.copy().items():
        if number in (signal.SIGINT, signal.SIGTERM) or before in (signal.SIG_DFL, exit_now):
            signal.signal(number, handler)
        else:
            del previous[number]
    return previous


def restore_handlers(previous: dict[int, Any]) -> None:
    """Restore what `set_handlers` returned."""
    for number, handler in previous.items():
        signal.signal(number, handler)


@contextmanager
def handlers_set(handler: Handler, numbers: tuple[signal.Signals, ...] = TERMINATION_SIGNALS) -> Iterator[None]:
    """Context of `set_handlers`."""
    previous = set_handlers(handler, numbers)
    try:
        yield
    finally:
        restore_handlers(previous)


@contextmanager
def signals_blocked(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Context in which signals do not reach this thread, nor processes that it starts; those that arrive are kept."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Have Linux send this process a signal when its parent exits; do nothing on other systems."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def exit_now(number: int, frame: FrameType | None = None) -> None:
    """Handler that exits this process at once, with the exit code of the signal."""
    os._exit(EXIT_CODES[signal.Signals(number)])


def raise_on_ctrl_c() -> None:
    """Raise KeyboardInterrupt on SIGINT, as Python does by default, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_on_signals(numbers: tuple[signal.Signals, ...] = TERMINATION_SIGNALS) -> None:
    """Exit this process on the signals at once, with their exit code, while nothing else handles them.

    Only for the main thread of a command, which it stays in effect for.

    Python calls handlers in the main thread, between two bytecodes: while it waits inside a library, as for a
    rendezvous, a thread that is woken through a pipe exits.
    """
    set_handlers(exit_now, numbers)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):  # a fork shares the pipe: a signal to the child would end this process
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    threading.Thread(target=_exit_when_woken, args=(read,), name="signals", daemon=True).start()


def _exit_when_woken(pipe: int) -> None:
    while numbers := os.read(pipe, 64):
        time.sleep(_MAIN_THREAD_SECONDS)  # the main thread may handle it, with handlers that were set meanwhile
        for number in numbers:
            if number in EXIT_CODES and signal.getsignal(number) is exit_now:
                exit_now(number)
