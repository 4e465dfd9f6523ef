"""Early stopping with the rules of Lightning's `EarlyStopping`.

Its state is saved in every checkpoint (`loop_state.EarlyStoppingState`), so a resumed run stops at the same step.
"""

from __future__ import annotations

import math

from ..checkpoint.loop_state import EarlyStoppingState
from ..config.schema.exp_manager import EarlyStoppingParams, canonical_metric_name
from ..utils.text import pluralize

STOP_REASON_PREFIX = "early stopping"
"""Prefix of the stop reason of a run that was stopped early."""


class EarlyStopping:
    """Monitor a metric and decide when to stop.

    Args:
        params: metric, mode, patience and thresholds.
        state: state to resume from.

    Attributes:
        metric: name the metric is logged under.
        state: current state, saved in checkpoints.
    """

    def __init__(self, params: EarlyStoppingParams, state: EarlyStoppingState) -> None:
        self._params = params
        self.metric = canonical_metric_name(params.monitor)
        self.state = state

    def check(self, value: float) -> tuple[str | None, str]:
        """Update the state with a new value of the metric.

        Returns:
            The reason to stop, or None; and a log line about this check.
        """
        best, waited = self.state.best, self.state.waited
        if not math.isfinite(value):
            self.state = EarlyStoppingState(best=best, last=None, waited=waited + 1)
            if self._params.check_finite:
                return f"{self.metric} is {value}", f"{self.metric} is {value}"
            return self.stop_reason, f"{self.metric} is {value}: {self._waiting()}"
        if best is None or self._improves(value, best):
            self.state = EarlyStoppingState(best=value, last=value, waited=0)
            better = "" if best is None else f", {abs(value - best):.4g} better than before"
            return self.stop_reason, f"{self.metric} {value:.4f} is the best so far{better}"
        self.state = EarlyStoppingState(best=best, last=value, waited=waited + 1)
        return self.stop_reason, f"{self.metric} {value:.4f} is no better than {best:.4f}: {self._waiting()}"

    @property
    def stop_reason(self) -> str | None:
        """Reason to stop in this state, or None; a finished run that is started again thus stops immediately."""
        params, state = self._params, self.state
        if state.last is not None:
            stopping, divergence = params.stopping_threshold, params.divergence_threshold
            if stopping is not None and self._better(state.last, stopping):
                return f"{self.metric} {state.last:.4f} has passed stopping_threshold={stopping:g}"
            if divergence is not None and self._better(divergence, state.last):
                return f"{self.metric} {state.last:.4f} is worse than divergence_threshold={divergence:g}"
        if state.waited and state.waited >= params.patience:
            best = "" if state.best is None else f" than {state.best:.4f}"
            return f"{self.metric} was no better{best} in {pluralize(state.waited, 'check')}"
        return None

    @property
    def continue_hint(self) -> str:
        """A phrase listing the overrides that let a run continue that was stopped in this state."""
        params, state = self._params, self.state
        needed: list[str] = []
        if state.last is None:
            needed += ["check_finite=False"] * params.check_finite
        elif params.stopping_threshold is not None and self._better(state.last, params.stopping_threshold):
            needed.append("stopping_threshold=null")
        elif params.divergence_threshold is not None and self._better(params.divergence_threshold, state.last):
            needed.append("divergence_threshold=null")
        if state.waited and state.waited >= params.patience:
            needed.append(f"patience above {state.waited:,}")
        block = "exp_manager.early_stopping_callback_params"
        ways = " and ".join(f"{block}.{override}" for override in needed)
        return f"exp_manager.create_early_stopping_callback=False or {ways}"

    def _improves(self, value: float, best: float) -> bool:
        delta = self._params.min_delta
        return self._better(value + delta if self._params.mode == "min" else value - delta, best)

    def _better(self, value: float, other: float) -> bool:
        return value < other if self._params.mode == "min" else value > other

    def _waiting(self) -> str:
        return f"{pluralize(self.state.waited, 'check')} without improvement, patience {self._params.patience}"
