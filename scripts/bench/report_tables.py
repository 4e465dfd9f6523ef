"""Tables of `report.py`: a renderer for each kind of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import data_parallel
import fp8_loss
import longest_sequence
import parallel
import plan_layouts
from rounds import Row, failures

from stoker.trainer.plan.hardware import bf16_peak_flops

GIB = 2**30
Values = dict[str, dict[str, float]]
"""Label -> series -> value of a plot."""


class Rendered(NamedTuple):
    """A table: head and lines of cells, notes below it, and its plot with the unit and the limit of its values."""

    head: Sequence[str]
    lines: list[list[str]]
    values: Values
    unit: str
    limit: float | None = None
    notes: Sequence[str] = ()


# ---------------------------------------------------------------- runs that are compared


@dataclass(frozen=True)
class Contender:
    """Runs of a contender, and of what it is compared with, by title; none if it is not compared."""

    name: str
    rows: list[Row]
    base: list[Row]
    base_title: str

    def median(self, key: str) -> float:
        return statistics.median(row[key] for row in self.rows)

    @property
    def ratio(self) -> float | None:
        """Speed of the base over the own one."""
        speed = {row["round"]: row["tokens_per_second"] for row in self.base}
        found = [speed[row["round"]] / row["tokens_per_second"] for row in self.rows if row["round"] in speed]
        return statistics.median(found) if found else None

    def text(self, key: str, form: str) -> str:
        return form.format(self.median(key)) if key in self.rows[0] else ""


def _times(ratio: float | None, digits: int = 3) -> str:
    return "" if ratio is None else f"{ratio:.{digits}f} x"


CELLS: dict[str, Callable[[Contender], str]] = {
    "tokens/s": lambda one: one.text("tokens_per_second", "{:,.0f}"),
    "tokens/s per GPU": lambda one: one.text("tokens_per_second", "{:,.0f}"),
    "ms/step": lambda one: f"{1e3 * statistics.median(statistics.median(row['seconds']) for row in one.rows):.1f}",
    "ms/token": lambda one: f"{1e3 * one.rows[0]['batch'] / one.median('tokens_per_second'):.2f}",
    "peak GiB": lambda one: one.text("peak_gib", "{:.1f}"),
    "planned": lambda one: one.text("planned_gib", "{:.1f}"),
    "reserved": lambda one: one.text("reserved_gib", "{:.1f}"),
    "CUDA graph": lambda one: {True: "yes", False: "no"}.get(one.rows[0].get("recorded", ""), ""),
    "of the limit": lambda one: f"{one.median('limit') * one.median('tokens_per_second') / one.rows[0]['batch']:.0%}",
    "stoker is faster by": lambda one: _times(one.ratio),
    "time, of the bare loop": lambda one: _times(one.ratio, 2),
    "speed": lambda one: _times(one.ratio and 1 / one.ratio),
    "speed, of": lambda one: f"{_times(one.ratio and 1 / one.ratio)} of: {one.base_title}" if one.base else "",
    "saved, GiB": lambda one: (
        f"{statistics.median(row['peak_gib'] for row in one.base) - one.median('peak_gib'):.1f}" if one.base else ""
    ),
}
PEERS = ("hf", "plain", "nano_t5", "fat5")
"""How the names of peers begin."""
STEP = ("tokens/s", "ms/step", "peak GiB", "stoker is faster by")
MEMORY = ("tokens/s", "peak GiB", "planned", "reserved", "CUDA graph", "speed, of", "saved, GiB")


def runs(
    titles: Mapping[str, str],
    columns: Sequence[str] = STEP,
    *,
    base: str | Mapping[str, str] = "stoker",
    by_speed: bool = True,
    limit: Callable[[Row], float] | None = None,
) -> Callable[[list[Row]], Rendered]:
    """Return the renderer of contenders that alternate; `base` is what they, or each of them, are compared with."""

    def render(rows: list[Row]) -> Rendered:
        ran = [row for row in rows if "refused" not in row]

        def of(name: str | None) -> list[Row]:
            return [row for row in ran if row["peer"] == name]

        bases = base if isinstance(base, Mapping) else dict.fromkeys(titles, base)
        found = [
            Contender(name, of(name), [] if bases[name] == name else of(bases[name]), titles.get(bases[name], ""))
            for name in titles
            if of(name)
        ]
        if by_speed:
            found.sort(key=lambda one: -one.median("tokens_per_second"))
        lines = [[titles[one.name], *(CELLS[column](one) for column in columns)] for one in found]
        lines += [[titles[name], reason, *[""] * (len(columns) - 1)] for name, reason in failures(rows).items()]
        values = {
            titles[one.name]: {"peer" if one.name.startswith(PEERS) else "stoker": one.median("tokens_per_second")}
            for one in found
        }
        return Rendered(["run", *columns], lines, values, "tokens/s", limit(ran[0]) if limit else None)

    return render


def exchange(rows: list[Row]) -> Rendered:
    """Render data-parallel layouts, each as fast as its slowest GPU."""
    tokens = data_parallel.MICRO_BATCH * data_parallel.SEQUENCE
    slowest = [(row, max(row["seconds"])) for row in rows]
    titles = {name: title for name, (title, _) in data_parallel.LAYOUTS.items()}
    render = runs(titles, ("ms/step", "tokens/s per GPU", "peak GiB", "speed"), base="alone", by_speed=False)
    return render(
        [row | {"peer": row["layout"], "seconds": [time], "tokens_per_second": tokens / time} for row, time in slowest]
    )


# ---------------------------------------------------------------- kernels: a line for each shape


def kernels(kinds: Mapping[str, float], *, milliseconds: bool = False) -> Callable[[list[Row]], Rendered]:
    """Return the renderer of contenders by shape: TFLOP/s of each kind of pass, speed of `ours` over theirs, peak MiB.

    Args:
        kinds: passes, and their FLOPs over those of the forward pass; the last one is drawn.
        milliseconds: begin with the time of the last kind.
    """

    def render(rows: list[Row]) -> Rendered:
        names = sorted(
            dict.fromkeys(n for row in rows for n in [*row["ms"], *row["refused"]]), key=lambda n: n != "ours"
        )
        last, lines, values = [*kinds][-1], [], {row["shape"]: {} for row in rows}
        for row in rows:
            cells, flops, ours = [], row["forward_flops"] / 1e9, row["ms"].get("ours", {})
            for name in names:
                times = row["ms"].get(name)
                if times is None:
                    cells.append(row["refused"].get(name, "-")[:70])
                    continue
                medians = {what: statistics.median(times[what]) for what in kinds if what in times}
                speeds = {what: kinds[what] * flops / time for what, time in medians.items()}
                parts = ["/".join(f"{speeds[what]:.0f}" if what in speeds else "-" for what in kinds)]
                if ours and name != "ours":  # slow ones have fewer rounds
                    pairs = {what: zip(ours[what], times[what], strict=False) for what in speeds}
                    ratios = {what: statistics.median(b / a for a, b in each) for what, each in pairs.items()}
                    parts.append(f"({'/'.join(f'{ratios[what]:.2f}' if what in ratios else '-' for what in kinds)})")
                parts += [f"{row['peak_mib'][name]:.0f}"] if name in row.get("peak_mib", {}) else []
                cells.append(" ".join([f"{medians[last]:.3f} ms", *parts] if milliseconds else parts))
                values[row["shape"]] |= {name: speeds[last]} if last in speeds else {}
            lines.append([row["shape"] + ("" if row.get("bitwise", True) else ", NOT bitwise repeatable"), *cells])
        peak = bf16_peak_flops(rows[0]["device"])
        return Rendered(["shape", *names], lines, values, f"TFLOP/s, {last}", peak and peak / 1e12)

    return render


def from_host(rows: list[Row]) -> Rendered:
    names = {"from the host": "keys on the host", "on the device": "keys on the device", "the copy alone": "copy only"}
    values = {
        row["shape"]: {title: statistics.median(row["ms"][name]["forward"]) for name, title in names.items()}
        for row in rows
    }
    peaks = {row["shape"]: f"{row['peak_mib']['from the host']:.0f}" for row in rows}
    lines = [[shape, *(f"{ms:.1f}" for ms in times.values()), peaks[shape]] for shape, times in values.items()]
    head = ["keys", *(f"ms, {title}" for title in names.values()), "peak MiB, keys on the host"]
    return Rendered(head, lines, values, "ms")


def softmax(rows: list[Row]) -> Rendered:
    """Render bandwidths relative to a copy of `x`: bytes that must be read and written over time."""
    names, lines, values = ("ours", "torch", "torch.compile"), [], {}
    for row in sorted(rows, key=lambda row: int(row["shape"].split()[0])):
        copy, cells = statistics.median(row["ms"]["copy"]["forward"]), []
        values[row["shape"]] = {}
        for name in names:
            if name not in row["ms"]:
                cells.append(row["refused"].get(name, "-"))
                continue
            times = row["ms"][name]
            parts = [row["moved"][way] * copy / statistics.median(times[way]) for way in ("forward", "backward")]
            cells.append(" / ".join(f"{part:.2f}" for part in parts))
            values[row["shape"]][name] = parts[0]
        lines.append([row["shape"], *cells, f"{row['largest_relative_error']:.1e}"])
    return Rendered(["rows of", *names, "error"], lines, values, "bandwidth of the forward, of a copy's", 1.0)


# ---------------------------------------------------------------- plans


def plans(rows: list[Row]) -> Rendered:
    """Render the runs of the seed measured last, and the errors of all seeds."""
    ran = [row for row in rows if "refused" not in row]
    shown, notes = [row for row in ran if row["seed"] == ran[-1]["seed"]], []
    lines = []
    for row in shown:
        planned, allocated, reserved = (f"{row[key] / GIB:.2f}" for key in ("planned", "allocated", "reserved"))
        cells = [planned, allocated, f"{100 * _error(row):+.1f} %", reserved, "yes" if row["recorded"] else "no"]
        lines.append([row["name"], *cells, row["peak_at"]])
    for seed in dict.fromkeys(row["seed"] for row in ran):
        errors = [100 * abs(_error(row)) for row in ran if row["seed"] == seed]
        notes.append(
            f"Seed {seed}, {len(errors)} runs: mean error {statistics.mean(errors):.1f} %, worst {max(errors):.1f} %."
        )
    notes += [f"{row['name']}: {row['refused']}." for row in rows if "refused" in row]
    values = {row["name"]: {key: row[key] / GIB for key in ("planned", "allocated")} for row in shown}
    head = ["run", "planned GiB", "allocated GiB", "error", "reserved GiB", "CUDA graph", "peak at"]
    return Rendered(head, lines, values, "GiB", notes=notes)


def _error(row: Row) -> float:
    return row["planned"] / row["allocated"] - 1


def layouts(rows: list[Row]) -> Rendered:
    ran = [row for row in rows if "refused" not in row]
    lines, values = [], {}
    errors = {"time": plan_layouts.time_error, "memory": plan_layouts.memory_error}
    for row in ran:
        planned, measured = max(plan_layouts.by_rank(row), key=lambda both: both[1]["allocated"])
        sizes = [f"{each[key] / GIB:.2f}" for key in ("allocated", "used") for each in (planned, measured)]
        sizes.insert(2, f"{100 * plan_layouts.memory_error(row):+.1f} %")
        times = {name: 1e3 * row[key] for name, key in (("planned", "planned_seconds"), ("measured", "seconds"))}
        time_error = f"{100 * plan_layouts.time_error(row):+.1f} %"
        name = f"{row['layout']}, CUDA graphs" if row["recorded"] else row["layout"]
        card = row["device"].removeprefix("NVIDIA ").split()[0]
        lines.append([name, card, *(f"{time:.1f}" for time in times.values()), time_error, *sizes])
        values[f"{name}, {card}"] = times
    notes = [
        f"Mean error of {what} {100 * statistics.mean(found):.1f} %, worst {100 * max(found):.1f} %."
        for what, error in errors.items()
        if (found := [abs(error(row)) for row in ran])
    ]
    notes += [f"{row['layout']}: {row['refused']}." for row in rows if "refused" in row]
    head = [
        "layout",
        "card",
        "planned ms",
        "ms",
        "error",
        "planned GiB",
        "GiB",
        "error",
        "planned GiB used",
        "GiB used",
    ]
    return Rendered(head, lines, values, "ms", notes=notes)


def losses(rows: list[Row]) -> Rendered:
    """Render mean losses at the end, and their gaps to bf16's of the same seed; of runs as long as the newest."""
    ran = [row for row in rows if "refused" not in row and row["steps"] == rows[-1]["steps"]]
    base = {row["seed"]: fp8_loss.last_loss(row) for row in ran if row["run"] == "bf16"}
    lines, values = [], {}
    for name in fp8_loss.RUNS:
        own = {row["seed"]: fp8_loss.last_loss(row) for row in ran if row["run"] == name}
        if not own:
            continue
        gaps = [100 * (loss / base[seed] - 1) for seed, loss in own.items() if seed in base and name != "bf16"]
        cells = [f"{statistics.mean(gaps):+.2f} %", f"{min(gaps):+.2f} to {max(gaps):+.2f} %"] if gaps else [""] * 2
        skipped = max(row["skipped_steps"] for row in ran if row["run"] == name)
        lines.append([name, f"{statistics.mean(own.values()):.4f}", *cells, str(skipped), str(len(own))])
        values |= {name: {"gap": abs(statistics.mean(gaps))}} if gaps else {}
    head = ["run", "loss", "gap to bf16, mean of the seeds", "smallest to largest", "skipped steps", "seeds"]
    return Rendered(head, lines, values, "% between the loss and that of bf16")


def longest(rows: list[Row]) -> Rendered:
    lines, values, limits = [], {}, dict.fromkeys(row["memory"] for row in rows)
    for limit, (mode, (title, _)) in product(limits, longest_sequence.MODES.items()):
        tried = [row for row in rows if (row["peer"], row["memory"]) == (mode, limit)]
        title = f"{title}, {limit:g} GiB" if limit else title
        trained = sorted((row for row in tried if "refused" not in row), key=lambda row: row["tokens"])
        if not tried:
            continue
        most = trained[-1]["tokens"] if trained else 0
        over = [row["tokens"] for row in tried if row["tokens"] > most]
        sizes = (
            [f"{trained[-1][key] / GIB:.1f}" for key in ("allocated", "planned", "reserved")] if trained else [""] * 3
        )
        seconds = f"{trained[-1]['seconds']:.1f}" if trained else ""
        planned = tried[0]["longest_planned"]
        counts = [f"{planned:,}", f"{most:,}" if most else "", f"{min(over):,}" if over else ""]
        lines.append([title, *counts, *sizes, seconds])
        values[title] = {"planned": planned, "trains": most}
    head = ["mode", "planned longest", "trains", "out of memory"]
    return Rendered([*head, "peak GiB", "planned GiB", "reserved GiB", "s/step"], lines, values, "tokens")


# ---------------------------------------------------------------- several GPUs


def several(rows: list[Row]) -> Rendered:
    """Render the cases that ran of layouts on several GPUs, beside the same contender on one."""
    found = {
        (row["round"], row["case"], row["devices"], row["peer"]): row["tokens_per_second"]
        for row in rows
        if "refused" not in row
    }

    def ratio(over: tuple[str, int, str], under: tuple[str, int, str]) -> float | None:
        pairs = [
            speed / found[(r, *under)]
            for (r, *run), speed in found.items()
            if tuple(run) == over and (r, *under) in found
        ]
        return statistics.median(pairs) if pairs else None

    lines, values = [], {}
    for devices in sorted({row["devices"] for row in rows}):
        ran_at_all = {row["case"] for row in rows if row["devices"] == devices}
        for name, case in parallel.CASES.items():
            for peer in parallel.contenders(name, devices) if name in ran_at_all else ():
                own = [row for row in rows if (row["case"], row["devices"], row["peer"]) == (name, devices, peer)]
                ran = [row for row in own if "refused" not in row]
                start = [str(devices), case.title, parallel.TITLES[peer]]
                if not ran:
                    lines.append([*start, own[-1]["refused"] if own else "not run", *[""] * 5])
                    continue
                cards = ", ".join(dict.fromkeys(row["device"].removeprefix("NVIDIA ").split()[0] for row in ran))
                speed, peak = (statistics.median(row[key] for row in ran) for key in ("tokens_per_second", "peak_gib"))
                alone = (case.base, 1, "stoker" if peer in parallel.STOKER else peer)
                single = ratio((name, devices, peer), alone) if devices > 1 else None
                by = ratio((name, devices, "stoker"), (name, devices, peer)) if peer in parallel.PEERS else None
                ideal = f"{single / devices:.3f}" if single else ""
                cells = [f"{speed:,.0f}", f"{speed / devices:,.0f}", f"{peak:.1f}", ideal, _times(by), cards]
                lines.append([*start, *cells])
                if devices > 1:
                    values.setdefault(f"{case.title}, {devices} GPUs", {})[parallel.TITLES[peer]] = speed / devices
    head = ["GPUs", "layout", "run", "tokens/s", "per GPU", "peak GiB", "of its ideal", "stoker is faster by", "card"]
    return Rendered(head, lines, values, "tokens/s per GPU")
