"""One report of all benchmarks: the tables and plots of docs/results, in the marked parts of docs/benchmarks.md.

    python scripts/bench/report.py                      write docs/benchmarks.md, docs/plots/*.svg and docs/speed.svg
    python scripts/bench/report.py NAME [--results F]   print one table, of another results file

A table is an entry of `TABLES`; one with results fills the lines between `<!-- table: NAME -->` and `<!-- end -->`.
Figures are medians over rounds, ratios medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import fp8_step
import generate
import loop_overhead
import lora_step
import memory_modes
import moe_step
import step_floor
import t5_step
import training_step
from report_plot import draw
from report_tables import (
    MEMORY,
    PEERS,
    Contender,
    Rendered,
    Values,
    exchange,
    from_host,
    kernels,
    layouts,
    longest,
    losses,
    plans,
    runs,
    several,
    softmax,
)
from rounds import Row, environment_line, read_rows

from stoker.trainer.plan.hardware import bf16_peak_flops

DOCS = Path(__file__).resolve().parents[2] / "docs"


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


# ---------------------------------------------------------------- all tables


GENERATE = ("tokens/s", "ms/token", "of the limit", "peak GiB", "stoker is faster by")
ATTENTION = kernels({"forward": 1.0, "backward": 2.5, "both": 3.5})
SECTIONS = dict.fromkeys(("plain", "short", "lengths", "distance", "memory", "lse_first"), ATTENTION)
SECTIONS |= {"host": from_host, "softmax": softmax}
EXPERTS = kernels({"forward": 1.0, "backward": 2.0, "both": 3.0}, milliseconds=True)
MATMULS = kernels({"forward": 1.0}, milliseconds=True)
LOOP = runs(loop_overhead.TITLES, ("ms/step", "time, of the bare loop"), base="loop", by_speed=False)
FLOOR = runs(step_floor.TITLES, ("tokens/s", "ms/step", "speed"), base="floor")
MOVED, ONE_RUN = "2026-11-23, all that", "2026-11-23, one run"
TABLES: dict[str, Table] = {
    **{
        f"training_step_{name}": Table(
            "training_step.jsonl",
            runs(model.titles, base={peer: f"stoker{'_bf16' * peer.endswith('_bf16')}" for peer in model.titles}),
            lambda row, name=name: row["model"] == name,
            model.overrides,
        )
        for name, model in training_step.MODELS.items()
    },
    **{
        f"step_floor_{name}": Table(
            "step_floor.jsonl", FLOOR, lambda row, name=name: row["model"] == name, model.overrides
        )
        for name, model in training_step.MODELS.items()
    },
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
    **{
        f"fp8_step_{model}": Table(
            "fp8_step.jsonl",
            runs(fp8_step.TITLES),
            lambda row, model=model: row["model"] == model,
            [f"experiment={case.work.experiment}"],
        )
        for model, case in fp8_step.MODELS.items()
    },
    "fp8_loss": Table("fp8_loss.jsonl", losses),
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
    **{
        name: Table("attention_cudnn.jsonl", ATTENTION, lambda row, section=section: row["section"] == section)
        for name, section in (("attention_cudnn", "plain"), ("attention_bias", "distance"))
    },
    "data_parallel": Table("data_parallel.jsonl", exchange, overrides=training_step.MODELS["gpt"].overrides),
    "parallel": Table("parallel.jsonl", several),
}
SPEED = {
    "GPT 1.2 B, sequence 4096": ("training_step_gpt", "stoker"),
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
        new = f"{markdown(name, rows, rendered)}\n\n![{name}](plots/{name}.svg)\n"
        pattern = rf"(?<=<!-- table: {name} -->\n).*?(?=<!-- end -->)"
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
