"""Comparison of runs: their results, what their configurations differ in, and their curves together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models.config.model import FAMILIES
from ..config.dotted_paths import leaves
from ..config.schema.key_index import format_value, schema_keys
from ..utils.errors import UserError
from ..utils.owned_files import read_owned_text
from ..utils.redaction import redact_value
from ..utils.text import format_duration, format_table
from .charts import Chart, Series, drawn_charts
from .curves import Curve, number
from .run_data import RunData, is_run_directory, read_run
from .sections import median, peak_memory

_SWEEP_FILE = "multirun.json"
_MAX_RUNS = 64
_PLACES = (
    *("exp_manager.explicit_log_dir", "exp_manager.exp_dir", "exp_manager.version"),
    *("exp_manager.checkpoint_callback_params.dirpath", "exp_manager.resume_if_exists"),
)
"""Keys of where a run is, in which all runs differ, and of whether it was resumed."""
_HEADER = ("run", "outcome", "step", "loss", "lowest", "val loss", "lowest", "tokens/s", "MFU", "GiB", "time")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side.

    Attributes:
        labels: a name for each run, different from the others.
        numbers: the number with which each label begins: of its job if all are jobs of one sweep, else from 1.
        header: names of the columns of `results`.
        results: a row of texts for each run.
        differences: (key, value of each run) of the keys that differ.
    """

    runs: tuple[RunData, ...]
    labels: tuple[str, ...]
    numbers: tuple[str, ...]
    header: tuple[str, ...]
    results: tuple[tuple[str, ...], ...]
    differences: tuple[tuple[str, tuple[str, ...]], ...]

    def lines(self) -> Iterator[str]:
        """Yield the comparison as text: the results, and a line for each key that differs."""
        yield from format_table([self.header, *self.results])
        yield ""
        if not self.differences:
            yield "the configurations do not differ"
            return
        width = max(len(path) for path, _ in self.differences)
        for path, values in self.differences:
            same: dict[str, list[str]] = {}
            for name, value in zip(self.numbers, values, strict=True):
                same.setdefault(value, []).append(name)
            yield f"{path:<{width}}  " + "  ".join(f"{value} ({', '.join(who)})" for value, who in same.items())


def compare_runs(paths: Sequence[Path]) -> Comparison:
    """Read and compare runs; the directory of a sweep stands for all its jobs.

    Raises:
        UserError: fewer than two runs or too many, or a path that is neither.
    """
    found = list(dict.fromkeys(each.resolve() for path in paths for each in _run_directories(path)))
    if not 2 <= len(found) <= _MAX_RUNS:
        raise UserError(f"stoker compare takes 2 to {_MAX_RUNS} runs, and {len(found)} are given")
    runs = tuple(read_run(path) for path in found)
    differences = tuple(_differences(runs))
    names = _names(runs, differences)
    sweep = paths[0].resolve() if len(paths) == 1 else None
    if all(run.directory.parent == sweep and run.directory.name.isdecimal() for run in runs):
        numbers = tuple(run.directory.name for run in runs)
        labels = tuple(f"job {name}" for name in names)
    else:
        numbers = tuple(str(index) for index in range(1, len(runs) + 1))
        labels = tuple(map(" ".join, zip(numbers, names, strict=True)))
    results = [(label, *_results(run)) for label, run in zip(labels, runs, strict=True)]
    shown = [n for n in range(len(_HEADER)) if n < 3 or any(row[n] != "-" for row in results)]
    return Comparison(
        runs=runs,
        labels=labels,
        numbers=numbers,
        header=tuple(_HEADER[n] for n in shown),
        results=tuple(tuple(row[n] for n in shown) for row in results),
        differences=differences,
    )


def shared_charts(comparison: Comparison) -> Iterator[tuple[Chart, list[Series]]]:
    """Yield a chart for each metric that several runs have, with a line for each of them."""
    merged = {name: curve for run in comparison.runs for name, curve in run.curves.items()}
    for chart, lines in drawn_charts(merged):
        for metric, line in zip((name for name in chart.metrics if name in merged), lines, strict=False):
            pairs = zip(comparison.labels, comparison.runs, strict=True)
            shown = [Series(label, curve) for label, run in pairs if (curve := run.curves.get(metric)) and curve.values]
            title = chart.title if len(chart.metrics) == 1 else f"{chart.title}, {line.label}"
            if len(shown) > 1:
                yield replace(chart, title=title, metrics=(metric,)), shown


def _run_directories(path: Path) -> list[Path]:
    """Return a run directory, or those of the jobs of a sweep that have started.

    Raises:
        UserError: the path is neither.
    """
    if is_run_directory(path):
        return [path]
    jobs: list[Path] = []
    if (path / _SWEEP_FILE).is_file():
        for row in _sweep_jobs(path):
            parts = Path(str(row.get("directory"))).parts  # the sweep may have been moved since
            moved = [path.joinpath(*parts[-depth:]) for depth in range(1, min(4, len(parts)) + 1)]
            jobs += [place for place in moved if ".." not in parts and is_run_directory(place)][:1]
    if not jobs:
        what = "no such folder" if not path.is_dir() else "neither a run directory nor the directory of a sweep"
        raise UserError(f"{path}: {what}")
    return jobs


def _sweep_jobs(path: Path) -> list[dict[str, Any]]:
    try:
        jobs = json.loads(read_owned_text(path, _SWEEP_FILE))["jobs"]
        return [row for row in jobs if isinstance(row, dict)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path / _SWEEP_FILE}: cannot be read: {error}") from None


def _names(runs: Sequence[RunData], differences: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
    """Return a short name of each run: its directory, and the values of few keys that differ, as in a sweep."""
    names = [run.public(run.directory.name, 40) for run in runs]
    if not 1 <= len(differences) <= 3:
        return names
    keys = [path.rpartition(".")[2] for path, _ in differences]
    values = zip(*(values for _, values in differences), strict=True)
    settings = (", ".join(f"{key}={value}" for key, value in zip(keys, each, strict=True)) for each in values)
    return [f"{name}: {setting}"[:48] for name, setting in zip(names, settings, strict=True)]


def _results(run: RunData) -> tuple[str, ...]:
    texts: list[str] = []
    for name in ("loss", "val_loss"):
        curve = run.curves.get(name, Curve())
        texts += [number(curve.values[-1]), number(min(curve.values))] if curve.values else ["-", "-"]
    speed, mfu, peak = median(run, "tokens_per_second"), median(run, "mfu"), peak_memory(run)
    return (
        run.outcome() if len(run.outcome()) <= 60 else run.outcome()[:57] + "...",
        f"{run.last_step:,}",
        *texts,
        "-" if speed is None else f"{speed:,.0f}",
        "-" if mfu is None else f"{100 * mfu:.1f} %",
        "-" if peak is None else f"{peak:.2f}",
        format_duration(run.seconds()),
    )


def _differences(runs: Sequence[RunData]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the keys that differ; one that an older version did not know has its default."""
    trees = [dict(leaves(run.document)) for run in runs]
    for path in dict.fromkeys(path for tree in trees for path in tree):
        if path not in _PLACES:
            values = tuple(_shown(run, path, tree) for run, tree in zip(runs, trees, strict=True))
            if len(set(values)) > 1:
                yield path, values


def _shown(run: RunData, path: str, tree: dict[str, Any]) -> str:
    if path in tree:
        value = tree[path]
        shown = format_value(float(f"{value:.10g}") if isinstance(value, float) else value)
        return run.public(redact_value(path, shown), 80)
    family = run.value("model.family")
    key = schema_keys(family if family in FAMILIES else "gpt").get(path)
    return "-" if key is None else format_value(key.default)
