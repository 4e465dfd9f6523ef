"""One report of all benchmarks: the tables and plots of docs/results, in the marked parts of docs/benchmarks.md.

    python scripts/bench/report.py                      write docs/benchmarks.md, docs/plots/*.svg and docs/speed.svg
    python scripts/bench/report.py NAME [--results F]   print one table, of another results file

A table is an entry of `TABLES`; one with results fills the lines between `<!-- table: NAME -->` and `<!-- end -->`.
Figures are medians over rounds, ratios medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

import data_parallel
import generate
import longest_sequence
import loop_overhead
import lora_step
import memory_modes
import moe_step
import parallel
import plan_layouts
import t5_step
import training_step
from rounds import Row, environment_line, failures, read_rows

from stoker.trainer.plan.hardware import bf16_peak_flops

DOCS = Path(__file__).resolve().parents[2] / "docs"
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


@dataclass(frozen=True)
class Table:
    """Entry of the report.

    Attributes:
        file: in docs/results.
        render: of the rows that `keep` selects.
        overrides: run of stoker whose tokens per second at the peak of the GPU are the limit.
    """

    file: str
    render: Callable[[list[Row]], Rendered]
    keep: Callable[[Row], bool] = field(default=lambda row: True)
    overrides: Sequence[str] = ()

    def rows(self, results: Path | None = None) -> list[Row]:
        """Return the selected rows of a file, by default of the own one; none if it is missing."""
        return [row for row in read_rows(results or DOCS / "results" / self.file) if self.keep(row)]


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
PEERS = ("hf", "plain")
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


def tokens_at_peak(device: str, overrides: Sequence[str]) -> float | None:
    """Return the tokens per second at which a training step has as many FLOP/s as the GPU's peak."""
    from torch import device as torch_device

    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.config.resolved_run import resolve_run
    from stoker.trainer.core.training_loop import build_throughput

    run = resolve_run(load_run_config(None, None, list(overrides)).root, world_size=1, capability=(9, 0))
    peak = bf16_peak_flops(device)
    return peak and peak / build_throughput(run, run.data.vocab_size or 32000, torch_device("cpu")).flops_per_token


def memory(shape: str, run: str, names: str) -> Table:
    """Return the table of memory modes, the named ones of a shape; `run` is how rows of one run are marked."""
    found = memory_modes.SHAPES[shape]
    modes, peers = memory_modes.modes_of(found), memory_modes.PEERS
    titles = {name: mode.title for name, mode in modes.items()} | {name: peer[0] for name, peer in peers.items()}
    bases = {name: mode.base for name, mode in modes.items()} | {name: peer[2] for name, peer in peers.items()}
    bases = {name: base.replace("_all", f"_{found.layers - 1}") for name, base in bases.items()}
    titles = {name: titles[name] for name in names.split()} if names else titles
    return Table(
        "memory_modes.jsonl",
        runs(titles, MEMORY, base=bases, by_speed=False),
        lambda row: row["shape"] == shape and row["peer"] in titles and _is_of(row, run),
        memory_modes.overrides_of(found),
    )


def _is_of(row: Row, run: str) -> bool:
    return row["run"].startswith(run) if run and "run" in row else not run and "run" not in row


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
    """Render the runs of the last seed, and the errors of all seeds."""
    ran = [row for row in rows if "refused" not in row]
    shown, notes = [row for row in ran if row["seed"] == max(row["seed"] for row in ran)], []
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
        lines.append([row["layout"], *(f"{time:.1f}" for time in times.values()), time_error, *sizes])
        values[row["layout"]] = times
    notes = [
        f"Mean error of {what} {100 * statistics.mean(found):.1f} %, worst {100 * max(found):.1f} %."
        for what, error in errors.items()
        if (found := [abs(error(row)) for row in ran])
    ]
    notes += [f"{row['layout']}: {row['refused']}." for row in rows if "refused" in row]
    head = ["layout", "planned ms", "ms", "error", "planned GiB", "GiB", "error", "planned GiB used", "GiB used"]
    return Rendered(head, lines, values, "ms", notes=notes)


def longest(rows: list[Row]) -> Rendered:
    lines, values = [], {}
    for mode, (title, _) in longest_sequence.MODES.items():
        tried = [row for row in rows if row["peer"] == mode]
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
    """Render layouts on several GPUs, beside the same contender on one."""
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
        for name, case in parallel.CASES.items():
            for peer in parallel.contenders(name, devices):
                own = [row for row in rows if (row["case"], row["devices"], row["peer"]) == (name, devices, peer)]
                ran = [row for row in own if "refused" not in row]
                start = [str(devices), case.title, parallel.TITLES[peer]]
                if not ran:
                    lines.append([*start, own[-1]["refused"] if own else "not run", *[""] * 4])
                    continue
                speed, peak = (statistics.median(row[key] for row in ran) for key in ("tokens_per_second", "peak_gib"))
                alone = (case.base, 1, "stoker" if peer in parallel.STOKER else peer)
                single = ratio((name, devices, peer), alone) if devices > 1 else None
                by = ratio((name, devices, "stoker"), (name, devices, peer)) if peer in parallel.PEERS else None
                ideal = f"{single / devices:.3f}" if single else ""
                cells = [f"{speed:,.0f}", f"{speed / devices:,.0f}", f"{peak:.1f}", ideal, _times(by)]
                lines.append([*start, *cells])
                if single:
                    values.setdefault(f"{case.title}, {devices} GPUs", {})[parallel.TITLES[peer]] = single / devices
    head = ["GPUs", "layout", "run", "tokens/s", "per GPU", "peak GiB", "of its ideal", "stoker is faster by"]
    return Rendered(head, lines, values, "speed over the own single GPU's times their number", 1.0)


# ---------------------------------------------------------------- all tables


GENERATE = ("tokens/s", "ms/token", "of the limit", "peak GiB", "stoker is faster by")
ATTENTION = kernels({"forward": 1.0, "backward": 2.5, "both": 3.5})
SECTIONS = dict.fromkeys(("plain", "short", "distance", "memory", "lse_first"), ATTENTION)
SECTIONS |= {"host": from_host, "softmax": softmax}
EXPERTS = kernels({"forward": 1.0, "backward": 2.0, "both": 3.0}, milliseconds=True)
MATMULS = kernels({"forward": 1.0}, milliseconds=True)
LOOP = runs(loop_overhead.TITLES, ("ms/step", "time, of the bare loop"), base="loop", by_speed=False)
MOVED, ONE_RUN = "2026-11-23, all that", "2026-11-23, one run"
TABLES: dict[str, Table] = {
    "training_step": Table("training_step.jsonl", runs(training_step.TITLES), overrides=training_step.OVERRIDES),
    **{
        f"loop_{case}": Table("loop_overhead.jsonl", LOOP, lambda row, case=case: row["case"] == case)
        for case in loop_overhead.CASES
    },
    **{
        f"t5_{name}": Table(
            "t5_step.jsonl", runs(t5_step.TITLES), lambda row, name=name: row["shape"] == name, shape.overrides
        )
        for name, shape in t5_step.SHAPES.items()
    },
    "moe_step": Table("moe_step.jsonl", runs(moe_step.TITLES, base="stoker_bf16"), overrides=["experiment=moe_bench"]),
    "moe_layer": Table("moe_layer.jsonl", EXPERTS, lambda row: row["section"] == "layer"),
    "moe_matmul": Table("moe_layer.jsonl", MATMULS, lambda row: row["section"] == "matmul"),
    **{
        f"lora{'_packed' * packed}": Table(
            "lora_step.jsonl",
            runs(lora_step.TITLES, base=f"stoker{'_packed' * packed}"),
            lambda row, packed=packed: row["peer"].endswith("_packed") == packed,
            ["experiment=llama_1b_lora"],
        )
        for packed in (False, True)
    },
    **{
        f"generate_{batch}": Table(
            "generate.jsonl",
            runs(generate.TITLES, GENERATE, limit=lambda row, batch=batch: batch / row["limit"]),
            lambda row, batch=batch: row["batch"] == batch,
        )
        for batch in (1, 32)
    },
    "memory_1b": memory("1b", "", ""),
    "memory_wide": memory("wide", "", ""),
    "memory_recompute": memory("1b", "2026-11-22", "none full plain_inside plain_around"),
    "memory_selective": memory("1b", MOVED, "none cheap unfused unfused_selective"),
    "memory_offload": memory("1b", ONE_RUN, ""),
    "memory_offload_wide": memory("wide", ONE_RUN, ""),
    "memory_state": memory("wide", MOVED, "none full weights optimizer"),
    "longest_sequence": Table("longest_sequence.jsonl", longest),
    "plan_check": Table("plan_check.jsonl", plans),
    "plan_layouts": Table("plan_layouts.jsonl", layouts),
    **{
        f"attention_{name}": Table("attention.jsonl", render, lambda row, name=name: row["section"] == name)
        for name, render in SECTIONS.items()
    },
    "data_parallel": Table("data_parallel.jsonl", exchange, overrides=training_step.OVERRIDES),
    "parallel": Table("parallel.jsonl", several),
}
SPEED = {
    "GPT 1.2 B, sequence 4096": ("training_step", "stoker"),
    "MoE 1.5 B, 8 experts top-2, bf16": ("moe_step", "stoker_bf16"),
    "T5 base, 512 / 114 tokens": ("t5_short", "stoker"),
    "T5 base, 2048 / 512 tokens": ("t5_long", "stoker"),
}
"""Table and contender of each bar of docs/speed.svg."""


def environment(rows: Iterable[Row]) -> str:
    """Return the line above a table: GPU, versions, date, rounds and windows."""
    ran = [row for row in rows if "device" in row]
    text = environment_line(ran)
    count = max(len({row["round"] for row in ran if "round" in row}), ran[0].get("rounds", 0))
    seconds = ran[0].get("seconds")
    windows = f" of {len(seconds)} windows" if isinstance(seconds, list) and "peer" in ran[0] else ""
    return f"{text}; {count} round{'s' * (count > 1)}{windows}." if count else f"{text}."


def render(name: str, rows: list[Row]) -> Rendered:
    """Render a table; the limit of training steps is the tokens per second at the peak of the GPU."""
    table = TABLES[name]
    found = table.render(rows)
    if table.overrides and found.limit is None:
        device = next(row["device"] for row in rows if "device" in row)
        found = found._replace(limit=tokens_at_peak(device, table.overrides))
    return found


def markdown(name: str, rows: list[Row], found: Rendered) -> str:
    """Return a table as Markdown, its environment above and its notes below."""
    lines = [f"| {' | '.join(cells)} |" for cells in (found.head, ["---"] * len(found.head), *found.lines)]
    return "\n".join([environment(rows), "", *lines, *(["", " ".join(found.notes)] if found.notes else [])])


def text_of(name: str, results: Path | None = None) -> str:
    """Return a table for the terminal; a line if nothing has run."""
    rows = TABLES[name].rows(results)
    if all(isinstance(row.get("refused"), str) for row in rows):
        return f"{name}: nothing ran\n"
    return f"{name}\n\n{markdown(name, rows, TABLES[name].render(rows))}\n"


# ---------------------------------------------------------------- plots

COLORS = ("#1f5fa8", "#d0763a", "#5a9e5a", "#a35fa8", "#8a7a3a", "#777777")
LEFT, WIDTH, ROW, TOP = 400, 460, 18, 40


def draw(values: Values, unit: str, limit: float | None, limit_name: str = "limit") -> str:
    """Return an SVG: a line for each label, with a bar for one value or a dot for each of several; the limit dashed."""
    series = list(dict.fromkeys(name for row in values.values() for name in row))
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(series)}
    scale = WIDTH / max([value for row in values.values() for value in row.values()] + ([limit] if limit else []))
    bottom = TOP + ROW * len(values)

    def text(x: float, y: float, label: str, anchor: str = "start", color: str = "black") -> str:
        return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{color}">{escape(label)}</text>'

    parts = [text(LEFT, bottom + 32, unit)]
    for number, name in enumerate(series if len(series) > 1 else ()):
        parts.append(text(10 + (LEFT + WIDTH) * number // len(series), 14, f"\u25cf {name}", color=colors[name]))
    for tick in (0, 0.25, 0.5, 0.75, 1):
        value = WIDTH / scale * tick
        parts.append(
            text(LEFT + WIDTH * tick, bottom + 16, f"{value:,.{0 if value >= 10 or not tick else 2}f}", "middle")
        )
        parts.append(f'<path d="M{LEFT + WIDTH * tick} {TOP}V{bottom}" stroke="#dddddd"/>')
    if limit:
        x = LEFT + scale * limit
        parts.append(f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="#b02020" stroke-dasharray="4 3"/>')
        parts.append(text(x, TOP - 10, limit_name, "middle", "#b02020"))
    for number, (label, row) in enumerate(values.items()):
        y = TOP + ROW * number + ROW // 2
        parts.append(text(LEFT - 8, y + 4, label[:70], "end"))
        for name, value in reversed(row.items()):  # the first one on top
            x = scale * value
            if len(row) > 1:
                parts.append(f'<circle cx="{LEFT + x:.1f}" cy="{y}" r="4" fill="{colors[name]}" fill-opacity="0.8"/>')
                continue
            parts.append(f'<rect x="{LEFT}" y="{y - 6}" width="{x:.1f}" height="12" fill="{colors[name]}"/>')
            parts.append(text(LEFT + x + 4, y + 4, f"{value:,.{0 if value >= 100 else 2}f}"))
    size = f'width="{LEFT + WIDTH + 70}" height="{bottom + 40}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def speed_values() -> Values:
    """Return the speed of stoker over the fastest peer of each training step, the median within their rounds."""
    found: Values = {}
    for title, (name, base) in SPEED.items():
        rows = [row for row in TABLES[name].rows() if "refused" not in row]
        ours = [row for row in rows if row["peer"] == base]
        peers = {row["peer"] for row in rows if row["peer"].startswith(PEERS)}
        ratios = [Contender(peer, [row for row in rows if row["peer"] == peer], ours, "").ratio for peer in peers]
        label = f"{title} ({ours[-1]['device']}, {ours[-1]['date']})"
        found[label] = {"stoker": min(ratio for ratio in ratios if ratio is not None)}
    return found


# ---------------------------------------------------------------- the page


def files() -> dict[Path, str]:
    """Return the content of the page and of all plots.

    Raises:
        ValueError: the page has no place for a table with results, or one for a table without.
    """
    page = (DOCS / "benchmarks.md").read_text()
    unit = "training throughput relative to the fastest peer of the same run"
    found = {DOCS / "speed.svg": draw(speed_values(), unit, 1.0, "fastest peer")}
    measured = {name: rows for name, table in TABLES.items() if (rows := table.rows())}
    marked = re.findall(r"^<!-- table: (\w+) -->$", page, re.MULTILINE)
    if sorted(marked) != sorted(measured):
        raise ValueError(f"tables with results {sorted(measured)} must be those in benchmarks.md: {sorted(marked)}")
    for name, rows in measured.items():
        rendered = render(name, rows)
        found[DOCS / "plots" / f"{name}.svg"] = draw(rendered.values, rendered.unit, rendered.limit)
        new = f"{markdown(name, rows, rendered)}\n\n![{name}](plots/{name}.svg)"
        pattern = rf"(?<=<!-- table: {name} -->\n).*?(?=\n<!-- end -->)"
        page = re.sub(pattern, lambda _, new=new: new, page, count=1, flags=re.DOTALL)
    return {DOCS / "benchmarks.md": page, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=TABLES)
    parser.add_argument("--results", type=Path, help="results file of the named table")
    arguments = parser.parse_args()
    if arguments.name:
        print(text_of(arguments.name, arguments.results))
        return
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
