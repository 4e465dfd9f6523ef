"""Contents of the page of a run, as plain values for the template; a section without content, or damaged, is empty."""

from __future__ import annotations

import base64
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from ..utils.text import format_duration, format_gib, pluralize
from .curves import number
from .run_data import RunData

_MAX_TIMELINE = 300_000
_MAX_ROWS = 400
_MAX_EVENTS = 60
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MAX_CELLS = 100_000
"""Cells of the heat map, a byte each."""


def _section(describe: Callable[[RunData], Any]) -> Callable[[RunData], Any]:
    """Decorate a function that reads the JSON files of a run: None where they do not hold what they should."""

    @wraps(describe)
    def described(run: RunData) -> Any:
        try:
            return describe(run)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None

    return described


def overview(run: RunData) -> list[tuple[str, str]]:
    """Return what a reader wants to know first: steps, losses, speed, memory, time."""
    rows = [("Outcome", run.outcome()), ("Steps", _steps(run))]
    for name, label in (("loss", "Training loss"), ("val_loss", "Validation loss")):
        curve = run.curves.get(name)
        if curve is not None and curve.values:
            best = min(range(len(curve.values)), key=curve.values.__getitem__)
            last = f"{number(curve.values[-1])} at step {curve.steps[-1]:,}"
            rows.append((label, f"{last}, lowest {number(curve.values[best])} at step {curve.steps[best]:,}"))
    for name, unit in (("tokens_per_second", "tokens/s"), ("mfu", "MFU")):
        if (middle := median(run, name)) is not None:
            rows.append(("Median speed", f"{100 * middle:.1f} % {unit}" if name == "mfu" else f"{middle:,.0f} {unit}"))
    if (peak := peak_memory(run)) is not None:
        rows.append(("Peak memory", f"{peak:,.2f} GiB"))
    if seconds := run.seconds():
        rows.append(("Time", format_duration(seconds)))
    if run.times:
        rows.append(("Last metrics", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.times[-1]))))
    return rows


def _steps(run: RunData) -> str:
    planned = run.value("trainer.max_steps")
    of = f" of {planned:,}" if isinstance(planned, int) and planned > 0 else ""
    return f"{run.last_step:,}{of}"


def median(run: RunData, name: str) -> float | None:
    """Return the median of a metric, or None."""
    values = sorted(curve.values) if (curve := run.curves.get(name)) else []
    return values[len(values) // 2] if values else None


def peak_memory(run: RunData) -> float | None:
    """Return the peak of device memory, or of the process on a CPU, in GiB."""
    curve = run.curves.get("memory_gib")
    return max(curve.values) if curve and curve.values else None


@_section
def memory(run: RunData) -> Any:
    """Return the rows of the memory table, each with the length of its bar in percent, and a note."""
    plan, measured, peak = run.record.get("plan"), run.record.get("measured"), peak_memory(run)
    rows: list[tuple[str, int, str]] = []
    notes: list[str] = []
    if plan:
        rows += [(name, size, "part") for name, size in plan["parts"].items() if 200 * size > plan["allocated"]]
        rows.append(("planned, allocated at the peak", plan["allocated"], "planned"))
        rows.append(("planned, reserved", plan["reserved"], "planned"))
        notes.append(f"The planned peak is at this moment: {plan['peak_at']}.")
    if measured:
        rows += [(f"measured, {name}", measured[name], "measured") for name in ("allocated", "reserved")]
        error = 100 * (measured["planned"] / measured["allocated"] - 1)
        notes.append(f"The plan of this rank differs from the measured allocation by {error:+.1f} %.")
    elif peak is not None:
        rows.append(("measured, peak", round(peak * 2**30), "measured"))
        if run.environment.get("device") == "cpu":
            notes.append("On a CPU the whole process is measured, with libraries, which the plan leaves out.")
    rows += [("memory of the device", plan["available"], "device")] if plan else []
    most = max((size for _, size, _ in rows if size), default=0)
    shown = [(label, format_gib(size), round(100 * size / most, 1), kind) for label, size, kind in rows if size]
    return {"rows": shown, "note": run.public(" ".join(notes))} if shown else None


@_section
def attention(run: RunData) -> Any:
    """Return the chosen backends, and a table of all backends for each set of calls with the same reasons."""
    chosen: list[tuple[str, ...]] = []
    tables: dict[str, dict[str, Any]] = {}
    for choice in run.record["attention"]:
        rows: list[list[Any]] = [
            [str(name), str(family), bool(can), run.public(str(why))] for name, family, can, why in choice["rows"]
        ]
        kind, backend = str(choice["kind"]), str(choice["backend"])
        reason = [why for name, _, _, why in rows if name == backend]
        chosen.append((kind, str(choice["call"]), backend, run.public("; ".join([*reason, *choice["notes"]]))))
        same = tables.setdefault(f"{backend} {rows}", {"kinds": [], "backend": backend, "rows": rows})
        same["kinds"].append(kind)
    return {"chosen": chosen, "tables": list(tables.values())} if chosen else None


@_section
def experts(run: RunData) -> Any:
    """Return the load of each expert over the steps, a byte for each: 0 to 255 for 0 to twice the mean of its layer."""
    rows, sizes = run.expert_load["rows"], run.expert_load["experts"]
    every = max(1, math.ceil(len(rows) * sum(sizes) / _MAX_CELLS))
    merged = [[row["tokens"] for row in rows[n : n + every]] for n in range(0, len(rows), every)]
    shown = []
    for layer, name in enumerate(run.expert_load["layers"]):
        sums = [[sum(column) for column in zip(*(tokens[layer] for tokens in part), strict=True)] for part in merged]
        scaled = [(load, 127.5 * len(load) / (sum(load) or 1)) for load in sums]
        cells = bytes(min(255, round(scale * n)) for load, scale in scaled for n in load)
        first, last = sums[0], sums[-1]
        text = f"load CV {_variation(first):.2f} at first, {_variation(last):.2f} at last"
        most = f"largest share {100 * max(last) / (sum(last) or 1):.1f} %, even would be {100 / len(last):.1f} %"
        shown.append({
            "name": run.public(name.removesuffix(".mlp").replace(".layers.", " "), 80),
            "experts": int(sizes[layer]),
            "columns": len(merged),
            "cells": base64.b64encode(cells).decode(),
            "text": f"{text}; {most}",
        })  # fmt: skip
    return {"layers": shown, "first": int(rows[0]["first_step"]), "last": int(rows[-1]["step"])}


def _variation(load: Sequence[float]) -> float:
    mean = sum(load) / len(load)
    return math.sqrt(sum((n - mean) ** 2 for n in load) / len(load)) / mean if mean else 0.0


def timeline(run: RunData) -> str:
    """Return the drawing of a pipeline's step as a data URI: as an image, nothing in it can act."""
    if not run.timeline or len(run.timeline) > _MAX_TIMELINE:
        return ""
    return "data:image/svg+xml;base64," + base64.b64encode(run.timeline.encode()).decode()


@_section
def environment(run: RunData) -> Any:
    """Return versions, devices and layout."""
    found = run.environment
    processes = found.get("processes", [])
    machines = pluralize(len({str(each.get("host")) for each in processes}), "machine")
    names = ("device", "cuda", "stoker", "commit", "python", "cpus", "threads")
    variables = {name: value for name, value in found.get("variables", {}).items() if name.startswith("NVTE_")}
    rows = {
        **run.record.get("facts", {}),
        **({"processes": f"{len(processes)} on {machines}"} if processes else {}),
        **{name: found[name] for name in names if found.get(name) is not None},
        **found.get("packages", {}),
        **variables,
    }
    return [(run.public(name, 60), run.public(str(value))) for name, value in rows.items()][:_MAX_ROWS]


def key_table(run: RunData, name: str) -> list[tuple[str, ...]]:
    """Return the rows of `keys` or `differences`: key, and two texts about it."""
    return _section(lambda run: [tuple(map(run.public, row)) for row in run.record[name][:_MAX_ROWS]])(run) or []


def warnings(run: RunData) -> list[str]:
    """Return warnings and notes on the configuration, and the warnings of the log."""
    findings = _section(lambda run: list(map(run.public, run.record["findings"])))(run) or []
    return list(dict.fromkeys([*findings, *run.warnings]))


@_section
def sample(run: RunData) -> Any:
    """Return the text that the model made; it is the model's, so only its length is cut."""
    made = run.record["sample"]
    prompt, text = (_CONTROL.sub("\ufffd", made[name])[:4000] for name in ("prompt", "text"))
    return {"step": int(made["step"]), "prompt": prompt, "text": text}


@_section
def events(run: RunData) -> Any:
    """Return the counts of the events, and what happened besides saves, with the time since the first."""
    saves = [event for event in run.events if event["event"] == "save"]
    counts = [pluralize(sum(event["event"] == kind for event in run.events), kind) for kind in ("start", "restart")]
    if saves:
        counts.append(f"{pluralize(len(saves), 'save')} in {sum(event['seconds'] for event in saves):,.2f} s")
    others = [event for event in run.events if event["event"] != "save"]
    rows = [(format_duration(event["time"] - run.events[0]["time"]), *_event_text(run, event)) for event in others]
    return {"counts": ", ".join(counts), "rows": rows[:_MAX_EVENTS], "left_out": max(0, len(rows) - _MAX_EVENTS)}


def _event_text(run: RunData, event: Mapping[str, Any]) -> Iterator[str]:
    yield run.public(str(event["event"]), 40)
    hidden = {"time", "event", "host", "hosts"}
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in event.items() if name not in hidden and value != {}]
    yield run.public(", ".join(parts))
