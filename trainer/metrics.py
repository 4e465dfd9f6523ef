"""What a run measures, and where it is written: metrics.jsonl, TensorBoard events, run.log and the terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import EXIT_IO, UserError
from .panel import Panel


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one log line says; rates are None where there was nothing to measure them on.

    Attributes:
        step: completed optimizer steps.
        loss: training loss, mean over the steps since the last report, nats per token.
        grad_norm: norm of the last step's gradients before clipping.
        lr: learning rate of the last step.
        consumed_samples: samples trained on since the start of training.
        step_seconds: mean time of a step since the last report, validation and checkpoints left out.
        tokens_per_second: the same as a rate.
        mfu: model FLOPs over the card's dense bf16 peak.
        memory_gib: peak memory of the device, or of the process on a CPU.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None

    def figures(self) -> dict[str, float]:
        """Name to value, of those that were measured."""
        fields = ("loss", "grad_norm", "lr", "consumed_samples", "step_seconds", "tokens_per_second", "mfu")
        values = {name: getattr(self, name) for name in (*fields, "memory_gib")}
        return {name: value for name, value in values.items() if value is not None}


class Journal:
    """Writes a run's figures and lines to every place they go.

    Args:
        directory: the run directory.
        panel: the terminal.
        tensorboard: write TensorBoard events too.
        resumed_at: a run that goes on at this step drops figures of later steps, which it is about to measure again.

    Raises:
        UserError: the files cannot be written (exit code 74).
    """

    def __init__(self, directory: Path, panel: Panel, *, tensorboard: bool, resumed_at: int = 0) -> None:
        self._panel = panel
        self._metrics_path = directory / "metrics.jsonl"
        try:
            _drop_lines_after(self._metrics_path, resumed_at)
            self._metrics = self._metrics_path.open("a", encoding="utf-8")
            self._log = (directory / "run.log").open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(error) from error
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # a second of import

            purge = resumed_at + 1 if resumed_at else None
            self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=purge)

    def say(self, line: str) -> None:
        """A line for the terminal and run.log."""
        self._panel.say(line)
        self.note(line)

    def note(self, text: str) -> None:
        """Text for run.log only."""
        try:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._log.flush()
        except OSError as error:
            raise _cannot_write(error) from error

    def report(self, report: StepReport) -> None:
        """The figures of a step."""
        self._write(report.step, report.figures(), "train")
        self._panel.show_step(report)

    def report_validation(self, step: int, figures: dict[str, float]) -> None:
        """The figures of a validation: `val_loss` and what was measured with it."""
        self._write(step, figures, "validation")
        self._panel.show_validation(step, figures)

    def close(self) -> None:
        """Flush and close everything."""
        self._panel.close()
        if self._writer is not None:
            self._writer.close()
        for file in (self._metrics, self._log):
            file.close()

    def _write(self, step: int, figures: dict[str, float], group: str) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        try:
            self._metrics.write(json.dumps({"step": step, **finite, "time": round(time.time(), 3)}) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise _cannot_write(error) from error
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)


def peak_memory_gib(device: torch.device) -> float | None:
    """Peak memory in GiB: allocated on a CUDA device, resident of the process elsewhere; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the whole lines of steps up to `step`; the last line of a killed run may be torn."""
    if not path.exists():
        return
    kept: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                document = json.loads(line)
                if line.endswith("\n") and document["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)


def _cannot_write(error: OSError) -> UserError:
    return UserError(f"cannot write the run's logs: {error.filename or ''} {error.strerror or error}".strip(), EXIT_IO)
