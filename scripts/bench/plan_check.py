"""Compare the plan with the CUDA allocator on random runs, each of a few steps in its own process.

    python scripts/bench/plan_check.py [--seed 1] [--runs 20] [--together 4] [--seconds 500] [--results FILE.jsonl]
    python scripts/bench/plan_check.py --meta [--device h100]
    python scripts/bench/plan_check.py --layouts [NAME ...] [--dry-run] [--seconds 340] [--results FILE.jsonl]

Runs are sampled from a seed: GPT, T5 and MoE models; multi-head and grouped-query attention; every recompute and
offloading mode; several micro batches; sequences of 1k to 32k tokens. Runs whose plan does not fit the GPU, or is too
small to be informative, are sampled again. Rows are appended to the results file, and a run in it is not repeated, so a
table can be measured in several sessions. `--together` runs several processes on the GPU at once as far as their plans
fit: an allocator counts its own process only, but step times are then left out. `--meta` prints the sampled runs with
their plans and needs no GPU.

If micro batches run as a CUDA graph (`recorded`), the graph's memory pool counts as reserved, but not as allocated
except during capture.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rounds import (
    Row,
    append_row,
    deadline,
    machine,
    print_row,
    print_tables,
    read_rows,
    run_in_process,
    used_cuda_graph,
)

GIB = 2**30
STEPS = 6
"""Micro batches that run as a CUDA graph do so after three steps."""
MIN_BYTES, MAX_FRACTION = 4 * GIB, 0.92
"""Smallest plan, as smaller runs say little about large ones; largest fraction of the GPU, as fragmentation may make
larger runs fail."""
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


class SampledRun(NamedTuple):
    """A sampled run: description and overrides."""

    name: str
    overrides: list[str]


def sample_run(rng: random.Random, mode: str) -> SampledRun:
    """Sample a run of a mode."""
    family = rng.choice(["gpt", "gpt", "moe", "t5"])
    unfused = mode == "core"
    length = rng.choice([1024, 2048] if unfused else [1024, 2048, 4096, 8192, 16384, 32768])
    heads = rng.choice([8, 16, 24])
    width = rng.choice([64, 128])
    grouped = rng.random() < 0.5
    layers = rng.choice([4, 8, 12, 16])
    micro = rng.choice([1, 2, 4, 8])
    steps = rng.choice([1, 1, 2])
    hidden = heads * width
    gated = rng.random() < 0.6
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
        experts = rng.choice([4, 8])
        geometry |= {"num_moe_experts": experts, "moe_router_topk": 2, "ffn_hidden_size": hidden}
    stack_keys = {**geometry, **mode_keys(mode, layers, rng)}
    model_keys: dict[str, Any] = {
        "micro_batch_size": micro,
        "global_batch_size": micro * steps,
        "override_vocab_size": rng.choice([32000, 50304, 128256]),
        "megatron_amp_O2": rng.random() < 0.8,
        "cpu_offloading_optimizer": mode == "optimizer",
    }
    words = [family, mode, f"{layers}x{hidden}", "gqa" if grouped else "mha", f"{micro} x {length}"]
    if family == "t5":
        decoder_length = length // 4
        relative = {"kv_channels": width, "position_embedding_type": "relative", "openai_gelu": False}
        stacks = {
            f"{part}.{key}": v for part in ("encoder", "decoder") for key, v in {**stack_keys, **relative}.items()
        }
        more = {"seq_length": length, "data.seq_length_dec": decoder_length, **stacks}
        return SampledRun(" ".join(words), _overrides("t5_v1_1_base", {**model_keys, **more}))
    positions = {"position_embedding_type": "rope" if gated else "learned_absolute", "encoder_seq_length": length}
    return SampledRun(" ".join(words), _overrides("llama_1b", {**model_keys, **stack_keys, **positions}))


def mode_keys(mode: str, layers: int, rng: random.Random) -> dict[str, Any]:
    """Return the keys that a mode sets in each stack."""
    prefix = "activations_checkpoint"
    some = rng.randint(1, layers - 1)
    full = {f"{prefix}_granularity": "full", f"{prefix}_method": "uniform", f"{prefix}_num_layers": 1}
    offload = {"cpu_offloading": True, "cpu_offloading_num_layers": some, "cpu_offloading_weights": False}
    keys: dict[str, dict[str, Any]] = {
        "norm": {f"{prefix}_modules": "[norm]"},
        "cheap": {f"{prefix}_modules": "[norm,mlp_activation]"},
        "full": full,
        "chunks": {**full, f"{prefix}_num_layers": rng.choice([2, 3])},
        "block": {**full, f"{prefix}_method": "block", f"{prefix}_num_layers": some},
        "core": {f"{prefix}_granularity": "selective"},
        "offload": offload,
        "offload_weights": {**offload, "cpu_offloading_activations": False, "cpu_offloading_weights": True},
        "offload_full": {**offload, **full},
    }
    return keys.get(mode, {})


def _overrides(model: str, values: dict[str, Any]) -> list[str]:
    return [f"model={model}", *COMMON, *(f"model.{key}={value}" for key, value in values.items())]


def sample_runs(seed: int, count: int, gpu: str | None) -> list[tuple[SampledRun, Any]]:
    """Sample the runs of a seed, all modes in turn, and return them with their plans."""
    from stoker.trainer.config.problems import ConfigError

    rng, found = random.Random(seed), []
    while len(found) < count:
        sampled = sample_run(rng, MODES[len(found) % len(MODES)])
        try:
            plan = planned(sampled.overrides, gpu)
        except ConfigError:
            continue
        if plan.allocated >= MIN_BYTES and plan.needed <= MAX_FRACTION * (plan.available or 0):
            found.append((sampled, plan))
    return found


def planned(
    overrides: list[str], gpu: str | None = None, memory: int | None = None, world_size: int | None = None
) -> Any:
    """Plan a run on named GPUs, or on this machine's; with `memory` bytes, if given, instead of its own."""
    import torch

    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.config.resolved_run import resolve_run
    from stoker.trainer.plan.hardware import parse_gpu
    from stoker.trainer.plan.run_plan import gpu_target, local_target, make_plan

    root, local = load_run_config(None, None, overrides).root, torch.device("cuda", 0)
    card = parse_gpu(gpu) if gpu else None
    run = resolve_run(
        root, world_size=world_size, capability=card.capability if card else torch.cuda.get_device_capability(local)
    )
    target = gpu_target(run, card) if card else local_target(run, local)
    target = replace(target, memory=memory or target.memory)
    return make_plan(run, target, vocab_size=run.model.override_vocab_size)


def measure(sampled: SampledRun) -> Row:
    """Train one run in this process."""
    import torch

    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.train import run_training
    from stoker.trainer.utils.environment import enable_expandable_segments

    with tempfile.TemporaryDirectory() as directory:
        config = load_run_config(None, None, [*sampled.overrides, f"exp_manager.explicit_log_dir={directory}/r"])
        enable_expandable_segments()  # as a run does, which starts before CUDA is initialized
        plan = planned(sampled.overrides)
        run_training(config)
        rows = [json.loads(line) for line in (Path(directory) / "r" / "metrics.jsonl").read_text().splitlines()]
        recorded = used_cuda_graph(Path(directory) / "r")
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


class MemoryBudget:
    """GPU memory shared by concurrent runs: a run waits until enough of it is free.

    Args:
        size: bytes in total.
    """

    def __init__(self, size: float) -> None:
        self.size = size
        self._free, self._runs, self._changed = size, 0, threading.Condition()

    @contextmanager
    def reserve(self, size: float) -> Iterator[None]:
        """Reserve bytes; a run never waits if no other one is active."""
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
    """Train the runs that are not in the results yet, and return all rows of the seed.

    Args:
        seed: of the sampled runs.
        count: number of runs.
        together: maximum number of concurrent runs.
        results: file to append rows to.
        until: deadline by `time.monotonic`; None for no limit.
    """
    import torch

    done = {row["run"]: row for row in read_rows(results) if row["seed"] == seed}
    budget = MemoryBudget(MAX_FRACTION * torch.cuda.get_device_properties(0).total_memory)

    def run(number: int, sampled: SampledRun, plan: Any) -> None:
        command = [__file__, "--one", json.dumps(sampled)]
        with budget.reserve(plan.needed):
            row = run_in_process(command, until)
        # it may have failed for memory that another run used: repeat it alone
        if together > 1 and row and ("refused" in row or row["recorded"] != plan.inputs.uses_cuda_graph):
            with budget.reserve(budget.size):
                row = run_in_process(command, until)
        if row is None:
            print(f"{number}: {sampled.name}: no time left", flush=True)
            return
        row = {"seed": seed, "run": number, "name": sampled.name, "overrides": sampled.overrides, **row}
        if together > 1:
            row["seconds"] = None
        text = row.get("refused") or f"{100 * error(row):+.1f} %"
        print(f"{number}: {sampled.name}: {text}; took {row['took']:.0f} s", flush=True)
        done[number] = row
        append_row(results, row)

    left = [(number, *one) for number, one in enumerate(sample_runs(seed, count, None)) if number not in done]
    with ThreadPoolExecutor(together) as pool:
        list(pool.map(lambda one: run(*one), left))  # `list` re-raises exceptions of the runs
    return [done[number] for number in sorted(done)]


def error(row: Row) -> float:
    """Return the relative error of the planned peak."""
    return row["planned"] / row["allocated"] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument(
        "--together", type=int, default=1, choices=range(1, 17), metavar="N", help="maximum number of concurrent runs"
    )
    parser.add_argument("--seconds", type=float, help="time limit; runs that would exceed it are left out")
    parser.add_argument("--results", type=Path, help="default plan_check.jsonl, plan_layouts.jsonl with --layouts")
    parser.add_argument("--meta", action="store_true", help="only print the sampled runs and their plans")
    parser.add_argument("--device", default="h100", help="GPU for --meta")
    parser.add_argument(
        "--layouts",
        nargs="*",
        metavar="NAME",
        help="measure layouts of several GPUs, all by default: see plan_layouts.py",
    )
    parser.add_argument("--dry-run", action="store_true", help="train the layouts, shrunk, on processes of the CPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layouts is not None:
        check_layouts(arguments)
        return
    if arguments.one:
        sampled = SampledRun(*json.loads(arguments.one))
        print_row(sampled.name, lambda: measure(sampled))
        return
    if arguments.meta:
        for number, (sampled, plan) in enumerate(sample_runs(arguments.seed, arguments.runs, arguments.device)):
            time = f"{1e3 * plan.time.seconds:,.0f} ms" if plan.time else ""
            print(f"{number}: {sampled.name}: {plan.allocated / GIB:.1f} GiB at {plan.memory.peak.where}, {time}")
        return
    until, results = deadline(arguments.seconds), arguments.results or Path("plan_check.jsonl")
    check(arguments.seed, arguments.runs, arguments.together, results, until)
    print_tables(["plan_check"], results)


def check_layouts(arguments: argparse.Namespace) -> None:
    """Measure layouts and print the report of all in the results.

    Raises:
        SystemExit: a layout is not known, or failed in a dry run.
    """
    from plan_layouts import LAYOUTS, measure_layouts

    names, results = arguments.layouts or list(LAYOUTS), arguments.results or Path("plan_layouts.jsonl")
    if unknown := [name for name in names if name not in LAYOUTS]:
        raise SystemExit(f"--layouts {', '.join(unknown)}: choose of {', '.join(LAYOUTS)}")
    failed = measure_layouts(names, results, arguments.seconds, dry=arguments.dry_run)
    if not arguments.dry_run:
        print_tables(["plan_layouts"], results)
    elif failed:
        raise SystemExit(f"{len(failed)} failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
