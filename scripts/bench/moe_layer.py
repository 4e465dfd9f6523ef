"""Experts of one MoE layer on one GPU: ours, by each of its matmuls, beside Liger's fused_moe and a dense MLP.

    python scripts/bench/moe_layer.py [--sections layer matmul] [--rounds 5] [--only E128 balanced ...]
        [--skip "Liger fused_moe"] [--compile-ahead 12] [--seconds 500] [--results moe_layer.jsonl]
        [--report moe_layer.md] [--tile rows=128,256,64,8,4 ...] [--check]

`layer`: forward and backward of the experts from routed tokens (the router is not in it), random bf16 data; the dense
MLP computes the same FLOPs on as many rows with one matrix: what the experts could reach at best. `matmul`: the grouped
matmuls one by one, forward, gradient of the rows, gradient of the matrices, beside torch's and a dense one. Routing is
`balanced`, every token choosing at random, `skewed`, half of all tokens on one expert besides their other choices, or
`crowded`, all of them.

Measured as in attention.py: every contender once per round, in turns, L2 flushed, the device's time; a ratio is the
median over the rounds of the ratios within a round. Each shape appends one JSON line, and one that the file has is
skipped. `--tile KIND=rows,columns,depth,warps,stages[,together[,resident]]` replaces the tile of a kernel, to find a
better table; use a results file of its own. `--check` runs every contender once on small shapes, on a GPU or without,
compares the results and measures nothing.

Liger's kernels try 240 tiles for each pair of widths. `--compile-ahead N` has N processes compile them at once and
leave them in Triton's cache; one after the other takes minutes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from attention import in_turns
from attention_report import Row, ratio
from torch import Tensor

from stoker.kernels.gated_activation import gated_activation
from stoker.kernels.moe import tile_configs
from stoker.kernels.moe.assignments import sorted_assignments
from stoker.kernels.moe.expert_mlps import Implementation, expert_mlp
from stoker.kernels.moe.grouped_matmul import row_tiles, torch_grouped_mm, triton_outer, triton_rows, why_not
from stoker.kernels.moe.tile_map import Tiles

OURS = "ours"
DENSE = "dense MLP"
SECTIONS = {"layer": "The experts of a layer", "matmul": "Grouped matmuls"}
LOADS = ("balanced", "skewed", "crowded")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Function = Callable[..., Tensor]
Call = Callable[[], list[torch.cuda.Event]]


class Shape(NamedTuple):
    """A layer: experts, experts of a token, widths, tokens, and how the tokens spread."""

    experts: int
    topk: int
    hidden: int
    ffn: int
    tokens: int
    load: str

    def __str__(self) -> str:
        return f"E{self.experts} k{self.topk} h{self.hidden} f{self.ffn} T{self.tokens} {self.load}"

    @property
    def rows(self) -> int:
        return self.tokens * self.topk

    @property
    def forward_flops(self) -> int:
        return 6 * self.rows * self.hidden * self.ffn


LAYERS = [
    Shape(experts, topk, hidden, ffn, tokens, load)
    for experts, topk, hidden, ffn, tokens in ((128, 8, 2048, 768, 8192), (8, 2, 1024, 3584, 16384))
    for load in LOADS
]
SMALL = [Shape(8, 2, 64, 32, 40, load) for load in LOADS]


class Tensors(NamedTuple):
    """Routed tokens and weights, and the gradient of the output."""

    hidden: Tensor
    gates: Tensor
    up: Tensor
    down: Tensor
    experts: Tensor
    upstream: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.hidden, self.gates, self.up, self.down

    def of_one_expert(self) -> Tensors:
        """The same with the weights of the first expert alone."""
        up, down = (weight[:1].detach().clone().requires_grad_() for weight in (self.up, self.down))
        return self._replace(up=up, down=down)


def draw(shape: Shape) -> Tensors:
    """Random tokens and weights in bf16, fp32 without a GPU."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def normal(*size: int, width: int = 1) -> Tensor:
        return (torch.randn(*size, device=DEVICE, generator=generator) / math.sqrt(width)).to(dtype)

    scores = torch.rand(shape.tokens, shape.experts, device=DEVICE, generator=generator)
    if shape.load != "balanced":
        # the others choose among the rest, so that the expert has half of the tokens exactly
        scores[:, 0] = 2.0
        if shape.load == "skewed":
            scores[shape.tokens // 2 :, 0] = -1.0
    gates, experts = scores.softmax(1).topk(shape.topk, dim=1)
    return Tensors(
        normal(shape.tokens, shape.hidden).requires_grad_(),
        (gates / gates.sum(1, keepdim=True)).requires_grad_(),
        normal(shape.experts, 2 * shape.ffn, shape.hidden, width=shape.hidden).requires_grad_(),
        normal(shape.experts, shape.hidden, shape.ffn, width=shape.ffn).requires_grad_(),
        experts,
        normal(shape.tokens, shape.hidden),
    )


# ---------------------------------------------------------------- contenders of `layer`


def ours(implementation: Implementation) -> Callable[[Tensors], Function]:
    def build(tensors: Tensors) -> Function:
        def run(hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
            options: dict[str, Any] = {"nonlinearity": "silu", "gated": True, "implementation": implementation}
            return expert_mlp(hidden, tensors.experts, gates, up, down, **options)

        return run

    return build


def liger(tensors: Tensors) -> Function:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction  # pyright: ignore[reportMissingImports]

    experts = tensors.experts.int()
    return lambda hidden, gates, up, down: LigerFusedMoEFunction.apply(hidden, up, down, experts, gates)


def dense(tensors: Tensors) -> Function:
    """One matrix for all rows: the FLOPs of the experts without what makes them experts."""
    topk = tensors.experts.shape[1]

    def run(hidden: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = hidden.expand(topk, *hidden.shape).flatten(0, 1)
        out = F.linear(gated_activation(F.linear(rows, up[0]), "silu"), down[0])
        return out.view(topk, *hidden.shape).sum(0) * gates.sum(1, keepdim=True).to(hidden.dtype)

    return run


LAYER_PEERS: dict[str, Callable[[Tensors], Function]] = {
    OURS: ours("auto"),
    "ours, triton": ours("triton"),
    "ours, sequential": ours("sequential"),
    "Liger fused_moe": liger,
    DENSE: dense,
}


# ---------------------------------------------------------------- contenders of `matmul`


class Product(NamedTuple):
    """One grouped matmul: its contenders, each a call without arguments, and its FLOPs."""

    calls: dict[str, Callable[[], Tensor]]
    flops: int


def products(shape: Shape) -> dict[str, Product]:
    """The grouped matmuls of a layer's step on sorted rows, with those that gather besides."""
    tensors = draw(shape)
    hidden, up, down = (x.detach() for x in (tensors.hidden, tensors.up, tensors.down))
    order, ends, _ = sorted_assignments(tensors.experts, shape.experts)
    tokens = order.long() // shape.topk
    rows = hidden[tokens]
    wide, inner = (torch.randn_like(rows[:, :1].expand(-1, n)) for n in (2 * shape.ffn, shape.ffn))
    gather: dict[str, Any] = {"order": order, "topk": shape.topk}

    def tiles() -> Tiles:
        return row_tiles(ends, shape.rows, hidden.dtype, shape.hidden, shape.ffn)

    def forward(left: Tensor, matrices: Tensor) -> dict[str, Callable[[], Tensor]]:
        return {
            "triton": lambda: triton_rows(left, matrices, ends, tiles())[0],
            "torch": lambda: torch_grouped_mm(left, matrices, offs=ends),
            "dense": lambda: left @ matrices[0],
        }

    def outer(left: Tensor, right: Tensor) -> dict[str, Callable[[], Tensor]]:
        return {
            "triton": lambda: triton_outer(left, right, ends, tiles()),
            "torch": lambda: torch_grouped_mm(left.t(), right, offs=ends),
            "dense": lambda: left.t() @ right,
        }

    first = forward(rows, up.transpose(1, 2))
    first["triton, gather"] = lambda: triton_rows(hidden, up.transpose(1, 2), ends, tiles(), **gather)[0]
    last = outer(wide, rows)
    last["triton, gather"] = lambda: triton_outer(wide, hidden, ends, tiles(), **gather, gather="right")
    flops = 2 * shape.rows * shape.hidden * shape.ffn
    return {
        "up": Product(first, 2 * flops),
        "down": Product(forward(inner, down.transpose(1, 2)), flops),
        "gradient of the rows of up": Product(forward(wide, up), 2 * flops),
        "gradient of the rows of down": Product(forward(rows, down), flops),
        "gradient of up": Product(last, 2 * flops),
        "gradient of down": Product(outer(rows, inner), flops),
    }


# ---------------------------------------------------------------- measuring


def event() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def step_of(function: Function, tensors: Tensors) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward once: the output and the gradients."""

    def step() -> tuple[Tensor, ...]:
        out = function(*tensors.leaves)
        return out.detach(), *torch.autograd.grad(out, tensors.leaves, tensors.upstream)

    return step


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest relative error of the output and the gradients, by norm."""
    pairs = zip(got, expected, strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def usable(name: str, run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a contender gives, or why it does not run."""
    try:
        result = run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # whatever a peer raises is its reason, and goes into the table
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:140] if str(error) else ''}"
    else:
        return result, None
    if DEVICE.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise SystemExit(f"{name} has broken the device ({reason}): go on with --skip '{name}'") from None
        gc.collect()
        torch.cuda.empty_cache()
    return None, reason


def peak_mib(run: Callable[[], Any]) -> float:
    """Device memory that a step takes beyond what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def layer_row(shape: Shape, rounds: int) -> Row:
    """Forward and backward of every contender; 0 rounds: their results are compared only."""
    tensors = draw(shape)
    row: Row = {"ms": {}, "refused": {}, "peak_mib": {}, "forward_flops": shape.forward_flops}
    functions: dict[str, tuple[Function, Tensors]] = {}
    expected = None
    for name, build in LAYER_PEERS.items():
        function, reason = usable(name, lambda build=build: build(tensors))
        seen = tensors.of_one_expert() if name == DENSE else tensors
        if reason is None:
            got, reason = usable(name, step_of(function, seen))
            if reason is None and name != DENSE:
                expected = got if expected is None else expected
                error = difference(got, expected)
                reason = None if error < 0.03 else f"differs by {error:.3g}"
            del got
        if reason is None:
            functions[name] = function, seen
        else:
            row["refused"][name] = reason
    if OURS in functions:
        step = step_of(*functions[OURS])
        row["bitwise"] = all(torch.equal(a, b) for a, b in zip(step(), step(), strict=True))
    if not rounds:
        return row
    calls: dict[str, Call] = {}
    for name, (function, seen) in functions.items():

        def run(function: Function = function, seen: Tensors = seen) -> list[torch.cuda.Event]:
            start = event()
            out = function(*seen.leaves)
            middle = event()
            torch.autograd.grad(out, seen.leaves, seen.upstream)
            return [start, middle, event()]

        peak, reason = usable(name, lambda run=run: peak_mib(run))
        if reason is not None:
            row["refused"][name] = reason
            continue
        calls[name] = run
        row["peak_mib"][name] = peak
    for name, (forward, backward) in in_turns(calls, rounds).items():
        both = [a + b for a, b in zip(forward, backward, strict=True)]
        row["ms"][name] = {"forward": forward, "backward": backward, "both": both}
    return row


def matmul_row(shape: Shape, what: str, rounds: int) -> Row:
    """One grouped matmul by every contender; 0 rounds: their results are compared only."""
    product = products(shape)[what]
    row: Row = {"ms": {}, "refused": {}, "forward_flops": product.flops}
    calls: dict[str, Call] = {}
    expected = None
    for name, function in product.calls.items():
        got, reason = usable(name, function)
        if name == "torch" and DEVICE.type == "cuda":
            reason = why_not("torch", torch.empty(0, device=DEVICE, dtype=torch.bfloat16)) or reason
        if reason is None and name != "dense":
            expected = got if expected is None else expected
            error = difference((got,), (expected,))
            reason = None if error < 0.01 else f"differs by {error:.3g}"
        del got
        if reason is not None:
            row["refused"][name] = reason
            continue

        def run(function: Callable[[], Tensor] = function) -> list[torch.cuda.Event]:
            start = event()
            function()
            return [start, event()]

        calls[name] = run
    if rounds:
        row["ms"] = {name: {"forward": times[0]} for name, times in in_turns(calls, rounds).items()}
    return row


# ---------------------------------------------------------------- report


def _speed(row: Row, name: str, what: str, factor: float) -> str:
    times = row["ms"].get(name, {}).get(what)
    if not times:
        return "-"
    milliseconds = statistics.median(times)
    return f"{milliseconds:.3f} ({factor * row['forward_flops'] / milliseconds / 1e9:.0f})"


def layer_table(rows: list[Row]) -> list[str]:
    lines = ["ms (TFLOP/s); the last two columns: our speed over theirs, forward and backward; peak MiB of a step.", ""]
    lines += ["| layer | contender | forward | backward | both | ratio | peak |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        for name in LAYER_PEERS:
            if name in row["refused"]:
                lines.append(f"| {row['shape']} | {name} | {row['refused'][name]} | | | | |")
                continue
            if name not in row["ms"]:  # skipped
                continue
            kinds = (("forward", 1.0), ("backward", 2.0), ("both", 3.0))
            cells = [_speed(row, name, what, factor) for what, factor in kinds]
            found = None if name == OURS else ratio(row, OURS, name, "both")
            cells.append("" if found is None else f"{found:.2f}")
            cells.append(f"{row['peak_mib'].get(name, math.nan):.0f}")
            note = ", NOT bitwise repeatable" if name == OURS and not row.get("bitwise", True) else ""
            lines.append(f"| {row['shape']} | {name}{note} | " + " | ".join(cells) + " |")
    return [*lines, "", *_skew(rows)]


def _skew(rows: list[Row]) -> list[str]:
    """How much longer a step takes with many tokens on one expert."""
    lines = []
    for row in rows:
        words = row["shape"].split()
        other = next((r for r in rows if r["shape"].split() == [*words[:-1], LOADS[0]]), None)
        if other is None or other is row:
            continue
        for name in row["ms"]:
            if name in other["ms"]:
                mine, balanced = (statistics.median(r["ms"][name]["both"]) for r in (row, other))
                lines.append(f"- {row['shape']}, {name}: {mine / balanced:.3f} times the balanced step")
    return lines


def matmul_table(rows: list[Row]) -> list[str]:
    names = list(dict.fromkeys(n for row in rows for n in [*row["ms"], *row["refused"]]))
    lines = ["ms (TFLOP/s).", "", "| matmul | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        cells = [row["refused"].get(name) or _speed(row, name, "forward", 1.0) for name in names]
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + " |")
    return lines


def report(rows: list[Row]) -> str:
    lines = []
    if rows:
        first = rows[0]
        lines += [f"Device: {first['device']}; torch {first['torch']}, triton {first['triton']}; {first['date']}."]
    for section, title in SECTIONS.items():
        chosen = [row for row in rows if row["section"] == section]
        if chosen:
            lines += ["", f"## {title}", "", *(layer_table if section == "layer" else matmul_table)(chosen)]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the run


def jobs(section: str, shapes: list[Shape]) -> list[tuple[str, Callable[[int], Row]]]:
    """Names of the measurements of a section, and what measures them in so many rounds."""
    if section == "layer":
        return [(str(shape), lambda rounds, shape=shape: layer_row(shape, rounds)) for shape in shapes]
    names = ("up", "down", *(f"gradient of {what}" for what in ("the rows of up", "the rows of down", "up", "down")))
    return [
        (f"{shape} {what}", lambda rounds, shape=shape, what=what: matmul_row(shape, what, rounds))
        for shape in shapes
        for what in names
    ]


def set_tiles(texts: list[str]) -> None:
    """Replace the tiles of kinds in the table of the device."""
    table = tile_configs._HOPPER if torch.cuda.get_device_capability()[0] >= 9 else tile_configs._AMPERE
    for text in texts:
        kind, _, numbers = text.partition("=")
        if kind not in table:
            raise ValueError(f"`--tile` ({text}) must name one of {', '.join(table)}.")
        table[kind] = tile_configs.TileConfig(*map(int, numbers.split(",")))
    if len({tile.block_m for kind, tile in table.items() if kind != "outer"}) > 1:
        raise ValueError("`--tile`: all kinds but `outer` need tiles of the same height.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help="measurements whose name holds all of these words")
    parser.add_argument("--skip", nargs="+", default=[], choices=list(LAYER_PEERS)[1:], help="contenders of `layer`")
    parser.add_argument("--compile-ahead", type=int, default=0, metavar="N", help="in so many processes, 16 at most")
    parser.add_argument("--compile-part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help="begin no measurement after that")
    parser.add_argument("--results", type=Path, default=Path("moe_layer.jsonl"))
    parser.add_argument("--report", type=Path, help="write the tables of all results here, as markdown")
    parser.add_argument("--tile", nargs="+", default=[], help="KIND=rows,columns,depth,warps,stages[,together[,...]]")
    parser.add_argument("--check", action="store_true", help="small shapes, results compared, nothing measured")
    arguments = parser.parse_args()
    if arguments.tile:
        set_tiles(arguments.tile)
    if arguments.compile_part:
        part, parts = map(int, arguments.compile_part.split("/"))
        compile_part(part, parts, arguments.only)
        return
    until = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    for name in arguments.skip:
        del LAYER_PEERS[name]
    wanted = [
        (section, name, measure)
        for section in arguments.sections
        for name, measure in jobs(section, SMALL if arguments.check else LAYERS)
        if all(word in name.split() for word in arguments.only)
    ]
    if arguments.check:
        for section, name, measure in wanted:
            row = measure(0)
            print(f"{section}: {name}: {row['refused'] or 'all agree'}, bitwise {row.get('bitwise', '-')}", flush=True)
        return
    if arguments.compile_ahead:
        compile_ahead(arguments.compile_ahead, arguments.only)
    measure_all(wanted, arguments.results, arguments.rounds, until)
    text = report(_rows_of(arguments.results))
    print(text)
    if arguments.report:
        arguments.report.write_text(text)


def compile_ahead(processes: int, only: list[str]) -> None:
    """Run this command in several processes that only compile."""
    started = time.monotonic()
    command = [sys.executable, __file__, *(["--only", *only] if only else []), "--compile-part"]
    parts = [subprocess.Popen([*command, f"{part}/{processes}"]) for part in range(processes)]
    for part in parts:
        try:
            part.wait(max(0.1, started + 180 - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.kill()
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)


def compile_part(part: int, parts: int, only: list[str]) -> None:
    """Run a part of the tiles that Liger's kernels choose from, on fewer experts and tokens: it is the same code."""
    from liger_kernel.ops import fused_moe_kernels  # pyright: ignore[reportMissingImports]
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(fused_moe_kernels).values():
        if isinstance(kernel, Autotuner):
            kernel.configs = kernel.configs[part::parts] or kernel.configs[:1]
    sizes = {f"E{shape.experts}" for shape in LAYERS}
    for shape in LAYERS:
        if shape.load == LOADS[0] and f"E{shape.experts}" in (sizes.intersection(only) or sizes):
            tensors = draw(shape._replace(experts=8, tokens=1024))
            _, reason = usable("compiling", step_of(liger(tensors), tensors))
            if reason is not None:  # a tile that does not fit, perhaps; the measurement tells if nothing runs
                print(f"compiling {shape}, part {part}: {reason}", flush=True)


def _rows_of(results: Path) -> list[Row]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def measure_all(
    wanted: list[tuple[str, str, Callable[[int], Row]]], results: Path, rounds: int, until: float | None
) -> None:
    """Measure what `results` does not have yet and append it; begin nothing after `until`, by `time.monotonic`."""
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    with suppress(metadata.PackageNotFoundError):
        versions["liger_kernel"] = metadata.version("liger_kernel")
    device = {"device": torch.cuda.get_device_name(), **versions, "rounds": rounds}
    done = {(row["section"], row["shape"], row["device"]) for row in _rows_of(results)}
    for section, name, measure in wanted:
        if (section, name, device["device"]) in done:
            continue
        started = time.monotonic()
        if until is not None and started > until:
            print(f"{section}: {name}: no time left", flush=True)
            continue
        row = {"section": section, "shape": name, **device, "date": datetime.date.today().isoformat()}
        row |= measure(rounds)
        row["took"] = round(time.monotonic() - started, 1)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        brief = {peer: round(statistics.median(t.get("both", t["forward"])), 3) for peer, t in row["ms"].items()}
        print(f"{section}: {name}: ms {brief} {row['refused'] or ''}; took {row['took']:.0f} s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
