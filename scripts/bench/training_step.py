"""Training-step benchmark: `experiment=llama_1b_bench` beside its peers, each in a process of its own, in turns.

    python scripts/bench/training_step.py [--rounds 3] [--only stoker hf ...] [--results FILE.jsonl] [--report FILE.md]

Each round runs every peer once; a run warms up, then times windows of 10 steps with one device sync at each end. The
figure of a run is the median window, the figure of a peer the median of its runs. Rows are appended to the results
file, so a table may be made in several sittings; peers are compared within a round only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import PEERS, Shape, Step

WARM_UP, WINDOWS, WINDOW = 20, 5, 10
OVERRIDES = ["experiment=llama_1b_bench", f"trainer.log_every_n_steps={WINDOW}"]
STOKER = {
    "stoker": "stoker: `stoker train experiment=llama_1b_bench`",
    "stoker_loop": "stoker's model, optimizer and kernels in a bare loop",
}
TITLES = {**STOKER, **{name: title for name, (title, _) in PEERS.items()}}


def time_windows(step: Step, shape: Shape) -> list[float]:
    """Seconds per step of each timed window, on fresh random tokens every step."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def run(count: int) -> None:
        for _ in range(count):
            size = (shape.micro_batch, shape.sequence + 1)
            drawn = torch.randint(0, shape.vocab, size, device="cuda", generator=generator)
            step(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
        torch.cuda.synchronize()

    run(WARM_UP)
    seconds = []
    for _ in range(WINDOWS):
        start = time.perf_counter()
        run(WINDOW)
        seconds.append((time.perf_counter() - start) / WINDOW)
    return seconds


def stoker_loop(_: Shape) -> Step:
    """The parts of `stoker train` without Lightning, data feed and logs."""
    from stoker.kernels.attention.flags import read_flags
    from stoker.models.build import build_gpt
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.optim.adamw import AdamW

    keys = load_run_config(None, None, OVERRIDES).root.model
    model = build_gpt(
        keys,
        vocab_size=keys.override_vocab_size or 0,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        flags=read_flags(),
        micro_batch_size=keys.micro_batch_size,
    )
    optimizer = AdamW(
        model.named_parameters(),
        lr=1e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        main_weights=True,
        clip_norm=1.0,
    )

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model.loss(tokens, labels, float(labels.numel()))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def stoker_windows() -> list[float]:
    """Seconds per step as `stoker train` itself measures and logs them, one value per log interval."""
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.run import run_training

    with tempfile.TemporaryDirectory() as directory:
        steps = WARM_UP + WINDOWS * WINDOW
        overrides = [*OVERRIDES, f"trainer.max_steps={steps}", f"exp_manager.explicit_log_dir={directory}/run"]
        run_training(load_run_config(None, None, overrides))
        rows = [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["step_seconds"] for row in rows if row["step"] > WARM_UP and "step_seconds" in row]


def measure(name: str) -> dict[str, Any]:
    """Run one peer in this process."""
    shape = Shape()
    builders: dict[str, Callable[[Shape], Step]] = {n: build for n, (_, build) in PEERS.items()}
    builders["stoker_loop"] = stoker_loop
    seconds = stoker_windows() if name == "stoker" else time_windows(builders[name](shape), shape)
    import triton

    return {
        "peer": name,
        "seconds": seconds,
        "tokens_per_second": shape.micro_batch * shape.sequence / statistics.median(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The report: peers from fastest to slowest, with the ratio to `stoker train` taken within each round."""
    rounds = sorted({row["round"] for row in rows})
    speed = {(row["round"], row["peer"]): row["tokens_per_second"] for row in rows}
    names = {row["peer"] for row in rows}
    median = {n: statistics.median(speed[r, n] for r in rounds if (r, n) in speed) for n in names}
    first = rows[0]
    lines = [
        f"Device: {first['device']}; torch {first['torch']}, cuDNN {first['cudnn']}, triton {first['triton']};"
        f" {first['date']}; {len(rounds)} rounds.",
        "",
        "| run | tokens/s | ms/step | peak GiB | `stoker train` is faster by |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(names, key=lambda n: -median[n]):
        ratios = [speed[r, "stoker"] / speed[r, name] for r in rounds if {(r, "stoker"), (r, name)} <= set(speed)]
        ratio = f"{statistics.median(ratios):.3f} x" if ratios and name != "stoker" else ""
        peak = statistics.median(row["peak_gib"] for row in rows if row["peer"] == name)
        milliseconds = 1e3 * Shape.micro_batch * Shape.sequence / median[name]
        lines.append(f"| {TITLES[name]} | {median[name]:,.0f} | {milliseconds:.1f} | {peak:.1f} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=sorted(TITLES), default=sorted(TITLES))
    parser.add_argument("--results", type=Path, default=Path("training_step.jsonl"))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--one", choices=sorted(TITLES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    done = (
        [json.loads(line) for line in arguments.results.read_text().splitlines()] if arguments.results.exists() else []
    )
    first_round = 1 + max((row["round"] for row in done), default=0)
    for number in range(first_round, first_round + arguments.rounds):
        for name in arguments.only:
            command = [sys.executable, __file__, "--one", name]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                print(f"{name} failed:\n{result.stdout[-2000:]}{result.stderr[-4000:]}", file=sys.stderr)
                continue
            row = json.loads(result.stdout.splitlines()[-1]) | {"round": number}
            done.append(row)
            with arguments.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"round {number}: {name} {row['tokens_per_second']:,.0f} tokens/s", flush=True)
    report = table(done)
    print(report)
    if arguments.report:
        arguments.report.write_text(report)


if __name__ == "__main__":
    main()
