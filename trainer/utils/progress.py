"""Progress of long commands on standard error: a live bar on a terminal, else a line every half minute.

Library functions count their work in a `Progress`, which shows it only where the command line has asked for that by
`shown`: not in training, which has a display of its own, nor in workers and other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .text import format_duration

if TYPE_CHECKING:
    from rich.console import Console

DELAY_SECONDS = 0.5
"""Work that takes less shows no bar."""
_REDRAW_SECONDS = 0.1
_LINE_SECONDS = 30.0
_BYTE_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))

T = TypeVar("T")


class _Screen:
    """Where progress is shown, if anywhere.

    Attributes:
        is_shown: True within `shown`.
        current: the outermost `Progress` that is running, which alone is shown.
    """

    def __init__(self) -> None:
        self.is_shown = False
        self.current: Progress | None = None


_SCREEN = _Screen()


@contextmanager
def shown(enabled: bool = True) -> Iterator[None]:
    """Context in which this process shows progress, or with False does not."""
    before, _SCREEN.is_shown = _SCREEN.is_shown, enabled
    try:
        yield
    finally:
        _SCREEN.is_shown = before


def stderr_console() -> Console:
    """Return the console of standard error."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


class Progress:
    """Context that counts finished work; may be advanced from several threads.

    Within another one of the same title it advances that, within any other it is not shown.

    Args:
        title: what is done, such as `writing`.
        total: amount of work.
        unit: plural of what is counted; `bytes` are shown as MB and the like.
    """

    def __init__(self, title: str, total: float, unit: str) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = self._resumed = 0.0
        self._note = ""
        self._lock = Lock()
        self._console: Console | None = None
        self._bar: Any = None
        self._outer: Progress | None = None
        self._started = self._due = 0.0

    def advance(self, amount: float = 1) -> None:
        """Count finished work."""
        if self._outer is not None:
            self._outer.advance(amount)
        with self._lock:
            self.done += amount
            self._show_if_due()

    def update(self, done: float, note: str = "") -> None:
        """Set the amount of finished work, and a note to show beside it."""
        with self._lock:
            self.done, self._note = done, note
            self._show_if_due()

    def resume(self, amount: float) -> None:
        """Count work that an earlier run has finished, which does not count for the rate."""
        with self._lock:
            self.done += amount
            self._resumed += amount

    def hide(self) -> None:
        """Remove the bar until the next update, before something else is printed."""
        with self._lock:
            if self._bar is not None:
                self._bar.live.transient = True
                self._stop()

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, each of which counts as 1 once it is dealt with."""
        for item in items:
            yield item
            self.advance()

    def __enter__(self) -> Progress:
        self._started = time.monotonic()
        self._due = self._started + DELAY_SECONDS if _SCREEN.is_shown and self.total else float("inf")
        if _SCREEN.current is None:
            _SCREEN.current = self
        else:
            self._due = float("inf")
            self._outer = _SCREEN.current if _SCREEN.current.title == self.title else None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if _SCREEN.current is self:
            _SCREEN.current = None
        with self._lock:
            if kind is None:
                self.done = self.total
                if self._bar is not None or time.monotonic() >= self._due:
                    self._show(time.monotonic())
            self._stop()

    def _show_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._show(now)

    def _show(self, now: float) -> None:
        self._console = self._console or stderr_console()
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            if now >= self._started + _LINE_SECONDS:
                percent = f"{self.done / self.total:.0%}"
                self._console.print(f"{self.title}: {percent}  {self._text(now)}", markup=False, soft_wrap=True)
            self._due = now + _LINE_SECONDS - (now - self._started) % _LINE_SECONDS
            return
        self._due = now + _REDRAW_SECONDS
        text = self._text(now)
        if self._bar is None:
            self._bar = self._started_bar(self._console, text)
        self._bar.update(self._bar.task_ids[0], completed=self.done, text=text, refresh=True)

    def _started_bar(self, console: Console, text: str) -> Any:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        # No thread redraws the bar, and nobody's output is redirected to standard error.
        bar = RichProgress(*columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        bar.update(bar.add_task(self.title, total=self.total), completed=self.done, text=text)
        bar.start()
        console.show_cursor(True)  # a killed process would leave it hidden
        return bar

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _text(self, now: float) -> str:
        """Return counts, rate, elapsed and remaining time, such as `3/8 batches  1.5/s  2 s  3 s left`."""
        seconds = max(now - self._started, 1e-9)
        rate = (self.done - self._resumed) / seconds
        if self.unit == "bytes":
            size, unit = next((row for row in _BYTE_UNITS if self.total >= row[0]), _BYTE_UNITS[-1])
            counts, speed = f"{self.done / size:,.1f}/{self.total / size:,.1f} {unit}", f"{rate / 1e6:,.1f} MB/s"
        else:
            counts = f"{self.done:,.0f}/{self.total:,.0f} {self.unit}"
            speed = f"{rate:,.1f}/s" if rate >= 1 else f"{1 / rate:,.1f} s each" if rate > 0 else ""
        left = f"{format_duration((self.total - self.done) / rate)} left" if rate > 0 and self.done < self.total else ""
        return "  ".join(filter(None, (counts, self._note, speed, format_duration(seconds), left)))
