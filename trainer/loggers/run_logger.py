"""What a run measures, and where it is written: metrics.jsonl, run.log, the terminal, and the sinks of `loggers`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..config.run_config import RunConfig
from ..utils.durable_files import replace_file
from ..utils.errors import EXIT_IO, UserError
from .logger_backends import MetricSink, open_sinks
from .progress_bar import Panel


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one log line says; rates are None where there was nothing to measure them on.

    Attributes:
        step: completed optimizer steps.
        loss: training loss, mean over the good steps since the last regular report, nats per token.
        grad_norm: norm of the last step's gradients before clipping.
        lr: learning rate of the last step.
        consumed_samples: samples trained on since the start of training.
        skipped_steps: steps since the start of training whose gradients were not finite.
        step_seconds: mean time of a step since the last report, validation and checkpoints left out.
        tokens_per_second: the same as a rate.
        mfu: model FLOPs over the dense bf16 peak of all cards of the run.
        memory_gib: peak memory of the device, or of the process on a CPU.
        experts: the load of the experts since the last regular report (`ExpertLoad.take`); empty without experts.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    consumed_samples: int
    skipped_steps: int = 0
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None
    experts: Mapping[str, float] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Name to value, of those that were measured."""
        fields = ("loss", "grad_norm", "lr", "consumed_samples", "skipped_steps", "step_seconds", "tokens_per_second")
        values = {name: getattr(self, name) for name in (*fields, "mfu", "memory_gib")}
        return {name: value for name, value in values.items() if value is not None} | dict(self.experts)


class Journal:
    """Writes a run's figures and lines to every place they go. One process of a run has one; the others are silent.

    A context: leaving it closes everything, and tells the sinks when the run failed.

    Args:
        directory: the run directory; None writes nothing anywhere (`silent`).
        panel: the terminal; None prints nothing.
        resumed_at: a run that goes on at this step drops figures of later steps, which it is about to measure again.
        validates_again: and those of the validation of this step.

    Raises:
        UserError: the files cannot be written (exit code 74).
    """

    def __init__(
        self, directory: Path | None, panel: Panel | None, *, resumed_at: int = 0, validates_again: bool = False
    ) -> None:
        self._panel = panel
        self._metrics = self._log = None
        self._sinks: dict[str, MetricSink] = {}
        self._warned: set[str] = set()
        if directory is None:
            return
        path = directory / "metrics.jsonl"
        try:
            _drop_lines_after(path, resumed_at, validates_again)
            self._metrics = path.open("a", encoding="utf-8")
            self._log = (directory / "run.log").open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(error) from error

    @classmethod
    def open(
        cls, config: RunConfig, directory: Path, panel: Panel, *, resumed_at: int, validates_again: bool = False
    ) -> Journal:
        """The journal of the process that writes for all, with the loggers of the configuration.

        Raises:
            UserError: the files cannot be written (exit code 74), or a logger cannot start.
        """
        journal = cls(directory, panel, resumed_at=resumed_at, validates_again=validates_again)
        try:
            journal._sinks = open_sinks(config, directory, resumed_at)
        except OSError as error:
            journal.close(failed=True)
            raise _cannot_write(error) from error
        except BaseException:
            journal.close(failed=True)
            raise
        return journal

    @classmethod
    def silent(cls) -> Journal:
        """The journal of every other process."""
        return cls(None, None)

    @property
    def writes(self) -> bool:
        """Whether this process writes files for the run."""
        return self._log is not None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(failed=kind is not None)

    def say(self, line: str) -> None:
        """A line for the terminal and run.log."""
        if self._panel is not None:
            self._panel.say(line)
        self.note(line)

    def note(self, text: str) -> None:
        """Text for run.log only."""
        if self._log is None:
            return
        try:
            self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._log.flush()
        except OSError as error:
            raise _cannot_write(error) from error

    def report(self, report: StepReport) -> None:
        """The figures of a step."""
        self._write(report.step, report.figures(), "train")
        if self._panel is not None:
            self._panel.show_step(report)

    def report_validation(self, step: int, figures: dict[str, float]) -> None:
        """The figures of a validation: `val_loss` and what was measured with it."""
        self._write(step, figures, "validation")
        if self._panel is not None:
            self._panel.show_validation(step, figures)

    def close(self, *, failed: bool = False) -> None:
        """Flush and close everything; a second time does nothing.

        Args:
            failed: the run ended in an error.
        """
        if self._panel is not None:
            self._panel.close()
        for name, sink in self._sinks.items():
            try:
                sink.close(failed=failed)
            except Exception as error:
                self._warn(name, error, closing=True)
        self._sinks = {}
        for file in (self._metrics, self._log):
            if file is not None:
                with suppress(OSError):  # what it holds still was refused before, and that was told
                    file.close()
        self._metrics = self._log = None

    def _write(self, step: int, figures: dict[str, float], group: str) -> None:
        if self._metrics is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        try:
            self._metrics.write(json.dumps({"step": step, **finite, "time": round(time.time(), 3)}) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise _cannot_write(error) from error
        for name, sink in self._sinks.items():
            try:
                sink.log(step, figures, group)
            except Exception as error:
                self._warn(name, error)

    def _warn(self, name: str, error: Exception, *, closing: bool = False) -> None:
        """Say once that a logger fails: a run is worth more than its figures elsewhere."""
        if name in self._warned and not closing:
            return
        self._warned.add(name)
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        text = " ".join(f"{type(error).__name__}: {error}{cause}".split())[:300]
        self.say(f"warning: {name} fails, and training goes on without it: {text}")


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


def _drop_lines_after(path: Path, step: int, validates_again: bool) -> None:
    """Keep the whole lines of steps up to `step`; the last line of a killed run may be torn.

    Args:
        path: of metrics.jsonl.
        step: where the run goes on.
        validates_again: without the validation of that step.
    """
    if not path.exists():
        return
    kept: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                document = json.loads(line)
                again = validates_again and document["step"] == step and "val_loss" in document
                if line.endswith("\n") and document["step"] <= step and not again:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
    replace_file(path, "".join(kept).encode())


def _cannot_write(error: OSError) -> UserError:
    return UserError(f"cannot write the run's logs: {error.filename or ''} {error.strerror or error}".strip(), EXIT_IO)
