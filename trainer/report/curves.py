"""Curves of metrics: points of a metric over steps, thinned for drawing without losing their extremes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_POINTS = 2000


@dataclass(slots=True)
class Curve:
    """A metric over steps.

    Attributes:
        not_finite: values that were not finite, which have no point.
    """

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    not_finite: int = 0

    def add(self, step: int, value: float | None) -> None:
        """Append a point; None is a value that was not finite."""
        if value is None or not math.isfinite(value):
            self.not_finite += 1
        else:
            self.steps.append(step)
            self.values.append(value)

    def summary(self, *, percent: bool = False) -> str:
        """Return the first, last, least and greatest value as text, for readers who do not see the plot."""
        found = {"last": self.values[-1]}
        if len(self.values) > 1:
            found = {"first": self.values[0], **found, "least": min(self.values), "most": max(self.values)}
        shown = (f"{name} {f'{100 * value:.3g} %' if percent else number(value)}" for name, value in found.items())
        return ", ".join(shown) + (f"; {self.not_finite:,} values not finite" if self.not_finite else "")

    def thinned(self, limit: int = MAX_POINTS) -> tuple[list[int], list[float]]:
        """Return at most `limit` points: first and last, and the smallest and largest of each stretch of the rest."""
        count = len(self.steps)
        if count <= limit:
            return self.steps, [round_to_digits(value) for value in self.values]
        stretches = max(1, (limit - 2) // 2)
        kept = {0, count - 1}
        for stretch in range(stretches):
            first, end = 1 + stretch * (count - 2) // stretches, 1 + (stretch + 1) * (count - 2) // stretches
            inside = range(first, end)
            kept.update((min(inside, key=self.values.__getitem__), max(inside, key=self.values.__getitem__)))
        order = sorted(kept)
        return [self.steps[n] for n in order], [round_to_digits(self.values[n]) for n in order]


def round_to_digits(value: float, digits: int = 6) -> float:
    """Round to significant digits: more cannot be seen, and cost bytes."""
    return float(f"{value:.{digits}g}")


def number(value: float) -> str:
    """Format a number for a table: four significant digits, thousands separated."""
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.3g}"
