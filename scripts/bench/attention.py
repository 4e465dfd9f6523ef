"""Attention benchmark on one GPU: our kernels, PyTorch's, FlexAttention and TransformerEngine.

    python scripts/bench/attention.py [--sections plain distance lse_first softmax host memory short lengths]
        [--rounds 5] [--compile-ahead 12] [--minutes 9] [--results attention.jsonl]
        [--only D128 S4096 ...] [--skip FlexAttention]

All contenders of a shape alternate within each round (in reversed order every second round), with random data. Before
each call the L2 cache is flushed and the device sleeps until the host has queued the call, so events measure device
time, as in a compiled model where the host runs ahead. A round's figure is the median of its calls, a ratio the median
over rounds of the ratios within a round. Forward and backward are those of one training step. Each shape appends one
JSON line, and shapes in the file are skipped, so a table can be measured in several sessions. A contender that breaks
the device is recorded in a file beside the results and left out, and the script restarts itself. FLOPs: 4 B H S^2 D
forward, half of that if causal, 2.5 times as many backward.

`--compile-ahead N` first compiles kernels (ours, FlexAttention, torch.compile) in N processes at once, which fills the
caches of Triton and Inductor: compiling one after the other takes longer than measuring.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attention_peers import FORWARD_ONLY, IGNORES_BIAS, NEEDS_DENSE_BIAS, PEERS, Shape
from rounds import Row, append_row, machine, peak_mib, print_tables, read_rows
from torch import Tensor

from stoker.kernels import lse_first_attention, scaled_masked_softmax
from stoker.kernels.timing import Event, TimedCall, in_turns, record_event

ROUND_MS = 40.0
SECTIONS = ("plain", "distance", "lse_first", "softmax", "host", "memory", "short", "lengths")
MAX_DENSE_BIAS_TOKENS = 16384
SOFTMAX_ELEMENTS = 128 << 20
COMPILED = ("ours", "ours, atomic", "ours, no bias", "lse_first", "lse_first stage 1", "FlexAttention")


# ---------------------------------------------------------------- measuring


class BrokenDeviceError(Exception):
    """A contender left the device unusable for this process; args: its name, its error."""


def _in_one_line(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()[:140]}"


def _try(name: str, call: Callable[[], object]) -> str | None:
    """Return the reason why a call fails; None if it succeeds.

    Raises:
        BrokenDeviceError: the device is unusable after the failure.
    """
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:  # the table shows whatever a peer raises
        reason = _in_one_line(error)
        gc.collect()
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").item()
        except Exception:
            raise BrokenDeviceError(name, reason) from error
        return reason
    finally:
        gc.collect()
    return None


def _sm_clock() -> int | None:
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0])
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None


def attention_row(shape: Shape, names: list[str], broken: dict[str, str], rounds: int) -> Row:
    """Measure forward and backward of every contender; with 0 rounds, run the compiled ones once."""
    q, k, v = shape.tensors()
    table = shape.table()
    leaves = [q, k, v] if table is None else [q, k, v, table]
    upstream = torch.randn(q.shape, device="cuda", dtype=q.dtype)
    calls: dict[str, TimedCall] = {}
    refused: dict[str, str] = {}
    peak: dict[str, float] = {}
    expected = None
    for name in names if rounds else [name for name in names if name in COMPILED]:
        if name in broken:
            refused[name] = broken[name]
            continue
        if table is not None and name in NEEDS_DENSE_BIAS and shape.tokens > MAX_DENSE_BIAS_TOKENS:
            gib = shape.heads * shape.tokens**2 * 2 / 2**30
            refused[name] = f"not tried: the dense bias takes {gib:.0f} GiB"
            continue
        bias = None if name in IGNORES_BIAS else table
        inputs = leaves if bias is not None else leaves[:3]
        try:
            attend = PEERS[name](shape)
        except Exception as error:  # a peer that is not installed, or does not support the shape
            refused[name] = _in_one_line(error)
            continue

        def run(
            attend: Any = attend, bias: Tensor | None = bias, inputs: list[Tensor] = inputs, name: str = name
        ) -> list[Event]:
            start = record_event()
            out = attend(q, k, v, bias)
            middle = record_event()
            if name in FORWARD_ONLY:
                return [start, middle]
            torch.autograd.grad(out, inputs, upstream)
            return [start, middle, record_event()]

        def measure_peak(run: TimedCall = run, name: str = name) -> None:
            peak[name] = peak_mib(run)

        reason = _try(name, run)
        if not rounds:
            refused |= {name: reason} if reason else {}
            continue
        reason = reason or _try(name, measure_peak)
        if reason is None and name not in FORWARD_ONLY and bias is table:  # contenders with the same inputs must agree
            out = attend(q, k, v, bias).detach()
            expected = out if expected is None else expected
            difference = (out - expected).float().abs().max().item()
            if not difference < 0.1:
                reason = f"differs from {names[0]} by {difference:.3g}"
            del out
        if reason is None:
            calls[name] = run
        else:
            refused[name] = reason
            peak.pop(name, None)
    if not rounds:
        return {"refused": refused}
    row: Row = {"ms": {}, "refused": refused, "peak_mib": peak, "forward_flops": shape.forward_flops}
    for name, intervals in in_turns(calls, rounds, ROUND_MS).items():
        row["ms"][name] = {"forward": intervals[0]}
        if name not in FORWARD_ONLY:
            both = [forward_ms + backward_ms for forward_ms, backward_ms in zip(*intervals, strict=True)]
            row["ms"][name] |= {"backward": intervals[1], "both": both}
    if table is not None and "ours" in calls:
        one, two = (torch.autograd.grad(PEERS["ours"](shape)(q, k, v, table), leaves, upstream) for _ in range(2))
        row["bitwise"] = all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    return row


# ---------------------------------------------------------------- sections


def plain_shapes(lengths: tuple[int, ...] = (4096, 16384)) -> list[Shape]:
    return [
        Shape(head_dim=d, heads=2048 // d, groups=2048 // d // ratio, tokens=s, batch=max(1, 16384 // s), causal=causal)
        for ratio in (1, 4)
        for s in lengths
        for d in (128, 64, 256)
        for causal in (True, False)
    ]


def distance_shapes() -> list[Shape]:
    return [
        Shape(head_dim=64, heads=12, groups=12, tokens=s, batch=max(1, 16384 // s), causal=causal, bias=bias)
        for s in (2048, 8192, 512, 4096)
        for bias, causal in (("t5", False), ("alibi", True))
    ]


def memory_shapes() -> list[Shape]:
    """One sequence of increasing length, to check that peak memory grows linearly."""
    return [
        Shape(head_dim=64, heads=12, groups=12, tokens=s, batch=1, causal=False, bias="t5")
        for s in (2048, 4096, 8192, 16384, 32768, 65536)
    ]


def lse_first_shapes() -> list[Shape]:
    sizes = [(4096, 128), (4096, 64), (16384, 128), (16384, 64), (512, 64), (1024, 64), (2048, 64), (8192, 64)]
    return [
        Shape(head_dim=d, heads=2048 // d, groups=2048 // d, tokens=s, batch=max(1, 16384 // s), causal=causal)
        for s, d in [*sizes, (8192, 128), (8192, 256)]
        for causal in (False, True)
    ]


def host_row(keys: int, rounds: int) -> Row:
    """Measure 1024 queries over keys and values in pinned host memory, in chunks of 16384, and in device memory."""
    if not rounds:
        return {}
    heads, head_dim, queries, chunk = 8, 128, 1024, 16384
    q = torch.randn(1, queries, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, keys, heads, head_dim, dtype=torch.bfloat16).pin_memory() for _ in range(2))

    def from_host() -> list[Event]:
        start = record_event()
        with torch.no_grad():
            lse_first_attention(q, k, v, chunk_size=chunk)
        return [start, record_event()]

    from_host()
    peak = {"from the host": peak_mib(from_host)}
    on_device = [x.cuda() for x in (k, v)]

    def from_device() -> list[Event]:
        start = record_event()
        with torch.no_grad():
            lse_first_attention(q, *on_device)
        return [start, record_event()]

    def copy() -> list[Event]:
        start = record_event()
        for host, device in zip((k, v), on_device, strict=True):
            device.copy_(host, non_blocking=True)
        return [start, record_event()]

    calls = {"from the host": from_host, "on the device": from_device, "the copy alone": copy}
    from_device()
    times = {name: {"forward": t[0]} for name, t in in_turns(calls, rounds, ROUND_MS, head_start=False).items()}
    return {"ms": times, "peak_mib": peak, "refused": {}, "forward_flops": 6 * heads * head_dim * queries * keys}


def softmax_row(columns: int, kind: str, broken: dict[str, str], rounds: int) -> Row:
    """Measure softmax of (rows, columns) in bf16, 256 MiB, relative to a copy of the same bytes."""
    torch.compiler.reset()  # otherwise torch.compile hits its recompile limit after a few shapes
    rows = max(1, SOFTMAX_ELEMENTS // columns)
    queries = min(rows, columns)
    x = torch.randn(rows // queries, queries, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    mask = torch.rand(1, queries, columns, device="cuda") < 0.1 if kind == "mask" else None
    causal = kind == "causal"
    upstream = torch.randn_like(x)
    causal_mask = torch.ones(queries, columns, dtype=torch.bool, device="cuda").triu(1 + columns - queries)
    masked = mask if mask is not None else (causal_mask if causal else None)

    def eager(x: Tensor) -> Tensor:
        scores = x.float() * 0.5
        return (scores if masked is None else scores.masked_fill(masked, float("-inf"))).softmax(-1).to(x.dtype)

    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": lambda x: scaled_masked_softmax(x, mask, 0.5, causal),
        "torch": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
    }
    calls: dict[str, TimedCall] = {}
    refused: dict[str, str] = {}
    for name, function in contenders.items():
        if name in broken or (name == "torch" and not rounds):
            refused[name] = broken.get(name, "nothing to compile")
            continue

        def run(function: Any = function) -> list[Event]:
            start = record_event()
            out = function(x)
            middle = record_event()
            torch.autograd.grad(out, x, upstream)
            return [start, middle, record_event()]

        if reason := _try(name, run):
            refused[name] = reason
        else:
            calls[name] = run

    def copy() -> list[Event]:
        start = record_event()
        x.detach().clone()
        return [start, record_event()]

    if not rounds:
        return {"refused": refused}
    copy()
    times = in_turns({**calls, "copy": copy}, rounds, ROUND_MS / 2)
    milliseconds = {name: dict(zip(("forward", "backward"), t, strict=False)) for name, t in times.items()}
    expected = x[:1, :64].detach().double() * 0.5
    if masked is not None:
        expected = expected.masked_fill(masked[..., :64, :], float("-inf"))
    expected = expected.softmax(-1)
    error = (scaled_masked_softmax(x, mask, 0.5, causal)[:1, :64].double() - expected).abs()
    relative = (error / expected.clamp_min(1e-30)).masked_fill(expected == 0, 0.0).max().item()
    # bytes that must be read and written, relative to a copy; elements above a causal diagonal need not be read
    read = 1 - (queries - 1) / (2 * columns) if causal else 1.0
    mask_bytes = queries / rows / 4 if mask is not None else 0.0  # one byte per two bytes read and two written
    moved = {"forward": (read + 1) / 2 + mask_bytes, "backward": read + 0.5}
    figures = {"peak_mib": {}, "largest_relative_error": relative, "moved": moved}
    return {"ms": milliseconds, "refused": refused} | figures


def jobs(section: str, skip: set[str]) -> Iterator[tuple[str, Callable[[dict[str, str], int], Row]]]:
    """Yield (name, measure) of every shape of a section.

    `measure` takes the contenders known to break the device, with their reasons, and the number of rounds.
    """
    plain = ["ours", "ours, atomic", "SDPA cuDNN", "SDPA FA2", "TransformerEngine", "FlexAttention", "SDPA efficient"]
    peers = {
        "plain": plain,
        "short": plain,
        "lengths": ["ours", "ours, atomic", "SDPA cuDNN"],
        "distance": [
            "ours", "ours, no bias", "SDPA cuDNN", "TransformerEngine", "SDPA efficient", "FlexAttention",
        ],
        "memory": ["ours", "SDPA efficient"],
        "lse_first": ["ours", "lse_first", "lse_first stage 1", "SDPA cuDNN"],
    }  # fmt: skip
    shapes = {
        "plain": plain_shapes,
        "short": partial(plain_shapes, (1024, 3072)),
        "lengths": partial(plain_shapes, (256, 512, 2048, 6144, 8192, 12288)),
        "distance": distance_shapes,
        "memory": memory_shapes,
        "lse_first": lse_first_shapes,
    }
    if section in shapes:
        names = [name for name in peers[section] if name not in skip]
        for shape in shapes[section]():
            yield shape.name, lambda broken, rounds, shape=shape: attention_row(shape, names, broken, rounds)
    elif section == "host":
        for keys in (32768, 65536, 131072, 262144):
            yield f"{keys} keys", lambda broken, rounds, keys=keys: host_row(keys, rounds)
    else:
        for columns in (32768, 16384, 8192, 4096, 2048, 1024, 512, 128, 65536, 131072):
            for kind in ("causal", "none", "mask"):
                yield (
                    f"{columns} columns, {kind}",
                    lambda broken, rounds, columns=columns, kind=kind: softmax_row(columns, kind, broken, rounds),
                )


# ---------------------------------------------------------------- the run

Job = tuple[str, str, Callable[[dict[str, str], int], Row]]


def compile_ahead(processes: int) -> None:
    """Run this command in several processes that only compile, to fill the caches."""
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    parts = [
        subprocess.Popen([sys.executable, *sys.argv, "--compile-part", f"{part}/{processes}"], env=environment)
        for part in range(processes)
    ]
    deadline = time.monotonic() + 240
    for part in parts:
        try:
            part.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.kill()


def compile_part(wanted: list[Job], part: str) -> None:
    """Run every n-th shape once without measuring; `part` is "INDEX/COUNT" of this process."""
    number, processes = map(int, part.split("/"))
    for section, name, measure in wanted[number::processes]:
        try:
            for contender, reason in measure({}, 0).get("refused", {}).items():
                print(f"compiling {section}: {name}: {contender}: {reason}", flush=True)
        except Exception as error:  # the measurement will fail in the same way and record it
            print(f"compiling {section}: {name}: {_in_one_line(error)}", flush=True)
            return
        gc.collect()
        torch.cuda.empty_cache()


def _restart(minutes: float) -> None:
    """Replace this process, whose device is unusable, with a new one that has the remaining minutes."""
    arguments = sys.argv[:]
    for option in ("--minutes", "--compile-ahead"):
        if option in arguments:
            index = arguments.index(option)
            del arguments[index : index + 2]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments, "--minutes", f"{minutes:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit for starting shapes")
    parser.add_argument("--results", type=Path, default=Path("attention.jsonl"), help="file to append to")
    parser.add_argument("--only", nargs="+", default=[], help="shapes whose name contains all of these words")
    parser.add_argument("--skip", nargs="+", default=[], choices=PEERS, help="contenders to leave out")
    parser.add_argument("--list", action="store_true", help="only print the shapes")
    parser.add_argument("--compile-ahead", type=int, default=0, metavar="N", help="compile in N processes first")
    parser.add_argument("--compile-part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted: list[Job] = [
        (section, name, measure)
        for section in arguments.sections
        for name, measure in jobs(section, set(arguments.skip))
        if all(word in name.split() for word in arguments.only)
    ]
    if arguments.list:
        print("\n".join(f"{section}: {name}" for section, name, _ in wanted))
        return
    device = torch.cuda.get_device_name()
    measured = {(r["section"], r["shape"]) for r in read_rows(arguments.results) if r["device"] == device}
    wanted = [job for job in wanted if job[:2] not in measured]
    if arguments.compile_part:
        compile_part(wanted, arguments.compile_part)
        return
    begin = time.monotonic()
    if arguments.compile_ahead:
        compile_ahead(arguments.compile_ahead)
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    left = measure_all(wanted, arguments.results, arguments.rounds, begin + 60 * arguments.minutes)
    print_tables([f"attention_{section}" for section in arguments.sections], arguments.results)
    if left:
        print(f"{left} shapes are not measured yet; run the same command again.")


def measure_all(wanted: list[Job], results: Path, rounds: int, deadline: float) -> int:
    """Measure the jobs and append their rows to `results`; return the number of shapes left when time was up."""
    F.softmax(torch.zeros(1, device="cuda"), 0)  # create the CUDA context before timing
    broken_file = results.with_suffix(".broken.jsonl")
    broken: dict[tuple[str, str], dict[str, str]] = {}
    for line in read_rows(broken_file):
        broken.setdefault((line["section"], line["shape"]), {})[line["contender"]] = line["reason"]
    left = 0
    for section, name, measure in wanted:
        known = broken.get((section, name), {})
        if "all" in known:
            continue
        if time.monotonic() > deadline:
            left += 1
            continue
        torch.manual_seed(0)
        begin = time.monotonic()
        row: dict[str, Any] = {"section": section, "shape": name, **machine(), "rounds": rounds}
        try:
            row |= measure(known, rounds) | {"sm_mhz": _sm_clock()}
        except Exception as error:
            contender, reason = error.args if isinstance(error, BrokenDeviceError) else ("all", _in_one_line(error))
            print(f"{section}: {name}: {contender} broke the device: {reason}", flush=True)
            append_row(broken_file, {"section": section, "shape": name, "contender": contender, "reason": reason})
            _restart((deadline - time.monotonic()) / 60)
        append_row(results, row)
        brief = {peer: round(statistics.median(t.get("both", t["forward"])), 3) for peer, t in row["ms"].items()}
        elapsed = time.monotonic() - begin
        print(f"{section}: {name}: ms {brief} {row['refused'] or ''} in {elapsed:.1f} s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return left


if __name__ == "__main__":
    main()
