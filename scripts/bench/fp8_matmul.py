"""fp8 casts, scaled matmuls and layers on one GPU, beside a copy and bf16.

    python scripts/bench/fp8_matmul.py [--sections cast matmul layer] [--tokens 16384] [--tune] [--compile]

The shapes are those of the 1.2 B GPT (hidden 2048, gated FFN 5632, 3072 outputs of the QKV projection). `cast`: bytes
read and written per second, beside those of a copy; `--tune` also tries other tiles. `matmul`: TFLOP/s of the products
of each layer (forward, dgrad, wgrad) in bf16 and in fp8, operands already cast, `fast`: with fast accumulation.
`layer`: milliseconds of forward and backward with all casts. Medians with a cold L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels.fp8 import cast_kernels
from stoker.kernels.fp8.gated_mlp import fp8_gated_mlp
from stoker.kernels.fp8.linear import fp8_linear
from stoker.kernels.fp8.operands import Quantized
from stoker.kernels.fp8.quantize import quantize
from stoker.kernels.fp8.recipe import Fp8Recipe, Scaling
from stoker.kernels.fp8.scaled_matmul import scaled_matmul
from stoker.kernels.fp8.weight_cast import cast_weight
from stoker.kernels.gated_down_projection import gated_projection

HIDDEN, FFN = 2048, 5632
LAYERS = {"qkv": (HIDDEN, 3072), "proj": (HIDDEN, HIDDEN), "fc1": (HIDDEN, 2 * FFN), "fc2": (FFN, HIDDEN)}
SCALINGS: tuple[Scaling, ...] = ("tensorwise", "rowwise", "blockwise")
TILES = [(m, n, w) for m, n in ((32, 128), (64, 64), (128, 64), (64, 128), (128, 128)) for w in (4, 8, 16)]


def milliseconds(function: Callable[[], object]) -> float:
    """Return the median device time of a call."""
    from triton.testing import do_bench

    return float(do_bench(function, warmup=10, rep=60, return_mode="median"))  # pyrefly: ignore[bad-argument-type]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def table(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]))


def casts(tokens: int, tune: bool) -> None:
    source = random(tokens, HIDDEN * 4)
    copy = torch.empty_like(source)
    speed = 2 * source.numel() * 2 / milliseconds(lambda: copy.copy_(source)) / 1e6
    rows = [["copy", "", f"{speed:.0f}", "1.00", ""]]
    none = torch.empty(0, device="cuda")
    one = torch.ones(1, device="cuda")
    cases: dict[str, tuple[str, list[Tensor]]] = {
        "hidden": ("none", [random(tokens, HIDDEN)]),
        "rms_norm": ("rms_norm", [random(tokens, HIDDEN), torch.rand(tokens, device="cuda"), random(HIDDEN)]),
        "[gate | up]": ("none", [random(tokens, 2 * FFN)]),
        "act(gate) * up": ("gated", [random(tokens, 2 * FFN)]),
        "gradient of [gate | up]": ("gated_backward", [random(tokens, 2 * FFN), random(tokens, FFN)]),
    }
    for name, (producer, tensors) in cases.items():
        activation = "" if producer in ("none", "rms_norm") else "silu"
        read = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        elements = tensors[0].numel() // (2 if producer == "gated" else 1)
        gradient = producer == "gated_backward"
        forward = producer == "gated"  # the transpose is cast in the backward
        written = elements * (1 if forward else 2) + (elements // 2 if gradient else 0)

        def add(label: str, size: int, call: Callable[[], object], name: str = name) -> None:
            time = milliseconds(call)
            rows.append([name, label, f"{size / time / 1e6:.0f}", f"{size / time / 1e6 / speed:.2f}", f"{time:.3f}"])

        amax = cast_kernels.triton_amax(tensors, producer, activation, "tensor", True, True)
        kept = cast_kernels.amax_block, cast_kernels.cast_block
        for scaling in SCALINGS:
            granularity = Fp8Recipe(scaling).inputs

            def maxima(granularity: str = granularity) -> object:
                return cast_kernels.triton_amax(tensors, producer, activation, granularity, True, not forward)  # noqa: B023

            found: Any = (none, none)
            if granularity != "tile":
                add(f"amax {scaling}", read, maxima)
                found = amax if granularity == "tensor" else maxima()

            product: Any = (one if granularity != "row" else torch.ones(FFN, device="cuda"), "e4m3")
            options: Any = (*found, "e5m2", granularity, 0, True, not forward, *(product if gradient else ()))

            def cast(options: Any = options) -> object:
                return cast_kernels.triton_cast(tensors, producer, activation, *options)  # noqa: B023

            add(f"cast {scaling}", read + written, cast)
            if tune and granularity == "tensor":
                for m, n, warps in TILES:
                    block = {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps}
                    cast_kernels.amax_block = lambda block=block: dict(block)
                    cast_kernels.cast_block = lambda *_, block=block, **__: dict(block)
                    add(f"amax {m}x{n}, {warps} warps", read, maxima)
                    add(f"cast {m}x{n}, {warps} warps", read + written, cast)
                cast_kernels.amax_block, cast_kernels.cast_block = kept
    table("casts", ["what", "kernel", "GB/s", "of copy", "ms"], rows)


def operands(recipe: Fp8Recipe, tokens: int, depth: int, width: int) -> dict[str, tuple[Quantized, Quantized]]:
    """Return the operands of the forward, dgrad and wgrad of a layer."""
    inputs = quantize(random(tokens, depth), "e4m3", recipe.inputs)
    weight = quantize(random(width, depth), "e4m3", recipe.weights)
    outer = quantize(random(tokens, width), "e5m2" if recipe.backward == "e5m2" else "e4m3", recipe.inputs)
    pairs = {"forward": (inputs[0], weight[0]), "dgrad": (outer[0], weight[1]), "wgrad": (outer[1], inputs[1])}
    return pairs  # pyrefly: ignore[bad-return]


def matmuls(tokens: int) -> None:
    rows: list[list[str]] = []
    variants = ["bf16", *(f"{scaling}{fast}" for scaling in SCALINGS for fast in ("", " fast"))]
    variants.remove("blockwise fast")
    total = dict.fromkeys(variants, 0.0)
    for name, (depth, width) in LAYERS.items():
        x, w, g = random(tokens, depth), random(width, depth), random(tokens, width)
        plain = {"forward": lambda: x @ w.t(), "dgrad": lambda: g @ w, "wgrad": lambda: g.t() @ x}  # noqa: B023
        times: dict[str, list[float]] = {which: [milliseconds(call)] for which, call in plain.items()}
        for scaling in SCALINGS:
            for which, (a, b) in operands(Fp8Recipe(scaling), tokens, depth, width).items():
                for fast in (False, True)[: 1 if scaling == "blockwise" else 2]:
                    try:
                        time = milliseconds(lambda: scaled_matmul(a, b, torch.bfloat16, fast_accumulation=fast))  # noqa: B023
                    except RuntimeError as error:
                        print(name, which, scaling, str(error)[:200])
                        time = float("nan")
                    times[which].append(time)
        for which, found in times.items():
            for variant, time in zip(variants, found, strict=True):
                total[variant] += time
            rows.append([f"{name} {which}", *(f"{2 * tokens * depth * width / time / 1e9:.0f}" for time in found)])
    rows.append(["ms of a layer", *(f"{time:.3f}" for time in total.values())])
    table("products, TFLOP/s", ["product", *variants], rows)


def layers(tokens: int, compiled: bool) -> None:
    run: Any = torch.compile if compiled else lambda function: function
    rows: list[list[str]] = []
    x, up, down = (random(*of).requires_grad_() for of in ((tokens, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)))
    qkv = random(3072, HIDDEN).requires_grad_()

    def step(function: Callable[..., Tensor], *tensors: Tensor) -> Callable[[], object]:
        outer = torch.randn_like(function(*tensors))
        return lambda: torch.autograd.grad(function(*tensors), tensors, outer)

    def add(name: str, function: Callable[..., Tensor], *tensors: Tensor) -> None:
        call = step(run(function), *tensors)
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        rows.append([name, f"{milliseconds(call):.3f}", f"{peak:.0f}"])

    add("bf16 qkv", F.linear, x, qkv)
    for scaling in SCALINGS:
        recipe = Fp8Recipe(scaling)
        cast = cast_weight(qkv, recipe)
        add(f"{scaling} qkv", lambda x, w: fp8_linear(x, w, None, recipe, cast=cast), x, qkv)  # noqa: B023
    add("bf16 mlp", lambda x, u, d: gated_projection(F.linear(x, u), d, None, "silu"), x, up, down)
    variants: list[tuple[Scaling, bool]] = [(scaling, False) for scaling in SCALINGS]
    variants.append(("tensorwise", True))
    for scaling, fast in variants:
        recipe = Fp8Recipe(scaling, fast_accumulation_backward=fast)
        casts: Any = {"up_cast": cast_weight(up, recipe), "down_cast": cast_weight(down, recipe)}
        add(
            f"{scaling} mlp" + ", fast backward" * fast,
            lambda x, u, d: fp8_gated_mlp(x, u, d, "silu", recipe, **casts),  # noqa: B023
            x, up, down,
        )  # fmt: skip
    rows.append(
        [
            "casts of the weights",
            f"{milliseconds(lambda: [cast_weight(w, Fp8Recipe()) for w in (up, down, qkv)]):.3f}",
            "",
        ]
    )
    table("layers, forward and backward", ["layer", "ms", "peak MiB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=["cast", "matmul", "layer"])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if "cast" in arguments.sections:
        casts(arguments.tokens, arguments.tune)
    if "matmul" in arguments.sections:
        matmuls(arguments.tokens)
    if "layer" in arguments.sections:
        layers(arguments.tokens, arguments.compile)


if __name__ == "__main__":
    main()
