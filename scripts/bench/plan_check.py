"""The plan beside the CUDA allocator: runs drawn by a seed, each for some steps in a process of its own.

    python scripts/bench/plan_check.py [--seed 1] [--runs 20] [--together 4] [--seconds 500] [--results FILE.jsonl]
        [--report FILE.md]
    python scripts/bench/plan_check.py --meta [--device h100]

Runs are GPT, T5 and mixtures of experts; multi-head and grouped-query attention; every mode of recomputation and
offloading; micro batches; sequences of 1k to 32k tokens. A draw whose plan does not fit the card, or is too small to
tell anything, is drawn again. Rows are appended to the results file: a run that is there already is not repeated, so a
table may be made in several sittings. `--together` has several on the card at once, as far as their plans say that they
fit beside each other: an allocator counts its own process alone, but the times of steps are then left out. `--meta`
prints the drawn runs with their plans; it needs no GPU.

Where micro batches run as a CUDA graph (`recorded`), the graph keeps its memory to itself, which is in the reserved
memory and not in the allocated one, except while it is recorded.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rounds import Row, append_row, deadline, machine, print_row, ran_on, read_rows, run_alone, was_recorded

GIB = 2**30
STEPS = 6
"""Where micro batches become a CUDA graph, they do so after three."""
FEWEST, MOST = 4 * GIB, 0.92
"""A plan below the first says little about large runs; one above that part of the card may fail for its fragments."""
COMMON = [
    "data=mock",
    "trainer=gpu",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=0",
    "trainer.enable_progress_bar=False",
    "exp_manager.create_checkpoint_callback=False",
    "exp_manager.create_tensorboard_logger=False",
]
MODES = (
    "none",
    "norm",
    "cheap",
    "full",
    "chunks",
    "block",
    "core",
    "offload",
    "offload_weights",
    "offload_full",
    "optimizer",
)


class Drawn(NamedTuple):
    """A run: what it is in words, and the overrides that make it."""

    name: str
    overrides: list[str]


def draw(random_numbers: random.Random, mode: str) -> Drawn:
    """One run of a mode."""
    family = random_numbers.choice(["gpt", "gpt", "moe", "t5"])
    unfused = mode == "core"
    length = random_numbers.choice([1024, 2048] if unfused else [1024, 2048, 4096, 8192, 16384, 32768])
    heads = random_numbers.choice([8, 16, 24])
    width = random_numbers.choice([64, 128])
    grouped = random_numbers.random() < 0.5
    layers = random_numbers.choice([4, 8, 12, 16])
    micro = random_numbers.choice([1, 2, 4, 8])
    steps = random_numbers.choice([1, 1, 2])
    hidden = heads * width
    gated = random_numbers.random() < 0.6
    geometry = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": (hidden * 11 // 4 if gated else hidden * 4) // 64 * 64,
        "num_attention_heads": heads,
        "num_query_groups": heads // 4 if grouped else heads,
        "activation": "swiglu" if gated else "gelu",
        "normalization": "rmsnorm" if gated else "layernorm",
        "bias": not gated,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if unfused:
        geometry["attention_backend"] = "unfused"
    if family == "moe":
        experts = random_numbers.choice([4, 8])
        geometry |= {"num_moe_experts": experts, "moe_router_topk": 2, "ffn_hidden_size": hidden}
    of_stack = {**geometry, **mode_keys(mode, layers, random_numbers)}
    of_model: dict[str, Any] = {
        "micro_batch_size": micro,
        "global_batch_size": micro * steps,
        "override_vocab_size": random_numbers.choice([32000, 50304, 128256]),
        "megatron_amp_O2": random_numbers.random() < 0.8,
        "cpu_offloading_optimizer": mode == "optimizer",
    }
    words = [family, mode, f"{layers}x{hidden}", "gqa" if grouped else "mha", f"{micro} x {length}"]
    if family == "t5":
        answer = length // 4
        relative = {"kv_channels": width, "position_embedding_type": "relative", "openai_gelu": False}
        stacks = {f"{part}.{key}": v for part in ("encoder", "decoder") for key, v in {**of_stack, **relative}.items()}
        more = {"seq_length": length, "data.seq_length_dec": answer, **stacks}
        return Drawn(" ".join(words), _overrides("t5_v1_1_base", {**of_model, **more}))
    positions = {"position_embedding_type": "rope" if gated else "learned_absolute", "encoder_seq_length": length}
    return Drawn(" ".join(words), _overrides("llama_1b", {**of_model, **of_stack, **positions}))


def mode_keys(mode: str, layers: int, random_numbers: random.Random) -> dict[str, Any]:
    """What a mode sets in each stack."""
    place = "activations_checkpoint"
    some = random_numbers.randint(1, layers - 1)
    full = {f"{place}_granularity": "full", f"{place}_method": "uniform", f"{place}_num_layers": 1}
    offload = {"cpu_offloading": True, "cpu_offloading_num_layers": some, "cpu_offloading_weights": False}
    keys: dict[str, dict[str, Any]] = {
        "norm": {f"{place}_modules": "[norm]"},
        "cheap": {f"{place}_modules": "[norm,mlp_activation]"},
        "full": full,
        "chunks": {**full, f"{place}_num_layers": random_numbers.choice([2, 3])},
        "block": {**full, f"{place}_method": "block", f"{place}_num_layers": some},
        "core": {f"{place}_granularity": "selective"},
        "offload": offload,
        "offload_weights": {**offload, "cpu_offloading_activations": False, "cpu_offloading_weights": True},
        "offload_full": {**offload, **full},
    }
    return keys.get(mode, {})


def _overrides(model: str, values: dict[str, Any]) -> list[str]:
    return [f"model={model}", *COMMON, *(f"model.{key}={value}" for key, value in values.items())]


def drawn_runs(seed: int, count: int, card: str | None) -> list[tuple[Drawn, Any]]:
    """The runs of a seed with their plans: every mode in turn."""
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.config.problems import ConfigError
    from stoker.trainer.plan.run_plan import make_plan

    random_numbers, found = random.Random(seed), []
    while len(found) < count:
        drawn = draw(random_numbers, MODES[len(found) % len(MODES)])
        try:
            root = load_run_config(None, None, drawn.overrides).root
        except ConfigError:
            continue
        plan = make_plan(root, _target(root, card), vocab_size=root.model.override_vocab_size)
        if plan.allocated >= FEWEST and plan.needed <= MOST * (plan.available or 0):
            found.append((drawn, plan))
    return found


def _target(root: Any, card: str | None) -> Any:
    import torch

    from stoker.trainer.plan.hardware import card_named
    from stoker.trainer.plan.run_plan import target_elsewhere, target_here

    return target_elsewhere(root, card_named(card)) if card else target_here(root, torch.device("cuda", 0))


def measure(drawn: Drawn) -> Row:
    """Run it in this process."""
    import torch

    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.plan.run_plan import make_plan
    from stoker.trainer.train import run_training

    with tempfile.TemporaryDirectory() as directory:
        config = load_run_config(None, None, [*drawn.overrides, f"exp_manager.explicit_log_dir={directory}/r"])
        plan = make_plan(config.root, _target(config.root, None), vocab_size=config.root.model.override_vocab_size)
        run_training(config)
        rows = [json.loads(line) for line in (Path(directory) / "r" / "metrics.jsonl").read_text().splitlines()]
        recorded = was_recorded(Path(directory) / "r")
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row]
    return {
        "planned": plan.allocated,
        "planned_reserved": plan.reserved,
        "planned_seconds": plan.time.seconds if plan.time else None,
        "peak_at": plan.memory.peak.where,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "recorded": recorded,
        "seconds": min(seconds) if seconds else None,
        **machine(),
    }


class Room:
    """The memory of the card, lent to runs: one that finds too little of it waits for others to end."""

    def __init__(self, size: float) -> None:
        self.size = size
        self._free, self._runs, self._changed = size, 0, threading.Condition()

    @contextmanager
    def taken(self, size: float) -> Iterator[None]:
        """Hold that many bytes; a run alone is never refused."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size or not self._runs)
            self._free, self._runs = self._free - size, self._runs + 1
        try:
            yield
        finally:
            with self._changed:
                self._free, self._runs = self._free + size, self._runs - 1
                self._changed.notify_all()


def check(seed: int, count: int, together: int, results: Path, until: float | None) -> list[Row]:
    """Run what is not in the results yet, as far as it is done `until` then; all rows of the seed.

    Args:
        seed: of the drawn runs.
        count: of them.
        together: how many are on the card at once, where they fit.
        results: rows are appended to it.
        until: by `time.monotonic`.
    """
    import torch

    done = {row["run"]: row for row in read_rows(results) if row["seed"] == seed}
    room = Room(MOST * torch.cuda.get_device_properties(0).total_memory)

    def run(number: int, drawn: Drawn, plan: Any) -> None:
        command = [__file__, "--one", json.dumps(drawn)]
        with room.taken(plan.needed):
            row = run_alone(command, until)
        # was it another's memory that was missing?
        if together > 1 and row and ("refused" in row or row["recorded"] != plan.facts.is_recorded):
            with room.taken(room.size):
                row = run_alone(command, until)
        if row is None:
            print(f"{number}: {drawn.name}: no time left", flush=True)
            return
        row = {"seed": seed, "run": number, "name": drawn.name, "overrides": drawn.overrides, **row}
        if together > 1:
            row["seconds"] = None
        said = row.get("refused") or f"{100 * error(row):+.1f} %"
        print(f"{number}: {drawn.name}: {said}; took {row['took']:.0f} s", flush=True)
        done[number] = row
        append_row(results, row)

    left = [(number, *one) for number, one in enumerate(drawn_runs(seed, count, None)) if number not in done]
    with ThreadPoolExecutor(together) as pool:
        list(pool.map(lambda one: run(*one), left))  # a list raises what a run has raised
    return [done[number] for number in sorted(done)]


def error(row: Row) -> float:
    """Of the planned peak, in parts of the measured one."""
    return row["planned"] / row["allocated"] - 1


def table(rows: list[Row]) -> str:
    """The report: each run, then mean and worst error."""
    ran = [row for row in rows if "refused" not in row]
    if not ran:
        return "nothing ran\n"
    lines = [
        f"{ran_on(ran)}; seed {ran[0]['seed']}.",
        "",
        "| run | planned GiB | allocated GiB | error | reserved GiB | recorded | planned ms | ms | peak at |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in ran:
        sizes = (row[key] / GIB for key in ("planned", "allocated", "reserved"))
        planned, allocated, reserved = (f"{size:.2f}" for size in sizes)
        times = (f"{1e3 * row[key]:.0f}" if row[key] else "" for key in ("planned_seconds", "seconds"))
        compared = [planned, allocated, f"{100 * error(row):+.1f} %", reserved, "yes" if row["recorded"] else "no"]
        lines.append(f"| {' | '.join([row['name'], *compared, *times, row['peak_at']])} |")
    errors = [abs(error(row)) for row in ran]
    lines += ["", f"Mean error {100 * sum(errors) / len(errors):.1f} %, worst {100 * max(errors):.1f} %."]
    lines += [f"{row['name']}: {row['refused']}." for row in rows if "refused" in row]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--together", type=int, default=1, choices=range(1, 17), metavar="N", help="as many on the card at once"
    )
    parser.add_argument("--seconds", type=float, help="leave out what would not be done by then")
    parser.add_argument("--results", type=Path, default=Path("plan_check.jsonl"))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--meta", action="store_true", help="print the drawn runs and their plans only")
    parser.add_argument("--device", default="h100", help="the card of --meta")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        drawn = Drawn(*json.loads(arguments.one))
        print_row(drawn.name, lambda: measure(drawn))
        return
    if arguments.meta:
        for number, (drawn, plan) in enumerate(drawn_runs(arguments.seed, arguments.runs, arguments.device)):
            time = f"{1e3 * plan.time.seconds:,.0f} ms" if plan.time else ""
            print(f"{number}: {drawn.name}: {plan.allocated / GIB:.1f} GiB at {plan.memory.peak.where}, {time}")
        return
    until = deadline(arguments.seconds)
    report = table(check(arguments.seed, arguments.runs, arguments.together, arguments.results, until))
    print(report)
    if arguments.report:
        arguments.report.write_text(report)


if __name__ == "__main__":
    main()
