"""Benchmarks of training steps: every contender in a process of its own, in turns, some rounds of them.

A run warms up, then times windows of steps with one device sync at each end. The figure of a run is the median window,
the figure of a contender the median of its runs. Rows are appended to a results file, so that a table may be made in
several sittings; contenders are compared within a round only. A contender that fails has a row with the reason, and the
others go on; one that is not done when `--seconds` are over has none.
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
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

STOKER = "stoker"
PACKAGES = ("transformers", "peft", "liger_kernel")
"""Whose versions a row has, where they were used."""
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

    torch.cuda.reset_peak_memory_stats()  # a model that is made in fp32 may take more than its steps in bf16
    run(length.warm_up)
    seconds = []
    for _ in range(length.windows):
        start = time.perf_counter()
        run(length.window)
        seconds.append((time.perf_counter() - start) / length.window)
    return seconds


def stoker_result(name: str, overrides: list[str], length: Length, tokens: int) -> Row:
    """The row of `stoker train`: seconds per step as it measures and logs them, one value per log interval."""
    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.train import run_training

    with tempfile.TemporaryDirectory() as directory:
        more = [
            f"trainer.log_every_n_steps={length.window}",
            f"trainer.max_steps={length.warm_up + length.windows * length.window}",
            f"exp_manager.explicit_log_dir={directory}/r",
        ]
        run_training(load_run_config(None, None, [*overrides, *more]))
        rows = [json.loads(line) for line in (Path(directory) / "r" / "metrics.jsonl").read_text().splitlines()]
        recorded = was_recorded(Path(directory) / "r")
    seconds = [row["step_seconds"] for row in rows if row["step"] > length.warm_up and "step_seconds" in row]
    return result(name, seconds, tokens) | {"recorded": recorded}


def was_recorded(run: Path) -> bool:
    """Whether the micro batches of a run, more than warm up, became a CUDA graph, by what the run says of itself."""
    said = (run / "run.log").read_text()
    given_up = "continuing without CUDA graphs" in said
    return "micro batches run as a CUDA graph" in said and not given_up


def result(name: str, seconds: list[float], tokens: int) -> Row:
    """What a run gives: `tokens` per step."""
    return {
        "peer": name,
        "seconds": seconds,
        "tokens_per_second": tokens / statistics.median(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        **machine(),
    }


def machine() -> Row:
    """What a run ran on, and when."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        **{package: metadata.version(package) for package in PACKAGES if package in sys.modules},
        "date": datetime.date.today().isoformat(),
    }


def print_row(name: str, measure: Callable[[], Row]) -> None:
    """Run one contender in this process and print its row, which is what `run_alone` reads; a failure is a row too."""
    try:
        row = measure()
    except Exception as error:  # whatever a peer raises is its reason, and goes into the table
        traceback.print_exc()
        row = {"peer": name, "refused": _reason(error), **machine()}
    print(json.dumps(row), flush=True)


def _reason(error: BaseException) -> str:
    """Why a contender does not run, in a few words."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return "out of memory" if "out of memory" in said.lower() else said[:200].replace("|", "/")


def run_alone(command: list[str], until: float | None) -> Row | None:
    """Run a command to its end and return the row that it prints; None where it is not done `until` then.

    Args:
        command: of this Python.
        until: by `time.monotonic`; None gives it all the time it takes.
    """
    started = time.monotonic()
    left = None if until is None else until - started
    if left is not None and left <= 0:
        return None
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        try:  # into files: what outlives a process that is ended may keep a pipe open
            ran = subprocess.run([sys.executable, *command], stdout=said, stderr=complained, timeout=left)
        except subprocess.TimeoutExpired:
            return None
        said.seek(0)
        complained.seek(0)
        lines, errors = said.read().splitlines(), complained.read()
    rows = [line for line in lines if line.startswith("{")]
    ended = " ".join(f"ended with {ran.returncode} {errors[-200:]}".split())
    row: Row = json.loads(rows[-1]) if rows else {"refused": ended}
    if "refused" in row:
        print(errors[-2000:], file=sys.stderr, flush=True)
    return row | {"took": round(time.monotonic() - started, 1)}


def read_rows(results: Path) -> list[Row]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def append_row(results: Path, row: Row) -> None:
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def run_rounds(
    script: str, more: list[str], names: list[str], results: Path, rounds: int, until: float | None = None, **marks: Any
) -> list[Row]:
    """Run `script --one NAME` for each name, `rounds` times in turns, and append the rows, marked with `marks`.

    Where that would take longer than `until`, by `time.monotonic`, the rest is left out.
    """
    done = [row for row in read_rows(results) if all(row.get(key) == value for key, value in marks.items())]
    first = 1 + max((row["round"] for row in done), default=0)
    for number in range(first, first + rounds):
        for name in names:
            least = min((row.get("took", 0.0) for row in done if row["peer"] == name), default=0.0)
            row = None
            if until is None or time.monotonic() + least < until:
                row = run_alone([script, "--one", name, *more], until)
            if row is None:
                print(f"round {number}: {name}: no time left", flush=True)
                continue
            row = {"peer": name, **row, "round": number, **marks}
            done.append(row)
            append_row(results, row)
            said = row.get("refused") or f"{row['tokens_per_second']:,.0f} tokens/s, peak {row['peak_gib']:.1f} GiB"
            print(f"round {number}: {name}: {said}; took {row['took']:.0f} s", flush=True)
    return done


def refusals(rows: Iterable[Row]) -> dict[str, str]:
    """Why contenders have no figures, of those that have none."""
    rows = list(rows)
    ran = {row["peer"] for row in rows if "refused" not in row}
    return {row["peer"]: row["refused"] for row in rows if row["peer"] not in ran}


def table(rows: list[Row], titles: Mapping[str, str], tokens: int, base: str = STOKER) -> str:
    """The report: contenders from fastest to slowest, with the ratio to `base`, ours, taken within each round."""
    refused = refusals(rows)
    rows = [row for row in rows if "refused" not in row]
    rounds = sorted({row["round"] for row in rows})
    speed = {(row["round"], row["peer"]): row["tokens_per_second"] for row in rows}
    names = {row["peer"] for row in rows}
    median = {n: statistics.median(speed[r, n] for r in rounds if (r, n) in speed) for n in names}
    lines = [
        f"{ran_on(rows)}; {len(rounds)} rounds.",
        "",
        "| run | tokens/s | ms/step | peak GiB | `stoker train` is faster by |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(names, key=lambda n: -median[n]):
        ratios = [speed[r, base] / speed[r, name] for r in rounds if {(r, base), (r, name)} <= set(speed)]
        ratio = f"{statistics.median(ratios):.3f} x" if ratios and name != base else ""
        peak = statistics.median(row["peak_gib"] for row in rows if row["peer"] == name)
        milliseconds = 1e3 * tokens / median[name]
        lines.append(f"| {titles[name]} | {median[name]:,.0f} | {milliseconds:.1f} | {peak:.1f} | {ratio} |")
    lines += [f"| {titles[name]} | {reason} | | | |" for name, reason in refused.items()]
    return "\n".join(lines) + "\n"


def ran_on(rows: list[Row]) -> str:
    """The line above a table."""
    if not rows:
        return "Nothing ran"
    newest = rows[-1]
    versions = {name: newest[key] for name, key in (("torch", "torch"), ("cuDNN", "cudnn"), ("triton", "triton"))}
    versions |= {package: row[package] for row in rows for package in PACKAGES if package in row}
    said = ", ".join(f"{name.replace('_kernel', '')} {version}" for name, version in versions.items())
    return f"Device: {newest['device']}; {said}; {newest['date']}"


def add_arguments(parser: argparse.ArgumentParser, script: str, names: Iterable[str]) -> None:
    """What each of these command lines takes."""
    names = list(names)
    parser.add_argument("--rounds", type=int, default=3, help="besides those that are there; 0 prints the tables only")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seconds", type=float, help="leave out what would not be done by then")
    parser.add_argument("--results", type=Path, default=Path(f"{Path(script).stem}.jsonl"), help="rows are appended")
    parser.add_argument("--report", type=Path, help="write the tables of these results here, as markdown")
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)


def deadline(seconds: float | None) -> float | None:
    """When so many seconds are over, by `time.monotonic`."""
    return None if seconds is None else time.monotonic() + seconds


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
    add_arguments(parser, script, titles)
    arguments = parser.parse_args()
    if arguments.one:
        print_row(arguments.one, lambda: measure(arguments.one))
        return
    until = deadline(arguments.seconds)
    rows = run_rounds(script, [], arguments.only, arguments.results, arguments.rounds, until)
    report = table(rows, titles, tokens)
    print(report)
    if arguments.report:
        arguments.report.write_text(report)
