"""The reports of training steps: what the device has counted since the last one, as one line of figures.

A report begins where its step ends: the device is told to send what it has, and what the host knows of that moment is
kept. It ends where its values are read and written. In between the host may launch the next step, so that the device
has work while the line is made; the figures are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..lightning.lightning_module import LanguageModule
from ..loggers.run_logger import Journal, StepReport, peak_memory_gib
from ..utils.async_host_copy import Instant
from .divergence import StepPolicy
from .expert_load import ExpertLoad
from .profiler import Observers


@dataclass(frozen=True, slots=True)
class Rates:
    """What turns seconds into rates.

    Attributes:
        tokens_per_sample: target positions in a sample, padding included.
        flops_per_token: model FLOPs, forward and backward.
        peak_flops: of all devices together, or None where it is not known.
    """

    tokens_per_sample: int
    flops_per_token: float
    peak_flops: float | None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A report whose values are on their way, with what the host knows of the end of its step."""

    step: int
    restart: bool
    lr: float
    memory_gib: float | None
    values: Callable[[], list[tuple[float, float]]]
    experts: Callable[[], Mapping[str, float]]
    at: Instant


@dataclass(frozen=True, slots=True)
class _Window:
    """Steps and time since the end of a step, with nothing but steps in it."""

    step: int
    start: Instant


class StepReports:
    """Begins and ends the reports of a run, one after the other.

    Args:
        journal: where figures go.
        policy: reads the figures of every step.
        rates: tokens and FLOPs of a step.
        consumed_samples: completed steps to samples trained on.
        observers: profilers, whose own time counts for nothing.
        expert_load: what reports the load of the experts; None without experts.
    """

    def __init__(
        self,
        journal: Journal,
        policy: StepPolicy,
        rates: Rates,
        consumed_samples: Callable[[int], int],
        observers: Observers,
        expert_load: ExpertLoad | None,
    ) -> None:
        self._journal = journal
        self._policy = policy
        self._rates = rates
        self._consumed_samples = consumed_samples
        self._observers = observers
        self._expert_load = expert_load
        self._window: _Window | None = None
        self._begun: _Begun | None = None

    @property
    def has_window(self) -> bool:
        """Whether there is a step that times are taken from: this process has reported already."""
        return self._window is not None

    def report(self, module: LanguageModule, *, restart: bool) -> dict[str, float]:
        """Begin and finish the report of this step, while the device stands still; returns what others go by.

        Args:
            module: after the step.
            restart: this is a regular report: begin new means.

        Raises:
            DivergedError: too many steps in a row were not finite.
        """
        with self._observers.phase("report"):
            figures = self._finish(self._begin(module, restart=restart))
        # The first step of a process compiles and allocates, so the clock starts after it.
        self.restart_clock(module)
        return figures

    def begin(self, module: LanguageModule, *, restart: bool) -> None:
        """Begin the report of this step, without a wait for the device; `finish` is to come before the next one."""
        assert self._begun is None
        with self._observers.phase("report begun"):
            self._begun = self._begin(module, restart=restart)

    def finish(self) -> None:
        """Finish the report that has begun, if there is one.

        Raises:
            DivergedError: too many steps in a row were not finite.
        """
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        with self._observers.phase("report"):
            self._finish(begun)
        self._window = _Window(begun.step, begun.at)

    def restart_clock(self, module: LanguageModule) -> None:
        """Take times from now on, after what is no part of a step."""
        self._window = _Window(module.step, Instant(module.device, self._observers.aside))

    def _begin(self, module: LanguageModule, *, restart: bool) -> _Begun:
        return _Begun(
            step=module.step,
            restart=restart,
            lr=module.lr,
            memory_gib=peak_memory_gib(module.device),
            values=module.take_unread(),
            experts=self._expert_load.take(module.step, restart=restart) if self._expert_load is not None else dict,
            at=Instant(module.device, self._observers.aside),
        )

    def _finish(self, begun: _Begun) -> dict[str, float]:
        """Read the steps since the last report and write their figures."""
        step, values = begun.step, begun.values()
        for warning in self._policy.read(step - len(values) + 1, values):
            self._journal.say(f"warning: {warning}")
        loss, grad_norm = self._policy.mean_loss(restart=begun.restart), values[-1][1]
        seconds, tokens_per_second = None, None
        if self._window is not None:
            passed = begun.at.seconds_since(self._window.start)
            seconds = passed / (step - self._window.step)
            samples = self._consumed_samples(step) - self._consumed_samples(self._window.step)
            tokens_per_second = samples * self._rates.tokens_per_sample / passed
        peak = self._rates.peak_flops
        self._journal.report(
            StepReport(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                lr=begun.lr,
                consumed_samples=self._consumed_samples(step),
                skipped_steps=self._policy.skipped_steps,
                step_seconds=seconds,
                tokens_per_second=tokens_per_second,
                mfu=tokens_per_second * self._rates.flops_per_token / peak if tokens_per_second and peak else None,
                memory_gib=begun.memory_gib,
                experts=begun.experts(),
            )
        )
        return {"loss": loss, "grad_norm": grad_norm}
