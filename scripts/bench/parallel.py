"""Training on 1, 2, 4 and 8 GPUs of one host in each layout: stoker, torchtitan and Megatron-core in the same run.

    python scripts/bench/parallel.py --devices 1 2 4 [--cases fsdp tp ...] [--only stoker torchtitan ...] [--rounds 3]
        [--seconds 500] [--results docs/results/parallel.jsonl]
    python scripts/bench/parallel.py --dry-run [--devices 2] [--cases tp]

A round runs every case, and in each case every contender, one after the other; a figure is the median of the rounds,
a ratio the median of the ratios within a round. Rows that are in the results file are not measured again, so a table
may take several sessions on machines of one kind. Peers that are not installed are reported as not run. The ideal
is the speed of the same contender on one GPU times their number; 131,072 tokens are one sequence, with full recompute,
whole on one GPU. `--dry-run` measures and writes nothing: it trains the cases of stoker shrunk, two steps each, on
processes of the CPU.

The MoE cases force a balanced load in all contenders: random tokens teach a router nothing, and every layer waits for
the fullest rank (docs/moe.md), so that its imbalance would be measured with the layout. stoker and Megatron-core draw
random logits (`moe_router_force_load_balancing`), by which the fullest of four ranks gets about 1.005 times its share;
torchtitan assigns experts in turn (`debug.moe_force_load_balance`). Experts on several ranks get their tokens by the
dispatcher `flex`, and by `alltoall`, like those of the peers, in `stoker_alltoall`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rounds import Length, Row, append_row, deadline, machine, print_row, print_tables, read_rows, run_in_process

DOCS = Path(__file__).resolve().parents[2] / "docs"
FSDP = ["model.fsdp=true"]
ZERO1 = ["model.optim.name=distributed_fused_adam"]
RECOMPUTE = [f"model.activations_checkpoint_{key}" for key in ("granularity=full", "method=uniform", "num_layers=1")]

RUN_LIMIT = 240.0
"""Seconds of a run."""
DEFAULT_LENGTH = Length(warm_up=10, windows=4, window=10)


@dataclass(frozen=True)
class Work:
    """Model and batches that are trained.

    Attributes:
        experiment: configuration of stoker.
        sequence: tokens per sample.
        micro_batch: samples of a forward pass.
        length: steps of a run; stoker times windows from its start, so that the warm-up is a multiple of them.
        overrides: further keys of stoker.
    """

    experiment: str
    sequence: int = 4096
    micro_batch: int = 4
    length: Length = DEFAULT_LENGTH
    overrides: tuple[str, ...] = ()


GPT = Work("llama_1b_bench")
MANY = Work("llama_1b_bench", length=Length(warm_up=3, windows=3, window=3))  # steps of up to 8 micro batches
MOE = Work("moe_bench", overrides=("model.moe_router_force_load_balancing=true",))
LONG = Work("llama_1b_bench", 131_072, 1, Length(warm_up=2, windows=3, window=2), tuple(RECOMPUTE))


@dataclass(frozen=True)
class Case:
    """A layout on any number of devices.

    Attributes:
        title: name in the tables.
        work: what is trained.
        axis: what the devices share: `data` under FSDP, or `tensor`, `context` or `expert` parallelism.
        samples: samples per step, on each device if `weak`, else in all.
        weak: the samples grow with the devices.
        base: case whose run on one device is the same training without communication.
        exchange: `cp_comm_type`.
    """

    title: str
    work: Work
    axis: Literal["data", "tensor", "context", "expert"]
    samples: int
    weak: bool
    base: str
    exchange: str = ""

    def samples_per_step(self, devices: int) -> int:
        return self.samples * (devices if self.weak else 1)

    def tokens_per_step(self, devices: int) -> int:
        return self.samples_per_step(devices) * self.work.sequence

    def size(self, axis: str, devices: int) -> int:
        """Return the number of ranks on an axis."""
        return devices if axis == self.axis else 1


def _context(exchange: str) -> Case:
    title = f"CP, {exchange}, 131,072 tokens"
    return Case(title, LONG, "context", samples=1, weak=False, base="cp_p2p", exchange=exchange)


CASES = {
    "fsdp": Case("FSDP, weak scaling: 4 samples per GPU", GPT, "data", samples=4, weak=True, base="fsdp"),
    "strong": Case("FSDP, strong scaling: 32 samples in all", MANY, "data", samples=32, weak=False, base="strong"),
    "tp": Case("TP + SP: 4 samples in all", GPT, "tensor", samples=4, weak=False, base="fsdp"),
    "moe": Case("MoE, balanced, FSDP: 4 samples per GPU", MOE, "data", samples=4, weak=True, base="moe"),
    "moe_ep": Case("MoE, balanced, EP: 4 samples per GPU", MOE, "expert", samples=4, weak=True, base="moe"),
    "cp_p2p": _context("p2p"),
    "cp_all_gather": _context("all_gather"),
    "cp_a2a": _context("a2a"),
    "cp_a2a_p2p": _context("a2a+p2p"),
}
STOKER = {
    "stoker": "stoker",
    "stoker_zero1": "stoker, distributed optimizer",
    "stoker_alltoall": "stoker, dispatcher alltoall",
}
PEERS = {"torchtitan": "torchtitan", "megatron": "Megatron-core, distributed optimizer"}
NEEDS = {"torchtitan": ("torchtitan",), "megatron": ("megatron", "transformer_engine")}
"""Packages of the peers; Megatron-core's sequence and context parallelism need TransformerEngine."""
TITLES = {**STOKER, **PEERS}


def contenders(name: str, devices: int) -> list[str]:
    """Return the contenders of a case on a number of devices; none if another case is the same there."""
    case = CASES[name]
    if (devices == 1 and case.base != name) or (case.exchange == "a2a+p2p" and devices < 4):
        return []
    found = ["stoker", "torchtitan", "megatron"]
    if case.axis in ("data", "expert") and devices > 1:
        found.insert(1, "stoker_zero1")
    if case.axis == "expert" and devices > 1:
        found.insert(2, "stoker_alltoall")
    if case.exchange.startswith("a2a"):
        found.remove("torchtitan")  # has no all-to-all over heads
    return found


def missing(name: str) -> str:
    """Return the packages of a peer that are not installed."""
    return ", ".join(package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None)


# ---------------------------------------------------------------- stoker


def overrides(name: str, case: Case, devices: int, *, dry: bool) -> list[str]:
    """Return the keys of stoker."""
    work = case.work
    parts = {"model.micro_batch_size": work.micro_batch, "model.global_batch_size": case.samples_per_step(devices)}
    keys = [f"experiment={work.experiment}", f"trainer.devices={devices}", *work.overrides]
    keys += [f"{key}={value if not dry else max(1, value // 4)}" for key, value in parts.items()]
    if dry:
        small = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "override_vocab_size": 320}
        keys += [f"model.{key}={value}" for key, value in small.items()]
        keys += ["model.encoder_seq_length=64", "trainer.accelerator=cpu", "trainer.precision=32"]
    else:
        keys.append(f"model.encoder_seq_length={work.sequence}")
    if devices == 1:
        return keys
    keys += ZERO1 if name == "stoker_zero1" or case.axis == "context" else []
    keys += FSDP if name != "stoker_zero1" and case.axis in ("data", "expert") else []
    if case.axis == "tensor":
        keys += [f"model.tensor_model_parallel_size={devices}", "model.sequence_parallel=true"]
    if case.axis == "context":
        keys += [f"model.context_parallel_size={devices}", f"model.cp_comm_type={case.exchange}"]
    if case.exchange == "a2a+p2p":
        keys.append(f"model.hierarchical_context_parallel_sizes=[{devices // 2},2]")
    if case.axis == "expert":
        dispatcher = "alltoall" if dry or name == "stoker_alltoall" else "flex"  # which needs GPUs
        keys += [f"model.expert_model_parallel_size={devices}", f"model.moe_token_dispatcher_type={dispatcher}"]
    return keys


def train(keys: list[str], steps: int, log_every: int) -> list[Row]:
    """Run `stoker train` and return its metrics.

    Raises:
        RuntimeError: it failed.
    """
    from stoker.trainer.cli.main import main as stoker

    with tempfile.TemporaryDirectory() as directory:
        length = [f"trainer.max_steps={steps}", f"trainer.log_every_n_steps={log_every}"]
        code = stoker(["train", *keys, *length, f"exp_manager.explicit_log_dir={directory}/r"])
        if code:
            raise RuntimeError(f"stoker train exited with {code}: {' '.join(keys)}")
        return [json.loads(line) for line in (Path(directory) / "r" / "metrics.jsonl").read_text().splitlines()]


def measure(name: str, case: Case, devices: int) -> Row:
    """Run one contender and return its row."""
    length = case.work.length
    if name in PEERS:
        from parallel_peers import run_peer

        found = run_peer(name, case, devices)
        seconds, peak = found["seconds"], found["peak_gib"]
    else:
        steps = length.warm_up + length.windows * length.window
        rows = train(overrides(name, case, devices, dry=False), steps, length.window)
        rows = [row for row in rows if row["step"] > length.warm_up and "step_seconds" in row]
        seconds, peak = [row["step_seconds"] for row in rows], max(row["memory_gib"] for row in rows)
    speed = case.tokens_per_step(devices) / statistics.median(seconds)
    versions = {package: _version(package) for package in ("torchtitan", "megatron-core", "transformer_engine")}
    return {
        "peer": name,
        "seconds": seconds,
        "tokens_per_second": speed,
        "peak_gib": peak,
        **machine(),
        **{package: version for package, version in versions.items() if name in PEERS and version},
    }


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dry_run(names: Iterable[str], devices: Iterable[int]) -> None:
    """Train the cases of stoker, shrunk, on processes of the CPU.

    Raises:
        SystemExit: some case failed.
    """
    failed = []
    for name in names:
        for count in devices:
            for contender in (found for found in contenders(name, count) if found in STOKER):
                place = f"{name} x{count}: {contender}"
                try:
                    rows = train(overrides(contender, CASES[name], count, dry=True), steps=2, log_every=1)
                    losses = [row["loss"] for row in rows if "loss" in row]
                    print(f"{place}: losses {', '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
                except RuntimeError as error:
                    failed.append(place)
                    print(f"{place}: {error}", flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} failed: {'; '.join(failed)}")


# ---------------------------------------------------------------- rounds


def run_rounds(arguments: argparse.Namespace) -> None:
    """Measure what the results file lacks, round by round."""
    import torch

    until, gpus = deadline(arguments.seconds), torch.cuda.device_count()
    if max(arguments.devices) > gpus:
        raise SystemExit(f"--devices {max(arguments.devices)}: this machine has {gpus} GPUs; use --dry-run on a CPU")
    found = read_rows(arguments.results)
    done = {(row["round"], row["case"], row["devices"], row["peer"]) for row in found}
    absent = {name: missing(name) for name in arguments.only}
    for name, packages in absent.items():
        if packages:
            print(f"{TITLES[name]}: not run: {packages} is not installed", flush=True)
    for number in range(1, arguments.rounds + 1):
        for case in arguments.cases:
            for devices in arguments.devices:
                for name in contenders(case, devices):
                    place = (number, case, devices, name)
                    if place in done or name not in arguments.only or absent[name]:
                        continue
                    row = None
                    if until is None or time.monotonic() < until:
                        command = [__file__, "--one", name, "--cases", case, "--devices", str(devices)]
                        limit = time.monotonic() + RUN_LIMIT  # a run that hangs costs no other its time
                        row = run_in_process(command, limit if until is None else min(until, limit))
                    text = f"round {number}: {case} x{devices}: {name}"
                    if row is None:
                        print(f"{text}: not done in time", flush=True)
                        continue
                    row = {"peer": name, **row, "round": number, "case": case, "devices": devices}
                    append_row(arguments.results, row)
                    speed = row.get("refused") or f"{row['tokens_per_second']:,.0f} tokens/s"
                    print(f"{text}: {speed}; took {row['took']:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", type=int, help="numbers of GPUs; default 1 2 4, 2 with --dry-run")
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(TITLES), default=list(TITLES), metavar="NAME", help=", ".join(TITLES)
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds that the results shall have; 0 measures nothing")
    parser.add_argument("--seconds", type=float, help="time limit; runs that would exceed it are left out")
    parser.add_argument("--results", type=Path, default=DOCS / "results" / "parallel.jsonl", help="file to append to")
    parser.add_argument("--dry-run", action="store_true", help="try the cases of stoker on the CPU, without results")
    parser.add_argument("--one", choices=list(TITLES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.devices = arguments.devices or ([2] if arguments.dry_run else [1, 2, 4])
    if arguments.dry_run:
        dry_run(arguments.cases, arguments.devices)
        return
    if arguments.one:
        case, devices = CASES[arguments.cases[0]], arguments.devices[0]
        print_row(arguments.one, lambda: measure(arguments.one, case, devices))
        return
    if arguments.rounds:
        run_rounds(arguments)
    print_tables(["parallel"], arguments.results)


if __name__ == "__main__":
    main()
