"""Training progress on the terminal: aligned log lines, and below them a live progress panel on a TTY."""

from __future__ import annotations

import time
from typing import Any

from ..utils.text import format_duration
from .step_report import StepReport

_REDRAW_SECONDS = 0.2
_MARGIN = 4
"""Columns right of the panel, for the ^C a terminal echoes: if that wraps, the next redraw misses the top border."""


class ProgressDisplay:
    """Show the progress of a run.

    Args:
        max_steps: steps of the whole run.
        live: show the live panel, if the output is a terminal.
        title: heading of the panel.
    """

    def __init__(self, max_steps: int, *, live: bool, title: str = "stoker") -> None:
        from rich.console import Console

        self._console = Console(soft_wrap=True, highlight=False)
        self.max_steps = max_steps
        self._title = title
        self._live: Any = None
        self._use_live = live and self._console.is_terminal
        self._report: StepReport | None = None
        self._val_loss: float | None = None
        self._step_seconds: float | None = None
        self._drawn_at = 0.0

    def print(self, line: str) -> None:
        """Print a line, above the live panel if there is one."""
        console = self._live.console if self._live is not None else self._console
        console.print(line, markup=False)

    def show_step(self, report: StepReport) -> str:
        """Show the metrics of a step; return them as a line."""
        self._report = report
        self._step_seconds = report.step_seconds or self._step_seconds
        line = format_step(report, self.max_steps, self.remaining_seconds())
        self.print(line)
        if self._use_live:
            self._draw()
        return line

    def show_validation(self, step: int, metrics: dict[str, float]) -> str:
        """Show the metrics of a validation; return them as a line."""
        self._val_loss = metrics["val_loss"]
        line = format_validation(step, self.max_steps, metrics)
        self.print(line)
        if self._live is not None:
            self._draw(force=True)
        return line

    def remaining_seconds(self) -> float | None:
        """Estimate the remaining time in seconds, without validation and checkpoints; None before the first report."""
        if self._report is None or self._step_seconds is None:
            return None
        return (self.max_steps - self._report.step) * self._step_seconds

    def close(self) -> None:
        """Stop the live panel; its last state stays on the screen."""
        if self._live is not None:
            self._draw(force=True)
            self._live.stop()
            self._live = None

    def _draw(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and self._live is not None and now - self._drawn_at < _REDRAW_SECONDS:
            return
        self._drawn_at = now
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._console.show_cursor(True)  # a killed process would leave it hidden
        self._live.update(self._render(), refresh=True)

    def _render(self) -> Any:
        from rich.panel import Panel as Frame
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        report = self._report
        if report is None:
            return ""
        grid = Table.grid(padding=(0, 3))
        for _ in range(4):
            grid.add_column()
        cells = [
            f"step {report.step:,} / {self.max_steps:,}",
            f"loss {report.loss:.4f}",
            f"val loss {_optional(self._val_loss, '.4f')}",
            f"lr {report.lr:.3g}",
            f"grad norm {report.grad_norm:.3g}",
            f"{_optional(report.tokens_per_second, ',.0f')} tokens/s",
            "" if report.mfu is None else f"MFU {report.mfu:.1%}",
            f"memory {_optional(report.memory_gib, '.2f')} GiB",
        ]
        if "load_cv" in report.experts:
            cells.append(f"load CV {report.experts['load_cv']:.2f}")
        for first in range(0, len(cells), 4):
            grid.add_row(*cells[first : first + 4])
        outer = Table.grid()
        outer.add_row(grid)
        outer.add_row(ProgressBar(total=self.max_steps, completed=report.step))
        remaining = self.remaining_seconds()
        eta = f"{format_duration(remaining)} left" if remaining is not None else ""
        return Frame(outer, title=self._title, subtitle=eta, width=max(1, self._console.width - _MARGIN))


def format_step(report: StepReport, max_steps: int, remaining: float | None) -> str:
    """Format a step as an aligned line; metrics that were not measured are left out."""
    parts = [
        f"step {report.step:>{len(str(max_steps))}}/{max_steps}",
        f"loss {report.loss:7.4f}",
        f"lr {report.lr:.2e}",
        f"grad norm {report.grad_norm:6.3f}",
    ]
    if "load_cv" in report.experts:
        parts.append(f"load CV {report.experts['load_cv']:5.2f}")
    if report.step_seconds is not None:
        parts.append(f"{report.step_seconds * 1e3:7.1f} ms/step")
    if report.tokens_per_second is not None:
        parts.append(f"{report.tokens_per_second:9,.0f} tokens/s")
    if report.mfu is not None:
        parts.append(f"MFU {report.mfu:5.1%}")
    if report.memory_gib is not None:
        parts.append(f"{report.memory_gib:5.2f} GiB")
    if remaining is not None:
        parts.append(f"{format_duration(remaining)} left")
    return "  ".join(parts)


def format_validation(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    """Format a validation as an aligned line: loss, then the other metrics."""
    others = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items() if name != "val_loss")
    return f"step {step:>{len(str(max_steps))}}/{max_steps}  val loss {metrics['val_loss']:.4f}  {others}".rstrip()


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
