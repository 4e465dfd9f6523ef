"""Attention benchmark on one GPU: our kernels beside PyTorch's, FlexAttention and TransformerEngine.

    python scripts/bench/attention.py [--sections plain distance memory lse_first host softmax] [--rounds 5]
        [--minutes 9] [--results attention.jsonl] [--report attention.md] [--only D128 S4096 ...] [--skip FlexAttention]

A shape is measured in one go: every contender once per round, in turns (there and back), with the L2 cache flushed
before each call, random data, CUDA events; a round's figure is the median of its calls, a ratio is the median over the
rounds of the ratios within a round. Each shape appends one JSON line, and a shape that the file has is skipped: a table
may be made in several sittings. FLOPs: 4 B H S^2 D forward, half of that when causal, 2.5 times it backward.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attention_peers import IGNORES_BIAS, PEERS, WRITES_BIAS_OUT, Shape
from torch import Tensor

from stoker.kernels import flash_attention, lse_first_attention, scaled_masked_softmax

ROUND_MS = 50.0
LARGEST_WRITTEN_OUT = 16384
Call = Callable[[], list[torch.cuda.Event]]
Row = dict[str, Any]


# ---------------------------------------------------------------- measuring


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def in_turns(calls: dict[str, Call], rounds: int) -> dict[str, list[list[float]]]:
    """Milliseconds between the events of each call: contender -> per interval -> per round."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    counts = {}
    for name, call in calls.items():
        call()
        events = call()
        torch.cuda.synchronize()
        counts[name] = max(3, min(100, int(ROUND_MS / max(events[0].elapsed_time(events[-1]), 1e-3))))
    results: dict[str, list[list[float]]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls) if number % 2 == 0 else list(calls)[::-1]:
            samples = []
            for _ in range(counts[name]):
                flush.zero_()
                samples.append(calls[name]())
            torch.cuda.synchronize()
            intervals = [[a.elapsed_time(b) for a, b in pairwise(e)] for e in samples]
            results[name].append([statistics.median(column) for column in zip(*intervals, strict=True)])
    return {name: [list(column) for column in zip(*per_round, strict=True)] for name, per_round in results.items()}


def _peak_mib(call: Call) -> float:
    """Device memory that one call takes beyond what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _try(call: Call) -> str | None:
    """Why a call does not run, None if it does."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:  # whatever a peer raises is its reason, and goes into the table
        first = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {first[:140]}"
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return None


def _sm_clock() -> int | None:
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0])
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None


def attention_row(shape: Shape, names: list[str], rounds: int) -> Row:
    """Forward (no gradients wanted), and forward and backward of a training step, of every contender."""
    q, k, v = shape.tensors()
    table = shape.table()
    leaves = [q, k, v] if table is None else [q, k, v, table]
    upstream = torch.randn(q.shape, device="cuda", dtype=q.dtype)
    forward: dict[str, Call] = {}
    training: dict[str, Call] = {}
    refused: dict[str, str] = {}
    peak: dict[str, float] = {}
    expected = None
    for name in names:
        if table is not None and name in WRITES_BIAS_OUT and shape.tokens > LARGEST_WRITTEN_OUT:
            gib = shape.heads * shape.tokens**2 * 2 / 2**30
            refused[name] = f"not tried: the bias written out is {gib:.0f} GiB"
            continue
        given = None if name in IGNORES_BIAS else table
        wanted = leaves if given is not None else leaves[:3]
        try:
            attend = PEERS[name](shape)
        except Exception as error:  # a peer that is not installed, or does not know the shape
            refused[name] = f"{type(error).__name__}: {error}"[:140]
            continue

        def run_forward(attend: Any = attend, given: Tensor | None = given) -> list[torch.cuda.Event]:
            with torch.no_grad():
                start = _event()
                attend(q, k, v, given)
                return [start, _event()]

        def run_training(
            attend: Any = attend, given: Tensor | None = given, wanted: list[Tensor] = wanted
        ) -> list[torch.cuda.Event]:
            start = _event()
            out = attend(q, k, v, given)
            middle = _event()
            torch.autograd.grad(out, wanted, upstream)
            return [start, middle, _event()]

        reason = _try(run_forward)
        if reason is None and name != "lse_first stage 1":
            with torch.no_grad():
                out = attend(q, k, v, given)
            if given is table:  # all that compute the same must agree
                expected = out if expected is None else expected
                difference = (out - expected).float().abs().max().item()
                if not difference < 0.1:
                    reason = f"differs from {names[0]} by {difference:.3g}"
            reason = reason or _try(run_training)
            if reason is None:
                training[name], peak[name] = run_training, _peak_mib(run_training)
        if reason is None:
            forward[name] = run_forward
        else:
            refused[name] = reason
    milliseconds = {name: {"forward": t[0]} for name, t in in_turns(forward, rounds).items()}
    for name, intervals in in_turns(training, rounds).items():
        both = [forward_ms + backward_ms for forward_ms, backward_ms in zip(*intervals, strict=True)]
        milliseconds[name].update(backward=intervals[1], both=both)
    row: Row = {"ms": milliseconds, "refused": refused, "peak_mib": peak, "forward_flops": shape.forward_flops}
    if table is not None and "ours" in training:
        one, two = (torch.autograd.grad(flash_of(shape, q, k, v, table), leaves, upstream) for _ in range(2))
        row["bitwise"] = all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    return row


def flash_of(shape: Shape, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Any:
    return flash_attention(q, k, v, causal=shape.causal, distance_bias=shape.vector(table))


# ---------------------------------------------------------------- sections


def plain_shapes() -> list[Shape]:
    return [
        Shape(head_dim=d, heads=2048 // d, groups=2048 // d // ratio, tokens=s, batch=max(1, 16384 // s), causal=causal)
        for s in (4096, 16384, 1024, 3072)
        for d in (128, 64, 256)
        for ratio in (1, 4)
        for causal in (True, False)
    ]


def distance_shapes() -> list[Shape]:
    return [
        Shape(head_dim=64, heads=12, groups=12, tokens=s, batch=max(1, 16384 // s), causal=causal, bias=bias)
        for s in (2048, 8192, 512, 4096)
        for bias, causal in (("t5", False), ("alibi", True))
    ]


def memory_shapes() -> list[Shape]:
    """One sequence, longer and longer: the peak must grow as the length does."""
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
    """1024 queries over keys and values in pinned host memory, in chunks of 16384; and the same from the device."""
    heads, head_dim, queries, chunk = 8, 128, 1024, 16384
    q = torch.randn(1, queries, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, keys, heads, head_dim, dtype=torch.bfloat16).pin_memory() for _ in range(2))

    def from_host() -> list[torch.cuda.Event]:
        start = _event()
        with torch.no_grad():
            lse_first_attention(q, k, v, chunk_size=chunk)
        return [start, _event()]

    from_host()
    peak = {"from the host": _peak_mib(from_host)}
    on_device = [x.cuda() for x in (k, v)]

    def from_device() -> list[torch.cuda.Event]:
        start = _event()
        with torch.no_grad():
            lse_first_attention(q, *on_device)
        return [start, _event()]

    def copied() -> list[torch.cuda.Event]:
        start = _event()
        for there, here in zip((k, v), on_device, strict=True):
            here.copy_(there, non_blocking=True)
        return [start, _event()]

    calls = {"from the host": from_host, "on the device": from_device, "the copy alone": copied}
    times = {name: {"forward": t[0]} for name, t in in_turns(calls, rounds).items()}
    return {"ms": times, "peak_mib": peak, "refused": {}, "forward_flops": 6 * heads * head_dim * queries * keys}


def softmax_row(columns: int, kind: str, rounds: int) -> Row:
    """(rows, columns) in bf16, 256 MiB of them; the measure is a copy of the same bytes."""
    rows = max(1, (128 << 20) // columns)
    queries = min(rows, columns)
    x = torch.randn(rows // queries, queries, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    mask = torch.rand(1, queries, columns, device="cuda") < 0.1 if kind == "mask" else None
    causal = kind == "causal"
    upstream = torch.randn_like(x)
    above = torch.ones(queries, columns, dtype=torch.bool, device="cuda").triu(1 + columns - queries)
    hidden = mask if mask is not None else (above if causal else None)

    def eager(x: Tensor) -> Tensor:
        scores = x.float() * 0.5
        return (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))).softmax(-1).to(x.dtype)

    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": lambda x: scaled_masked_softmax(x, mask, 0.5, causal),
        "torch": eager,
        "torch.compile": torch.compile(eager, dynamic=False),
    }
    forward: dict[str, Call] = {}
    training: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for name, function in contenders.items():

        def run_forward(function: Any = function) -> list[torch.cuda.Event]:
            with torch.no_grad():
                start = _event()
                function(x)
                return [start, _event()]

        def run_training(function: Any = function) -> list[torch.cuda.Event]:
            start = _event()
            out = function(x)
            middle = _event()
            torch.autograd.grad(out, x, upstream)
            return [start, middle, _event()]

        if reason := _try(run_training):
            refused[name] = reason
        else:
            forward[name], training[name] = run_forward, run_training

    def copied() -> list[torch.cuda.Event]:
        start = _event()
        x.detach().clone()
        return [start, _event()]

    forward["copy"] = copied
    milliseconds = {name: {"forward": t[0]} for name, t in in_turns(forward, rounds).items()}
    for name, intervals in in_turns(training, rounds).items():
        milliseconds[name]["backward"] = intervals[1]
    some = x[:1, :64].detach()
    seen = None if hidden is None else hidden[..., :64, :]
    truth = some.double() * 0.5
    truth = (truth if seen is None else truth.masked_fill(seen, float("-inf"))).softmax(-1)
    error = (scaled_masked_softmax(x, mask, 0.5, causal)[:1, :64].double() - truth).abs()
    relative = (error / truth.clamp_min(1e-30)).masked_fill(truth == 0, 0.0).max().item()
    return {"ms": milliseconds, "refused": refused, "peak_mib": {}, "largest_relative_error": relative}


def jobs(section: str, skip: set[str]) -> Iterator[tuple[str, Callable[[int], Row]]]:
    """Name and measurement of every shape of a section."""
    peers = {
        "plain": ["ours", "SDPA FA2", "SDPA cuDNN", "SDPA efficient", "FlexAttention", "TransformerEngine"],
        "distance": [
            "ours", "ours, no bias", "SDPA cuDNN", "SDPA efficient", "FlexAttention", "TransformerEngine",
        ],
        "memory": ["ours", "SDPA efficient"],
        "lse_first": ["ours", "lse_first", "lse_first stage 1", "SDPA cuDNN"],
    }  # fmt: skip
    shapes = {
        "plain": plain_shapes,
        "distance": distance_shapes,
        "memory": memory_shapes,
        "lse_first": lse_first_shapes,
    }
    if section in shapes:
        names = [name for name in peers[section] if name not in skip]
        for shape in shapes[section]():
            yield shape.name, lambda rounds, shape=shape: attention_row(shape, names, rounds)
    elif section == "host":
        for keys in (32768, 65536, 131072, 262144):
            yield f"{keys} keys", lambda rounds, keys=keys: host_row(keys, rounds)
    else:
        for columns in (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072):
            for kind in ("none", "causal", "mask"):
                yield (
                    f"{columns} columns, {kind}",
                    lambda rounds, columns=columns, kind=kind: softmax_row(columns, kind, rounds),
                )


SECTIONS = {
    "plain": "Attention without bias",
    "distance": "`distance_bias` with gradient",
    "memory": "`distance_bias` with gradient, one sequence: peak memory",
    "lse_first": "LSE-first attention",
    "host": "LSE-first attention over keys in host memory",
    "softmax": "Scaled masked softmax",
}


# ---------------------------------------------------------------- tables


def ratio(row: Row, ours: str, peer: str, what: str) -> float | None:
    """How many times as fast as `peer` we are: the median over the rounds."""
    mine, theirs = (row["ms"].get(name, {}).get(what) for name in (ours, peer))
    if not mine or not theirs:
        return None
    return statistics.median(b / a for a, b in zip(mine, theirs, strict=True))


def _cell(row: Row, name: str, what: str, factor: float) -> str:
    """TFLOP/s of a contender, or a dash."""
    times = row["ms"].get(name, {}).get(what)
    return f"{factor * row['forward_flops'] / statistics.median(times) / 1e9:.0f}" if times else "-"


def attention_table(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(n for row in rows for n in [*row["ms"], *row["refused"]]))
    peers = [name for name in names if name != "ours"]
    lines = ["TFLOP/s forward / backward / both; in brackets our speed over that peer's, peak MiB of a step last.", ""]
    lines += ["| shape | ours | " + " | ".join(peers) + " |", "|---" * (len(peers) + 2) + "|"]
    kinds = (("forward", 1.0), ("backward", 2.5), ("both", 3.5))
    for row in rows:
        cells = []
        for name in ["ours", *peers]:
            if name in row["refused"]:
                cells.append(row["refused"][name])
                continue
            text = "/".join(_cell(row, name, what, factor) for what, factor in kinds)
            if name != "ours":
                found = [ratio(row, "ours", name, what) for what, _ in kinds]
                text += " (" + "/".join("-" if r is None else f"{r:.2f}" for r in found) + ")"
            cells.append(text + (f" {row['peak_mib'][name]:.0f}" if name in row["peak_mib"] else ""))
        note = "" if row.get("bitwise", True) else ", NOT bitwise repeatable"
        lines.append(f"| {row['shape']}{note} | " + " | ".join(cells) + " |")
    return lines


def lse_table(rows: list[Row]) -> list[str]:
    lines = ["", "| shape | stage 1 / our forward, time | LSE-first / our forward, time |", "|---|---|---|"]
    for row in rows:
        parts = [ratio(row, name, "ours", "forward") for name in ("lse_first stage 1", "lse_first")]
        lines.append(f"| {row['shape']} | " + " | ".join("-" if p is None else f"{1 / p:.2f}" for p in parts) + " |")
    return lines


def host_table(rows: list[Row]) -> list[str]:
    lines = [
        "| keys | ms from the host | ms on the device | ms of the copy alone | peak MiB from the host |",
        "|---" * 5,
    ]
    lines[1] += "|"
    for row in rows:
        times = [
            statistics.median(row["ms"][n]["forward"]) for n in ("from the host", "on the device", "the copy alone")
        ]
        cells = [f"{t:.1f}" for t in times] + [f"{row['peak_mib']['from the host']:.0f}"]
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + " |")
    return lines


def softmax_table(rows: list[Row]) -> list[str]:
    """Bandwidth over that of a copy: the forward moves what a copy moves, the backward half as much again."""
    names = ("ours", "torch", "torch.compile")
    lines = [
        "Bandwidth over that of a copy, forward / backward.",
        "",
        "| rows of | " + " | ".join(names) + " | error |",
    ]
    lines.append("|---" * 5 + "|")
    for row in rows:
        cells = []
        for name in names:
            times, copied = row["ms"].get(name), statistics.median(row["ms"]["copy"]["forward"])
            if times is None:
                cells.append(row["refused"].get(name, "-"))
            else:
                forward, backward = (statistics.median(times[what]) for what in ("forward", "backward"))
                cells.append(f"{copied / forward:.2f} / {1.5 * copied / backward:.2f}")
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + f" | {row['largest_relative_error']:.1e} |")
    return lines


def report(rows: list[Row]) -> str:
    """Every section that has rows, as markdown."""
    lines = []
    for section, title in SECTIONS.items():
        some = [row for row in rows if row["section"] == section]
        if not some:
            continue
        last = some[-1]
        lines += [
            f"### {title}", "", f"{last['device']}; torch {last['torch']}, cuDNN {last['cudnn']}, triton "
            f"{last['triton']}; {last['date']}; {last['rounds']} rounds.", "",
        ]  # fmt: skip
        tables = {"host": host_table, "softmax": softmax_table}
        lines += tables.get(section, attention_table)(some)
        lines += lse_table(some) if section == "lse_first" else []
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=9.0, help="start no shape after this long")
    parser.add_argument("--results", type=Path, default=Path("attention.jsonl"))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="shapes whose name holds all of these words")
    parser.add_argument("--skip", nargs="+", default=[], choices=PEERS, help="contenders to leave out")
    parser.add_argument("--list", action="store_true", help="print the shapes and stop")
    arguments = parser.parse_args()
    wanted = [
        (section, name, measure)
        for section in arguments.sections
        for name, measure in jobs(section, set(arguments.skip))
        if all(word in name.split() for word in arguments.only)
    ]
    if arguments.list:
        print("\n".join(f"{section}: {name}" for section, name, _ in wanted))
        return
    import triton

    F.softmax(torch.zeros(1, device="cuda"), 0)  # the context, before the clock is read
    versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "triton": triton.__version__}
    device = {"device": torch.cuda.get_device_name(), **versions, "rounds": arguments.rounds}
    text = arguments.results.read_text() if arguments.results.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    done = {(row["section"], row["shape"], row["device"]) for row in rows}
    deadline, left = time.monotonic() + 60 * arguments.minutes, 0
    for section, name, measure in wanted:
        if (section, name, device["device"]) in done:
            continue
        if time.monotonic() > deadline:
            left += 1
            continue
        torch.manual_seed(0)
        row = {"section": section, "shape": name, **device, "date": datetime.date.today().isoformat()}
        row |= measure(arguments.rounds) | {"sm_mhz": _sm_clock()}
        rows.append(row)
        with arguments.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        brief = {peer: round(statistics.median(t.get("both", t["forward"])), 3) for peer, t in row["ms"].items()}
        print(f"{section}: {name}: ms {brief} {row['refused'] or ''}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    print(report(rows))
    if arguments.report:
        arguments.report.write_text(report(rows))
    if left:
        print(f"{left} shapes are left; run the same command again.")


if __name__ == "__main__":
    main()
