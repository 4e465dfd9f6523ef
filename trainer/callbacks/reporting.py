"""Reports of training steps: loss, gradient norm, throughput and memory since the last report.

A report begins at the end of its step: asynchronous device-to-host copies are started and the host-side values are
recorded. It finishes when the values are read and logged. In between the host may launch the next step, so that the
device is not idle; the logged values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..lightning.lightning_module import LanguageModule, StepMetrics
from ..loggers.run_logger import RunLogger
from ..loggers.step_report import StepReport
from ..utils.async_host_copy import DeviceTimestamp
from ..utils.host_memory import peak_memory_gib
from .divergence import LossMonitor
from .expert_load import ExpertLoadMetrics
from .profiler import ProfilerList


@dataclass(frozen=True, slots=True)
class ThroughputFactors:
    """Constants for computing throughput and MFU from step times.

    Attributes:
        tokens_per_sample: target positions in a sample, padding included.
        flops_per_token: model FLOPs, forward and backward.
        peak_flops: peak FLOP/s of all devices together, or None if unknown.
    """

    tokens_per_sample: int
    flops_per_token: float
    peak_flops: float | None


@dataclass(frozen=True, slots=True)
class _PendingReport:
    """A report whose device values are being copied, with the host-side values at the end of its step."""

    step: int
    restart: bool
    lr: float
    memory_gib: float | None
    values: Callable[[], list[StepMetrics]]
    experts: Callable[[], Mapping[str, float]]
    timestamp: DeviceTimestamp


@dataclass(frozen=True, slots=True)
class _Window:
    """Start of the timed window: step and timestamp, after anything that is not a training step."""

    step: int
    start: DeviceTimestamp


@dataclass(eq=False)
class StepReporter:
    """Report training steps, synchronously or deferred by one step.

    Attributes:
        logger: the run's logger.
        monitor: monitors the metrics of every step.
        throughput: tokens and FLOPs of a sample.
        consumed_samples: number of samples trained on after a number of steps.
        profilers: their overhead is excluded from step times.
        expert_load: None without experts.
    """

    logger: RunLogger
    monitor: LossMonitor
    throughput: ThroughputFactors
    consumed_samples: Callable[[int], int]
    profilers: ProfilerList
    expert_load: ExpertLoadMetrics | None
    _window: _Window | None = field(default=None, init=False)
    _pending: _PendingReport | None = field(default=None, init=False)

    @property
    def has_started(self) -> bool:
        """True if a timed window has started, i.e. this process has reported already."""
        return self._window is not None

    def report(self, module: LanguageModule, *, restart: bool) -> dict[str, float]:
        """Report this step synchronously; return the metrics used for checkpoints and early stopping.

        With `restart`, at a regular report, new means are started.

        Raises:
            DivergedError: too many steps in a row were not finite.
        """
        with self.profilers.phase("report"):
            metrics = self._finish(self._begin(module, restart=restart))
        # The first step of a process compiles and allocates, so the clock starts after it.
        self.restart_clock(module)
        return metrics

    def start(self, module: LanguageModule, *, restart: bool) -> None:
        """Begin the report of this step without a host sync; `finish` must be called before the next one."""
        assert self._pending is None
        with self.profilers.phase("report begun"):
            self._pending = self._begin(module, restart=restart)

    def finish(self) -> None:
        """Finish the pending report, if there is one.

        Raises:
            DivergedError: too many steps in a row were not finite.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with self.profilers.phase("report"):
            self._finish(pending)
        self._window = _Window(pending.step, pending.timestamp)

    def restart_clock(self, module: LanguageModule) -> None:
        """Restart the timed window, after work that is not part of a step."""
        self._window = _Window(module.step, DeviceTimestamp(module.device, self.profilers.overhead_seconds))

    def _begin(self, module: LanguageModule, *, restart: bool) -> _PendingReport:
        return _PendingReport(
            step=module.step,
            restart=restart,
            lr=module.lr,
            memory_gib=peak_memory_gib(module.device),
            values=module.read_metrics_async(),
            experts=self.expert_load.collect(module.step, restart=restart) if self.expert_load is not None else dict,
            timestamp=DeviceTimestamp(module.device, self.profilers.overhead_seconds),
        )

    def _finish(self, pending: _PendingReport) -> dict[str, float]:
        """Wait for the values of the steps since the last report and log them."""
        step, values = pending.step, pending.values()
        for warning in self.monitor.update(step - len(values) + 1, values):
            self.logger.log(f"warning: {warning}")
        loss, grad_norm = self.monitor.mean_loss(restart=pending.restart), values[-1].grad_norm
        seconds, tokens_per_second = None, None
        if self._window is not None:
            elapsed = pending.timestamp.seconds_since(self._window.start)
            seconds = elapsed / (step - self._window.step)
            samples = self.consumed_samples(step) - self.consumed_samples(self._window.step)
            tokens_per_second = samples * self.throughput.tokens_per_sample / elapsed
        peak = self.throughput.peak_flops
        self.logger.log_step(
            StepReport(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                lr=pending.lr,
                consumed_samples=self.consumed_samples(step),
                skipped_steps=self.monitor.skipped_steps,
                loss_scale=values[-1].loss_scale,
                step_seconds=seconds,
                tokens_per_second=tokens_per_second,
                mfu=tokens_per_second * self.throughput.flops_per_token / peak if tokens_per_second and peak else None,
                memory_gib=pending.memory_gib,
                experts=pending.experts(),
            )
        )
        return {"loss": loss, "grad_norm": grad_norm}
