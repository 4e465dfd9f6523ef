"""Metrics that a run has logged, from its `metrics.jsonl`."""

import json
from pathlib import Path
from typing import Any

_CLOCKS = ("time", "step_seconds", "tokens_per_second", "memory_gib", "mfu")


def metric_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the lines, in the order logged."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def logged(directory: Path, *names: str) -> list[float]:
    """Return the values of these metrics, in the order logged."""
    return [row[name] for row in metric_rows(directory) for name in names if name in row]


def exact_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the lines without times, rates and memory, which differ between runs with the same results."""
    return [{name: value for name, value in row.items() if name not in _CLOCKS} for row in metric_rows(directory)]
