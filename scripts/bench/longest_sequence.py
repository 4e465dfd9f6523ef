"""The longest sequence that trains on one GPU: as planned, and tried.

    python scripts/bench/longest_sequence.py [--only none full full_offload] [--memory 40] [--seconds 500]
        [--results FILE.jsonl] [--report FILE.md]
    python scripts/bench/longest_sequence.py --meta [--device h100:40GiB]

`experiment=llama_1b_bench` with one sample in a step: as it is, with all layers recomputed, and with their inputs in
host memory besides. Each mode begins with the longest sequence that the plan says fits, and goes up while it trains, or
down until it does, by 4 % at a time; two steps in a process of its own train, or run out of memory. `--meta` prints
what is planned; it needs no GPU.

Attention is most of the time: a step of 350,000 tokens, which a card of 80 GiB holds when all layers are recomputed,
takes more than two minutes. `--memory` has the allocator give out no more than a card of so many GiB would.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rounds import Row, append_row, deadline, machine, print_row, ran_on, read_rows, run_alone

GIB = 2**30
GRAIN = 1024
"""Tokens: every length is a multiple."""
FACTOR = 1.04
STEPS = 2
"""The optimizer has its state in the second."""
FULL = [
    "model.activations_checkpoint_granularity=full",
    "model.activations_checkpoint_method=uniform",
    "model.activations_checkpoint_num_layers=1",
]
OFFLOAD = ["model.cpu_offloading=True", "model.cpu_offloading_num_layers=23", "model.cpu_offloading_weights=False"]
MODES = {
    "none": ("as it is", []),
    "full": ("full recompute", FULL),
    "full_offload": ("full recompute, inputs of 23 layers in host memory", [*FULL, *OFFLOAD]),
}


def overrides(mode: str, tokens: int) -> list[str]:
    return [
        "experiment=llama_1b_bench",
        "trainer=gpu",
        f"trainer.max_steps={STEPS}",
        "trainer.log_every_n_steps=1",
        "model.micro_batch_size=1",
        "model.global_batch_size=1",
        f"model.encoder_seq_length={tokens}",
        "model.enable_cuda_graph=False",  # a recording keeps what it takes beside what the steps before it took
        *MODES[mode][1],
    ]


def planned(mode: str, tokens: int, card: str | None, memory: int | None = None) -> Any:
    """The plan of a length, on a named card, or on this machine's GPU as if it had so many bytes."""
    import torch

    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.plan.hardware import card_named
    from stoker.trainer.plan.run_plan import make_plan, target_elsewhere, target_here

    root = load_run_config(None, None, overrides(mode, tokens)).root
    target = target_elsewhere(root, card_named(card)) if card else target_here(root, torch.device("cuda", 0))
    return make_plan(root, replace(target, memory=memory or target.memory))


def longest_planned(mode: str, card: str | None, memory: int | None = None) -> int:
    """The longest that the plan says fits, by halving."""
    least, most = 1, 1
    while planned(mode, most * GRAIN, card, memory).fits:
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if planned(mode, middle * GRAIN, card, memory).fits else (least, middle)
    return least * GRAIN


def measure(mode: str, tokens: int, memory: int | None) -> Row:
    """Train two steps of a length in this process."""
    import torch

    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.plan.state_memory import CONTEXT
    from stoker.trainer.train import run_training

    plan = planned(mode, tokens, None, memory)
    if memory:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((memory - CONTEXT) / whole, 0)
    with tempfile.TemporaryDirectory() as directory:
        keys = [*overrides(mode, tokens), f"exp_manager.explicit_log_dir={directory}/r"]
        run_training(load_run_config(None, None, keys))
        rows = [json.loads(line) for line in (Path(directory) / "r" / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row]
    return {
        "peer": mode,
        "planned": plan.allocated,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "seconds": seconds[-1] if seconds else None,
        **machine(),
    }


def search(mode: str, gib: float | None, results: Path, until: float | None) -> None:
    """Try lengths until one trains and its neighbour does not; what is in the results is not tried again."""
    mine = [row for row in read_rows(results) if (row["peer"], row["memory"]) == (mode, gib)]
    trained = {row["tokens"]: "refused" not in row for row in mine}
    tokens = first = longest_planned(mode, None, _bytes(gib))
    while True:
        if tokens not in trained:
            limit = ["--memory", str(gib)] if gib else []
            row = run_alone([__file__, "--one", mode, "--tokens", str(tokens), *limit], until)
            if row is None:
                print(f"{mode}: {tokens:,} tokens: no time left", flush=True)
                return
            row = {"peer": mode, **row, "tokens": tokens, "longest_planned": first, "memory": gib}
            append_row(results, row)
            trained[tokens] = "refused" not in row
            said = row.get("refused") or f"trains, peak {row['allocated'] / GIB:.1f} GiB"
            print(f"{mode}: {tokens:,} tokens: {said}; took {row['took']:.0f} s", flush=True)
        if trained[tokens] != trained[first]:
            return
        following = int(tokens * (FACTOR if trained[first] else 1 / FACTOR) / GRAIN) * GRAIN
        tokens = max(following, tokens + GRAIN) if trained[first] else min(following, tokens - GRAIN)
        if tokens <= 0:
            return


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def table(rows: Iterable[Row], gib: float | None) -> str:
    """The report: for each mode the longest that trained, beside the plan."""
    rows = [row for row in rows if row["memory"] == gib]
    ran = [row for row in rows if "refused" not in row]
    if not ran:
        return "nothing trained\n"
    lines = [
        f"{ran_on(ran)}{f'; {gib:g} GiB of it' if gib else ''}.",
        "",
        "| mode | longest as planned | trains | out of memory | peak GiB | planned GiB | reserved GiB | s/step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mode, (title, _) in MODES.items():
        tried = [row for row in rows if row["peer"] == mode]
        mine = [row for row in tried if "refused" not in row]
        if not tried:
            continue
        if not mine:
            least = min(row["tokens"] for row in tried)
            lines.append(f"| {title} | {tried[0]['longest_planned']:,} | | {least:,} | | | | |")
            continue
        best = max(mine, key=lambda row: row["tokens"])
        over = [row["tokens"] for row in tried if row["tokens"] > best["tokens"]]
        tokens = f"{best['longest_planned']:,} | {best['tokens']:,} | {f'{min(over):,}' if over else ''}"
        sizes = " | ".join(f"{best[key] / GIB:.1f}" for key in ("allocated", "planned", "reserved"))
        lines.append(f"| {title} | {tokens} | {sizes} | {best['seconds']:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--memory", type=float, metavar="GIB", help="use no more of the GPU")
    parser.add_argument("--seconds", type=float, help="leave out what would not be done by then")
    parser.add_argument("--results", type=Path, default=Path("longest_sequence.jsonl"))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--meta", action="store_true", help="print what is planned only")
    parser.add_argument("--device", default="h100", help="the card of --meta")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.meta:
        for mode in arguments.only:
            print(f"{mode}: {longest_planned(mode, arguments.device):,} tokens")
        return
    if arguments.one:
        print_row(arguments.one, lambda: measure(arguments.one, arguments.tokens, _bytes(arguments.memory)))
        return
    until = deadline(arguments.seconds)
    for mode in arguments.only:
        search(mode, arguments.memory, arguments.results, until)
    report = table(read_rows(arguments.results), arguments.memory)
    print(report)
    if arguments.report:
        arguments.report.write_text(report)


if __name__ == "__main__":
    main()
