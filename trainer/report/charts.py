"""Charts of a page: which metrics are drawn together, and what their captions say. Drawn by `report.js`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .curves import MAX_POINTS, Curve


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of one or more metrics over the steps.

    Attributes:
        log: its scale is logarithmic if the values span more than two decades.
        smooth: it offers a moving average.
        percent: values are fractions.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    log: bool = False
    smooth: bool = False
    percent: bool = False


CHARTS = (
    Chart("Loss", ("loss", "val_loss"), "nats per token", smooth=True),
    Chart("Learning rate", ("lr",)),
    Chart("Gradient norm", ("grad_norm",), log=True, smooth=True),
    Chart("Throughput", ("tokens_per_second",), "tokens/s"),
    Chart("Model FLOPs utilization (MFU)", ("mfu",), percent=True),
    Chart("Peak memory", ("memory_gib",), "GiB"),
    Chart("Skipped steps", ("skipped_steps",)),
    Chart("Expert load: coefficient of variation", ("load_cv",)),
    Chart("Load balancing loss", ("load_balancing_loss",)),
    Chart("Router z-loss", ("z_loss",)),
    Chart("Expert share", ("expert_share_min", "expert_share_max"), percent=True),
    Chart("Dropped tokens", ("dropped_fraction",), percent=True),
)
_LABELS = {"loss": "training", "val_loss": "validation", "expert_share_min": "least", "expert_share_max": "most"}
_NOT_DRAWN = {"consumed_samples", "step_seconds", "expert_share_mean"}
_ZERO_IS_NOTHING = {"skipped_steps", "dropped_fraction"}


class Series(NamedTuple):
    """A line of a chart."""

    label: str
    curve: Curve


def drawn_charts(curves: Mapping[str, Curve]) -> Iterator[tuple[Chart, list[Series]]]:
    """Yield the charts of a run, with their lines; metrics that `CHARTS` does not name get a chart each.

    The metrics of single layers are in the heat map.
    """
    known = {metric for chart in CHARTS for metric in chart.metrics}
    others = [name for name in curves if name not in known | _NOT_DRAWN and not name.startswith("moe/")][:12]
    for chart in (*CHARTS, *(Chart(name.replace("_", " "), (name,)) for name in others)):
        shown = [Series(_LABELS.get(name, name), curves[name]) for name in chart.metrics if _is_drawn(name, curves)]
        if shown:
            yield chart, shown


def _is_drawn(name: str, curves: Mapping[str, Curve]) -> bool:
    curve = curves.get(name)
    return curve is not None and bool(curve.values) and (name not in _ZERO_IS_NOTHING or any(curve.values))


def chart_data(chart: Chart, lines: Sequence[Series], limit: int = MAX_POINTS) -> dict[str, Any]:
    """Return a chart as `report.js` and the templates take it, with at most `limit` points a line."""
    values = [value for line in lines for value in line.curve.values]
    spans = chart.log and min(values) > 0 and max(values) > 100 * min(values)
    summaries = [line.curve.summary(percent=chart.percent) for line in lines]
    labels = [f"{line.label}: " if len(lines) > 1 else "" for line in lines]
    return {
        "title": chart.title,
        "unit": chart.unit,
        "log": spans,
        "smooth": chart.smooth and any(len(line.curve.values) > 10 for line in lines),
        "percent": chart.percent,
        "caption": "; ".join(label + text for label, text in zip(labels, summaries, strict=True)),
        "series": [{"label": line.label, "x": x, "y": y} for line in lines for x, y in [line.curve.thinned(limit)]],
    }
