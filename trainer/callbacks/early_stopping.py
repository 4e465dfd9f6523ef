"""Early stopping: whether a metric has stopped getting better. Lightning's rules (`EarlyStopping`), without its state.

What it remembers is in every checkpoint (`loop_state.Patience`), so a resumed run stops where the unbroken one would.
"""

from __future__ import annotations

import math

from ..checkpoint.loop_state import Patience
from ..config.schema.exp_manager import EarlyStoppingParams, logged_name

EARLY_STOPPING = "early stopping"
"""What the reason for which a run has stopped begins with, where it is this one."""


def ways_on(params: EarlyStoppingParams) -> str:
    """The keys with which a run goes on that was stopped by these, in words."""
    block = "exp_manager.early_stopping_callback_params"
    ways = [
        "exp_manager.create_early_stopping_callback=False",
        f"{block}.patience above {max(params.patience, 1):,}",
        *(
            f"{block}.{name}=null"
            for name in ("stopping_threshold", "divergence_threshold")
            if getattr(params, name) is not None
        ),
    ]
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


class EarlyStopping:
    """Checks a metric.

    Args:
        params: which metric, and when it counts as no better.
        state: where an earlier process left off.

    Attributes:
        metric: the name the metric is logged under.
        state: what is remembered.
    """

    def __init__(self, params: EarlyStoppingParams, state: Patience) -> None:
        self._params = params
        self.metric = logged_name(params.monitor)
        self.state = state

    def check(self, value: float) -> tuple[str | None, str]:
        """Take a new value of the metric.

        Returns:
            Why the run should stop, or None; and a line about this check.
        """
        best, waited = self.state.best, self.state.waited
        if not math.isfinite(value):
            self.state = Patience(best=best, last=None, waited=waited + 1)
            if self._params.check_finite:
                return f"{self.metric} is {value}", f"{self.metric} is {value}"
            return self.reason, f"{self.metric} is {value}: {self._waiting()}"
        if best is None or self._improves(value, best):
            self.state = Patience(best=value, last=value, waited=0)
            better = "" if best is None else f", {abs(value - best):.4g} better than before"
            return self.reason, f"{self.metric} {value:.4f} is the best so far{better}"
        self.state = Patience(best=best, last=value, waited=waited + 1)
        return self.reason, f"{self.metric} {value:.4f} is no better than {best:.4f}: {self._waiting()}"

    @property
    def reason(self) -> str | None:
        """Why a run in this state should stop, or None. A finished run that is started again learns of it at once."""
        params, state = self._params, self.state
        if state.last is not None:
            stopping, divergence = params.stopping_threshold, params.divergence_threshold
            if stopping is not None and self._better(state.last, stopping):
                return f"{self.metric} {state.last:.4f} has passed stopping_threshold={stopping:g}"
            if divergence is not None and self._better(divergence, state.last):
                return f"{self.metric} {state.last:.4f} is worse than divergence_threshold={divergence:g}"
        if state.waited and state.waited >= params.patience:
            best = "" if state.best is None else f" than {state.best:.4f}"
            return f"{self.metric} was no better{best} in {state.waited} check{'s' * (state.waited != 1)}"
        return None

    def _improves(self, value: float, best: float) -> bool:
        delta = self._params.min_delta
        return self._better(value + delta if self._params.mode == "min" else value - delta, best)

    def _better(self, value: float, other: float) -> bool:
        return value < other if self._params.mode == "min" else value > other

    def _waiting(self) -> str:
        return f"{self.state.waited} of {self._params.patience} checks"
