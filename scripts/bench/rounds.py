"""Shared harness of the step benchmarks: each contender runs in its own process, alternating over several rounds.

A run warms up, then times windows of steps with one device sync at each end. The figure of a run is its median window,
the figure of a contender the median of its runs. Rows are appended to a results file, so a table can be measured in
several sessions; contenders are compared only within a round. A contender that fails gets a row with the reason, and
the others continue; one that is not done within `--seconds` gets none.
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
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

STOKER = "stoker"
PACKAGES = ("transformers", "peft", "liger_kernel", "torchtitan", "megatron-core")
"""Packages whose versions are recorded in a row if the run imported them."""
Row = dict[str, Any]


class Length(NamedTuple):
    """Number of warm-up steps of a run, of timed windows, and of steps in a window."""

    warm_up: int = 20
    windows: int = 5
    window: int = 10


def time_windows(step: Callable[[], object], length: Length) -> list[float]:
    """Return the seconds per step of each timed window."""

    def run(count: int) -> None:
        for _ in range(count):
            step()
        torch.cuda.synchronize()

    torch.cuda.reset_peak_memory_stats()  # initializing a model in fp32 may take more memory than its steps in bf16
    run(length.warm_up)
    seconds = []
    for _ in range(length.windows):
        start = time.perf_counter()
        run(length.window)
        seconds.append((time.perf_counter() - start) / length.window)
    return seconds


def stoker_result(name: str, overrides: list[str], length: Length, tokens: int) -> Row:
    """Run `stoker train` and return its row, with the seconds per step that it logs at every log interval."""
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
        recorded = used_cuda_graph(Path(directory) / "r")
    seconds = [row["step_seconds"] for row in rows if row["step"] > length.warm_up and "step_seconds" in row]
    return result(name, seconds, tokens) | {"recorded": recorded}


def peak_mib(call: Callable[[], object]) -> float:
    """Return the device memory that a call allocates at its peak, in MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def used_cuda_graph(run: Path) -> bool:
    """Return True if the run's log says that micro batches or layers ran as CUDA graphs, captured without failure."""
    # fragments of the messages in trainer/core/run_summary.py and trainer/lightning/cuda_graph.py
    log = (run / "run.log").read_text()
    captured = "micro batches run as a CUDA graph" in log or "layers run as CUDA graphs" in log
    return captured and "continuing without CUDA graphs" not in log


def result(name: str, seconds: list[float], tokens: int) -> Row:
    """Return the row of a run with `tokens` tokens per step."""
    return {
        "peer": name,
        "seconds": seconds,
        "tokens_per_second": tokens / statistics.median(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        **machine(),
    }


def machine() -> Row:
    """Return GPU, package versions and date of a run."""
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        **{package: metadata.version(package) for package in PACKAGES if package in sys.modules},
        "date": datetime.date.today().isoformat(),
    }


def print_row(name: str, measure: Callable[[], Row]) -> None:
    """Run one contender in this process and print its row, or a row with the failure, for `run_in_process` to read."""
    try:
        row = measure()
    except Exception as error:  # the table shows whatever a peer raises
        traceback.print_exc()
        row = {"peer": name, "refused": _reason(error), **machine()}
    print(json.dumps(row), flush=True)


def _reason(error: BaseException) -> str:
    """Return a short reason for a failure."""
    message = str(error).strip()
    if isinstance(error, ProcessRaisedException):  # whose message is the traceback of a rank
        message = message.splitlines()[-1]
    text = " ".join(f"{type(error).__name__}: {message}".split())
    return "out of memory" if "out of memory" in text.lower() else text[:200].replace("|", "/")


def run_in_process(command: list[str], until: float | None) -> Row | None:
    """Run a command in its own process and return the row it prints; None if it is not done by `until`.

    Args:
        command: arguments of the Python interpreter.
        until: deadline by `time.monotonic`; None for no limit.
    """
    started = time.monotonic()
    timeout = None if until is None else until - started
    if timeout is not None and timeout <= 0:
        return None
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        try:  # files, not pipes: a child that outlives a killed process could keep a pipe open
            done = subprocess.run([sys.executable, *command], stdout=stdout, stderr=stderr, timeout=timeout)
        except subprocess.TimeoutExpired:
            return None
        stdout.seek(0)
        stderr.seek(0)
        lines, errors = stdout.read().splitlines(), stderr.read()
    rows = [line for line in lines if line.startswith("{")]
    failure = " ".join(f"exit code {done.returncode} {errors[-200:]}".split())
    row: Row = json.loads(rows[-1]) if rows else {"refused": failure}
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
    """Run `script --one NAME` for each name, `rounds` times in turns, and append the rows to `results`.

    Args:
        script: file of the benchmark.
        more: further arguments of the script.
        names: contenders.
        results: file of rows.
        rounds: number of rounds, in addition to those in `results`.
        until: deadline by `time.monotonic`; runs that would exceed it are left out. None for no limit.
        **marks: columns added to each row; only rows with the same values count as measured before.

    Returns:
        All rows with these marks.
    """
    done = [row for row in read_rows(results) if all(row.get(key) == value for key, value in marks.items())]
    first = 1 + max((row["round"] for row in done), default=0)
    for number in range(first, first + rounds):
        for name in names:
            shortest = min((row.get("took", 0.0) for row in done if row["peer"] == name), default=0.0)
            row = None
            if until is None or time.monotonic() + shortest < until:
                row = run_in_process([script, "--one", name, *more], until)
            if row is None:
                print(f"round {number}: {name}: no time left", flush=True)
                continue
            row = {"peer": name, **row, "round": number, **marks}
            done.append(row)
            append_row(results, row)
            text = row.get("refused") or f"{row['tokens_per_second']:,.0f} tokens/s, peak {row['peak_gib']:.1f} GiB"
            print(f"round {number}: {name}: {text}; took {row['took']:.0f} s", flush=True)
    return done


def failures(rows: Iterable[Row]) -> dict[str, str]:
    """Return the failure of each contender that has no successful run."""
    rows = list(rows)
    ran = {row["peer"] for row in rows if "refused" not in row}
    return {row["peer"]: row["refused"] for row in rows if row["peer"] not in ran}


def environment_line(rows: list[Row]) -> str:
    """Return the line above a table: GPU, versions and date."""
    if not rows:
        return "Nothing ran"
    newest, names = rows[-1], {"torch": "torch", "cudnn": "cuDNN", "triton": "triton", "nccl": "NCCL"}
    versions = {name: newest[key] for key, name in names.items() if key in newest}
    versions |= {package: row[package] for row in rows for package in PACKAGES if package in row}
    text = ", ".join(f"{name.replace('_kernel', '')} {version}" for name, version in versions.items())
    return f"Device: {newest['device']}; {text}; {newest['date']}"


def deadline(seconds: float | None) -> float | None:
    """Return the time, by `time.monotonic`, that is `seconds` from now; None for no limit."""
    return None if seconds is None else time.monotonic() + seconds


def run_benchmark(
    script: str,
    description: str | None,
    names: Iterable[str],
    measure: Callable[[str, Any], Row],
    tables: Callable[[Any], Iterable[str]],
    *,
    option: str | None = None,
    cases: Sequence[Any] = ("",),
    chosen: Callable[[Any], Iterable[str]] | None = None,
) -> None:
    """Command line of a step benchmark: run the rounds of each case, print the tables.

    Args:
        script: file of the benchmark, started again with `--one NAME` for each contender.
        description: text of `--help`.
        names: contenders.
        measure: runs a contender for a case in this process.
        tables: names of the tables of a case in `report.py`.
        option: option that selects cases, such as `--batch`; also a column of the rows. None for one case.
        cases: cases by default; if they are strings, no others are allowed.
        chosen: contenders of a case, if not all have all.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(names)
    if option:
        allowed = cases if isinstance(cases[0], str) else None
        parser.add_argument(option, dest="cases", nargs="+", type=type(cases[0]), default=list(cases), choices=allowed)
    parser.add_argument("--rounds", type=int, default=3, help="rounds to add to the results; 0 prints the tables only")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--seconds", type=float, help="time limit; runs that would exceed it are left out")
    parser.add_argument("--results", type=Path, default=Path(f"{Path(script).stem}.jsonl"), help="file to append to")
    parser.add_argument("--one", choices=names, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    selected = arguments.cases if option else cases
    if arguments.one:
        print_row(arguments.one, lambda: measure(arguments.one, selected[0]))
        return
    until = deadline(arguments.seconds)
    for case in selected:
        more = [option, str(case)] if option else []
        marks = {option.strip("-").replace("-", "_"): case} if option else {}
        runs = [name for name in (chosen(case) if chosen else names) if name in arguments.only]
        run_rounds(script, more, runs, arguments.results, arguments.rounds, until, **marks)
        print_tables(tables(case), arguments.results)


def print_tables(names: Iterable[str], results: Path) -> None:
    """Print tables of `report.py`, from a file of results."""
    from report import text_of  # which imports the benchmarks

    for name in names:
        print(text_of(name, results))
