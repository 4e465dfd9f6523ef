"""Find the longest sequence that trains on one GPU, and compare it with the plan.

    python scripts/bench/longest_sequence.py [--only none full full_offload] [--memory 40] [--seconds 500]
        [--results FILE.jsonl]
    python scripts/bench/longest_sequence.py --meta [--device h100:40GiB]

`experiment=llama_1b_bench` with one sample per step: unchanged, with full recomputation, and with full recomputation
and offloaded layer inputs. Each mode starts with the longest sequence that fits according to the plan, and increases it
while it trains, or decreases it until it does, by 4 % at a time; each try runs two steps in its own process. `--meta`
prints the planned lengths and needs no GPU.

Attention takes most of the time: a step of 350,000 tokens, which fits on a GPU of 80 GiB with full recomputation, takes
more than two minutes. `--memory` limits the allocator to the memory of a GPU of that many GiB.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from plan_check import GIB, planned
from rounds import Row, append_row, deadline, machine, print_row, print_tables, read_rows, run_in_process

GRAIN = 1024
"""Every sequence length is a multiple of this."""
FACTOR = 1.04
STEPS = 2
"""Optimizer state exists from the second step on."""
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
        "model.enable_cuda_graph=False",  # a graph's memory pool adds to the memory of the steps before its capture
        *MODES[mode][1],
    ]


def longest_planned(mode: str, gpu: str | None, memory: int | None = None) -> int:
    """Return the longest sequence that fits according to the plan, by bisection."""
    low, high = 1, 1
    while planned(overrides(mode, high * GRAIN), gpu, memory).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if planned(overrides(mode, middle * GRAIN), gpu, memory).fits else (low, middle)
    return low * GRAIN


def measure(mode: str, tokens: int, memory: int | None) -> Row:
    """Train two steps of `tokens` tokens in this process."""
    import torch

    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.plan.state_memory import CUDA_CONTEXT_BYTES
    from stoker.trainer.train import run_training

    plan = planned(overrides(mode, tokens), None, memory)
    if memory:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((memory - CUDA_CONTEXT_BYTES) / total, 0)
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
    """Try lengths until one trains and the next one does not; lengths in `results` are not repeated."""
    measured = [row for row in read_rows(results) if (row["peer"], row["memory"]) == (mode, gib)]
    trained = {row["tokens"]: "refused" not in row for row in measured}
    tokens = first = longest_planned(mode, None, _bytes(gib))
    while True:
        if tokens not in trained:
            limit = ["--memory", str(gib)] if gib else []
            found = run_in_process([__file__, "--one", mode, "--tokens", str(tokens), *limit], until)
            if found is None:
                print(f"{mode}: {tokens:,} tokens: no time left", flush=True)
                return
            row: Row = {"peer": mode, **found, "tokens": tokens, "longest_planned": first, "memory": gib}
            append_row(results, row)
            trained[tokens] = "refused" not in row
            text = row.get("refused") or f"trains, peak {row['allocated'] / GIB:.1f} GiB"
            print(f"{mode}: {tokens:,} tokens: {text}; took {row['took']:.0f} s", flush=True)
        if trained[tokens] != trained[first]:
            return
        following = int(tokens * (FACTOR if trained[first] else 1 / FACTOR) / GRAIN) * GRAIN
        tokens = max(following, tokens + GRAIN) if trained[first] else min(following, tokens - GRAIN)
        if tokens <= 0:
            return


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--memory", type=float, metavar="GIB", help="limit of GPU memory")
    parser.add_argument("--seconds", type=float, help="time limit; runs that would exceed it are left out")
    parser.add_argument("--results", type=Path, default=Path("longest_sequence.jsonl"))
    parser.add_argument("--meta", action="store_true", help="only print the planned lengths")
    parser.add_argument("--device", default="h100", help="GPU for --meta")
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
    print_tables(["longest_sequence"], arguments.results)


if __name__ == "__main__":
    main()
