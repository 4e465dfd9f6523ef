"""Benchmarks of training steps: every contender in a process of its own, in turns, some rounds of them.

A run warms up, then times windows of steps with one device sync at each end. The figure of a run is the median window,
the figure of a contender the median of its runs. Rows are appended to a results file, so that a table may be made in
several sittings; contenders are compared within a round only.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

STOKER = "stoker"
Row = dict[str, Any]


class Length(NamedTuple):
    """Steps of a run: to warm up, then so many windows of so many steps."""

    warm_up: int = 20
    windows: int = 5
    window: int = 10


def time_windows(step: Callable[[], object], length: Length) -> list[float]:
    """Seconds per step of each timed window."""

    def run(count: int) -> None:
        for _ in range(count):
            step()
        torch.cuda.synchronize()

    run(length.warm_up)
    seconds = []
    for _ in range(length.windows):
        start = time.perf_counter()
        run(length.window)
        seconds.append((time.perf_counter() - start) / length.window)
    return seconds


def stoker_windows(overrides: list[str], length: Length) -> list[float]:
    """Seconds per step as `stoker train` itself measures and logs them, one value per log interval."""
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.run import run_training

    with tempfile.TemporaryDirectory() as directory:
        more = [
            f"trainer.log_every_n_steps={length.window}",
            f"trainer.max_steps={length.warm_up + length.windows * length.window}",
            f"exp_manager.explicit_log_dir={directory}/r",
        ]
        run_training(load_run_config(None, None, [*overrides, *more]))
        rows = [json.loads(line) for line in (Path(directory) / "r" / "metrics.jsonl").read_text().splitlines()]
    return [row["step_seconds"] for row in rows if row["step"] > length.warm_up and "step_seconds" in row]


def result(name: str, seconds: list[float], tokens: int) -> Row:
    """What a run gives: `tokens` per step."""
    import triton

    return {
        "peer": name,
        "seconds": seconds,
        "tokens_per_second": tokens / statistics.median(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
    }


def read_rows(results: Path) -> list[Row]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def run_rounds(script: str, more: list[str], names: list[str], results: Path, rounds: int, **marks: Any) -> list[Row]:
    """Run `script --one NAME` for each name, `rounds` times in turns, and append the rows, marked with `marks`."""
    done = [row for row in read_rows(results) if all(row.get(key) == value for key, value in marks.items())]
    first = 1 + max((row["round"] for row in done), default=0)
    for number in range(first, first + rounds):
        for name in names:
            ran = subprocess.run([sys.executable, script, "--one", name, *more], capture_output=True, text=True)
            if not ran.returncode:
                row = json.loads(ran.stdout.splitlines()[-1])
                print(f"round {number}: {name} {row['tokens_per_second']:,.0f} tokens/s", flush=True)
            elif "OutOfMemoryError" in ran.stderr:
                row = {"peer": name, "refused": "out of memory"}
                print(f"round {number}: {name} ran out of memory", flush=True)
            else:
                print(f"{name} failed:\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}", file=sys.stderr)
                continue
            row |= {"round": number, **marks}
            done.append(row)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return done


def table(rows: list[Row], titles: Mapping[str, str], tokens: int) -> str:
    """The report: contenders from fastest to slowest, with the ratio to `stoker train` taken within each round."""
    refused = {row["peer"]: row["refused"] for row in rows if "refused" in row}
    rows = [row for row in rows if "refused" not in row]
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
        ratios = [speed[r, STOKER] / speed[r, name] for r in rounds if {(r, STOKER), (r, name)} <= set(speed)]
        ratio = f"{statistics.median(ratios):.3f} x" if ratios and name != STOKER else ""
        peak = statistics.median(row["peak_gib"] for row in rows if row["peer"] == name)
        milliseconds = 1e3 * tokens / median[name]
        lines.append(f"| {titles[name]} | {median[name]:,.0f} | {milliseconds:.1f} | {peak:.1f} | {ratio} |")
    lines += [f"| {titles[name]} | {reason} | | | |" for name, reason in refused.items() if name not in names]
    return "\n".join(lines) + "\n"


def main_of_one_shape(
    script: str, description: str | None, titles: Mapping[str, str], measure: Callable[[str], Row], tokens: int
) -> None:
    """The command line of a benchmark of one shape: run the rounds, print the table.

    Args:
        script: its file, which is run again for each contender.
        description: for `--help`.
        titles: of the contenders, by name.
        measure: runs one contender in this process.
        tokens: of a step.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=sorted(titles), default=sorted(titles))
    parser.add_argument("--results", type=Path, default=Path(f"{Path(script).stem}.jsonl"))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--one", choices=sorted(titles), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    rows = run_rounds(script, [], arguments.only, arguments.results, arguments.rounds)
    report = table(rows, titles, tokens)
    print(report)
    if arguments.report:
        arguments.report.write_text(report)
