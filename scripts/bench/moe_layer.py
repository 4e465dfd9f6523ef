"""MoE layer benchmark on one GPU: our experts and grouped matmuls, Liger's fused_moe, and a dense MLP.

    python scripts/bench/moe_layer.py [--sections layer matmul] [--rounds 5] [--only E128 balanced ...]
        [--skip "Liger fused_moe"] [--compile-ahead 12] [--seconds 500] [--results moe_layer.jsonl]
        [--tile rows=128,256,64,8,4 ...] [--check]

`layer`: forward and backward of the experts from routed tokens (without the router), random bf16 data; the dense MLP
computes the same FLOPs on as many rows with one matrix, an upper bound for the experts. `matmul`: the grouped matmuls
one by one (forward, gradient of the rows, gradient of the matrices), torch's, and a dense one. Routing is `balanced`
(every token chooses at random), `skewed` (one expert among the choices of half of all tokens) or `crowded` (one expert
among the choices of all tokens).

Measured as in attention.py: contenders alternate within each round, the L2 cache is flushed, device time is measured; a
ratio is the median over rounds of the ratios within a round. Each shape appends one JSON line, and shapes in the file
are skipped. `--tile KIND=rows,columns,depth,warps,stages[,together[,resident]]` replaces the tile of a kernel for
tuning; use a separate results file. `--check` runs every contender once on small shapes, with or without a GPU, and
compares the results without measuring.

Liger's kernels autotune over 240 tiles for each pair of widths. `--compile-ahead N` compiles them in N processes at
once to fill Triton's cache; one after the other takes minutes.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rounds import Row, append_row, deadline, machine, peak_mib, print_tables, read_rows
from torch import Tensor

from stoker.kernels.gated_activation import gated_activation
from stoker.kernels.moe import tile_configs
from stoker.kernels.moe.assignments import sorted_assignments
from stoker.kernels.moe.expert_mlps import Implementation, expert_mlp
from stoker.kernels.moe.grouped_matmul import (
    row_tiles,
    torch_grouped_mm,
    triton_grouped_matmul,
    triton_grouped_outer,
    unsupported_reason,
)
from stoker.kernels.moe.tile_map import Tiles
from stoker.kernels.timing import Event, TimedCall, in_turns, record_event

OURS = "ours"
DENSE = "dense MLP"
SECTIONS = {"layer": "The experts of a layer", "matmul": "Grouped matmuls"}
LOADS = ("balanced", "skewed", "crowded")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Function = Callable[..., Tensor]
ROUND_MS = 40.0


class Shape(NamedTuple):
    """Shape of an MoE layer: number of experts, top-k, widths, tokens, and routing load."""

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
    """Inputs of a layer and the gradient of its output.

    Attributes:
        hidden: (N, hidden).
        gates: routing weights (N, K).
        up: (E, 2 * ffn, hidden).
        down: (E, hidden, ffn).
        experts: expert indices (N, K).
        upstream: gradient of the output (N, hidden).
    """

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
        """Return the same tensors with the weights of the first expert only."""
        up, down = (weight[:1].detach().clone().requires_grad_() for weight in (self.up, self.down))
        return self._replace(up=up, down=down)


def draw(shape: Shape) -> Tensors:
    """Return random tokens and weights in bf16, or in fp32 without a GPU."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def normal(*size: int, width: int = 1) -> Tensor:
        return (torch.randn(*size, device=DEVICE, generator=generator) / math.sqrt(width)).to(dtype)

    scores = torch.rand(shape.tokens, shape.experts, device=DEVICE, generator=generator)
    if shape.load != "balanced":
        # the other tokens never choose expert 0, so that it has exactly half of the tokens
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
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    experts = tensors.experts.int()
    return lambda hidden, gates, up, down: LigerFusedMoEFunction.apply(hidden, up, down, experts, gates)


def dense(tensors: Tensors) -> Function:
    """Dense MLP with one matrix for all rows: the FLOPs of the experts without routing."""
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
    """One grouped matmul: its contenders, as functions without arguments, and its FLOPs."""

    calls: dict[str, Callable[[], Tensor]]
    flops: int


def products(shape: Shape) -> dict[str, Product]:
    """Return the grouped matmuls of a layer's forward and backward on sorted rows, and variants that gather rows."""
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
            "triton": lambda: triton_grouped_matmul(left, matrices, ends, tiles())[0],
            "torch": lambda: torch_grouped_mm(left, matrices, offs=ends),
            "dense": lambda: left @ matrices[0],
        }

    def outer(left: Tensor, right: Tensor) -> dict[str, Callable[[], Tensor]]:
        return {
            "triton": lambda: triton_grouped_outer(left, right, ends, tiles()),
            "torch": lambda: torch_grouped_mm(left.t(), right, offs=ends),
            "dense": lambda: left.t() @ right,
        }

    first = forward(rows, up.transpose(1, 2))
    first["triton, gather"] = lambda: triton_grouped_matmul(hidden, up.transpose(1, 2), ends, tiles(), **gather)[0]
    last = outer(wide, rows)
    last["triton, gather"] = lambda: triton_grouped_outer(wide, hidden, ends, tiles(), **gather, gather="right")
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


def build_step(function: Function, tensors: Tensors) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs forward and backward once and returns the output and the gradients."""

    def step() -> tuple[Tensor, ...]:
        out = function(*tensors.leaves)
        return out.detach(), *torch.autograd.grad(out, tensors.leaves, tensors.upstream)

    return step


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest relative error, by norm, of the output and the gradients."""
    pairs = zip(got, expected, strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


def try_run(name: str, run: Callable[[], Any]) -> tuple[Any, str | None]:
    """Run a contender and return (result, None), or (None, reason) if it fails."""
    try:
        result = run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # the table shows whatever a peer raises
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:140] if str(error) else ''}"
    else:
        return result, None
    if DEVICE.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise SystemExit(f"{name} has broken the device ({reason}); continue with --skip '{name}'") from None
        gc.collect()
        torch.cuda.empty_cache()
    return None, reason


def layer_row(shape: Shape, rounds: int) -> Row:
    """Measure forward and backward of every contender; with 0 rounds, only compare their results."""
    tensors = draw(shape)
    row: Row = {"ms": {}, "refused": {}, "peak_mib": {}, "forward_flops": shape.forward_flops}
    functions: dict[str, tuple[Function, Tensors]] = {}
    expected = None
    for name, build in LAYER_PEERS.items():
        function, reason = try_run(name, lambda build=build: build(tensors))
        inputs = tensors.of_one_expert() if name == DENSE else tensors
        if reason is None:
            actual, reason = try_run(name, build_step(function, inputs))
            if reason is None and name != DENSE:
                expected = actual if expected is None else expected
                error = difference(actual, expected)
                reason = None if error < 0.03 else f"differs by {error:.3g}"
            del actual
        if reason is None:
            functions[name] = function, inputs
        else:
            row["refused"][name] = reason
    if OURS in functions:
        step = build_step(*functions[OURS])
        row["bitwise"] = all(torch.equal(a, b) for a, b in zip(step(), step(), strict=True))
    if not rounds:
        return row
    calls: dict[str, TimedCall] = {}
    for name, (function, inputs) in functions.items():

        def run(function: Function = function, inputs: Tensors = inputs) -> list[Event]:
            start = record_event()
            out = function(*inputs.leaves)
            middle = record_event()
            torch.autograd.grad(out, inputs.leaves, inputs.upstream)
            return [start, middle, record_event()]

        peak, reason = try_run(name, lambda run=run: peak_mib(run))
        if reason is not None:
            row["refused"][name] = reason
            continue
        calls[name] = run
        row["peak_mib"][name] = peak
    for name, (forward, backward) in in_turns(calls, rounds, ROUND_MS).items():
        both = [a + b for a, b in zip(forward, backward, strict=True)]
        row["ms"][name] = {"forward": forward, "backward": backward, "both": both}
    return row


def matmul_row(shape: Shape, what: str, rounds: int) -> Row:
    """Measure one grouped matmul of every contender; with 0 rounds, only compare their results."""
    product = products(shape)[what]
    row: Row = {"ms": {}, "refused": {}, "forward_flops": product.flops}
    calls: dict[str, TimedCall] = {}
    expected = None
    for name, function in product.calls.items():
        actual, reason = try_run(name, function)
        if name == "torch" and DEVICE.type == "cuda":
            reason = unsupported_reason("torch", torch.empty(0, device=DEVICE, dtype=torch.bfloat16)) or reason
        if reason is None and name != "dense":
            expected = actual if expected is None else expected
            error = difference((actual,), (expected,))
            reason = None if error < 0.01 else f"differs by {error:.3g}"
        del actual
        if reason is not None:
            row["refused"][name] = reason
            continue

        def run(function: Callable[[], Tensor] = function) -> list[Event]:
            start = record_event()
            function()
            return [start, record_event()]

        calls[name] = run
    if rounds:
        row["ms"] = {name: {"forward": times[0]} for name, times in in_turns(calls, rounds, ROUND_MS).items()}
    return row


# ---------------------------------------------------------------- the run


def jobs(section: str, shapes: list[Shape]) -> list[tuple[str, Callable[[int], Row]]]:
    """Return (name, measure) of each measurement of a section; `measure` takes the number of rounds."""
    if section == "layer":
        return [(str(shape), lambda rounds, shape=shape: layer_row(shape, rounds)) for shape in shapes]
    names = ("up", "down", *(f"gradient of {what}" for what in ("the rows of up", "the rows of down", "up", "down")))
    return [
        (f"{shape} {what}", lambda rounds, shape=shape, what=what: matmul_row(shape, what, rounds))
        for shape in shapes
        for what in names
    ]


def set_tiles(texts: list[str]) -> None:
    """Replace tiles in the device's table by `KIND=rows,columns,...`."""
    table = tile_configs._HOPPER if torch.cuda.get_device_capability()[0] >= 9 else tile_configs._AMPERE
    for text in texts:
        kind, _, numbers = text.partition("=")
        if kind not in table:
            raise ValueError(f"`--tile` ({text}) must begin with one of {', '.join(table)}.")
        table[kind] = tile_configs.TileConfig(*map(int, numbers.split(",")))
    if len({tile.block_m for kind, tile in table.items() if kind != "outer"}) > 1:
        raise ValueError("`--tile`: all kinds except `outer` must have the same number of rows.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], help="measurements whose name contains all of these words")
    parser.add_argument("--skip", nargs="+", default=[], choices=list(LAYER_PEERS)[1:], help="contenders to leave out")
    parser.add_argument("--compile-ahead", type=int, default=0, metavar="N", help="compile in N processes, at most 16")
    parser.add_argument("--compile-part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help="time limit for starting measurements")
    parser.add_argument("--results", type=Path, default=Path("moe_layer.jsonl"), help="file to append to")
    parser.add_argument("--tile", nargs="+", default=[], help="KIND=rows,columns,depth,warps,stages[,together[,...]]")
    parser.add_argument("--check", action="store_true", help="only compare the results, on small shapes")
    arguments = parser.parse_args()
    if arguments.tile:
        set_tiles(arguments.tile)
    if arguments.compile_part:
        part, parts = map(int, arguments.compile_part.split("/"))
        compile_part(part, parts, arguments.only)
        return
    until = deadline(arguments.seconds)
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
    print_tables(["moe_layer", "moe_matmul"], arguments.results)


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
    """Compile a part of the tiles of Liger's autotuners; fewer experts and tokens give the same code."""
    from liger_kernel.ops import fused_moe_kernels
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(fused_moe_kernels).values():
        if isinstance(kernel, Autotuner):
            kernel.configs = kernel.configs[part::parts] or kernel.configs[:1]
    sizes = {f"E{shape.experts}" for shape in LAYERS}
    for shape in LAYERS:
        if shape.load == LOADS[0] and f"E{shape.experts}" in (sizes.intersection(only) or sizes):
            tensors = draw(shape._replace(experts=8, tokens=1024))
            _, reason = try_run("compiling", build_step(liger(tensors), tensors))
            if reason is not None:  # probably a tile that does not fit; the measurement shows if nothing runs
                print(f"compiling {shape}, part {part}: {reason}", flush=True)


def measure_all(
    wanted: list[tuple[str, str, Callable[[int], Row]]], results: Path, rounds: int, until: float | None
) -> None:
    """Measure jobs that are not in `results` and append their rows; start none after `until` (`time.monotonic`)."""
    device = torch.cuda.get_device_name()
    done = {(row["section"], row["shape"]) for row in read_rows(results) if row["device"] == device}
    for section, name, measure in wanted:
        if (section, name) in done:
            continue
        started = time.monotonic()
        if until is not None and started > until:
            print(f"{section}: {name}: no time left", flush=True)
            continue
        row: dict[str, Any] = {"section": section, "shape": name, "rounds": rounds} | measure(rounds)
        row |= machine()  # with the version of liger_kernel, if that has been imported
        row["took"] = round(time.monotonic() - started, 1)
        append_row(results, row)
        brief = {peer: round(statistics.median(t.get("both", t["forward"])), 3) for peer, t in row["ms"].items()}
        print(f"{section}: {name}: ms {brief} {row['refused'] or ''}; took {row['took']:.0f} s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
