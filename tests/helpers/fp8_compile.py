"""Compile the fp8 kernels for GPUs that are not installed; prints JSON lines, one per variant.

`python tests/helpers/fp8_compile.py few` takes a few variants, `all` every kernel on every architecture with fp8. Must
run in its own process, because kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from offline_compile import compile_kernel, resources

ACTIVATIONS = ("activation", "gated", "activation_backward", "gated_backward")
PRODUCERS = ("none", "gather", *ACTIVATIONS, *(f"experts' {name}" for name in ACTIVATIONS), "rms_norm", "layer_norm")
SHARED_MEMORY = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Variant(NamedTuple):
    """A kernel, what it casts, the granularity of its scales, and a compute capability."""

    kind: str
    producer: str
    granularity: str
    capability: int


def variants(which: str) -> Iterator[Variant]:
    """Yield the variants to compile: a `few`, or `all`."""
    if which == "few":
        yield Variant("amax", "none", "tensor", 90)
        yield Variant("cast", "none", "tensor", 90)
        yield Variant("cast", "gated_backward", "tile", 90)
        yield Variant("cast", "layer_norm", "tensor", 90)
        yield Variant("transpose", "none", "tensor", 90)
        yield Variant("cast", "experts' gated_backward", "tensor", 90)
        yield Variant("row_cast", "gated", "row", 90)
        yield Variant("rows", "none", "tile", 90)
        yield Variant("hopper_rows", "none", "fast", 90)
        return
    for capability in SHARED_MEMORY:
        yield Variant("transpose", "none", "tensor", capability)
        yield Variant("backward_amax", "none", "tensor", capability)
        yield Variant("align_rows", "none", "tensor", capability)
        for producer in ("activation", "gated"):
            yield Variant("row_cast", producer, "row", capability)
        for producer in PRODUCERS:
            for granularity in ("tensor", "row"):
                yield Variant("amax", producer, granularity, capability)
            for granularity in ("tensor", "row", "tile", *(("block",) if producer == "none" else ())):
                yield Variant("cast", producer, granularity, capability)
        for granularity in ("tensor", "fast", "row", "tile", "few"):
            yield Variant("rows", "none", granularity, capability)
        for granularity in ("tensor", "fast", "row", "tile"):
            yield Variant("outer", "none", granularity, capability)
    for kind in ("hopper_rows", "hopper_outer"):
        for granularity in ("tensor", "fast", "row"):
            yield Variant(kind, "none", granularity, 90)


def cast(kind: str, producer: str, granularity: str) -> tuple[Any, dict[str, Any]]:
    """Return kernel and constants of a cast, or of its maxima."""
    from stoker.kernels.fp8 import cast_kernels

    normed, of_experts = producer.endswith("norm"), producer.startswith("experts' ")
    producer = producer.removeprefix("experts' ")
    backward = producer.endswith("backward")
    constants: dict[str, Any] = {"PRODUCER": producer, "KIND": "silu" if producer in ACTIVATIONS else ""}
    constants |= {"ROWS": kind != "transpose", "COLUMNS": True, "TOPK": 2 if of_experts or producer == "gather" else 0}
    pointers = {"second_pointer": normed or backward or producer == "gather", "gain_pointer": normed or of_experts}
    pointers |= {"mean_pointer": producer == "layer_norm" or of_experts, "bias_pointer": producer == "layer_norm"}
    constants |= {name: None for name, read in pointers.items() if not read}
    if kind == "amax":
        return cast_kernels.amax_kernel, constants | {"PER_ROW": granularity == "row"} | cast_kernels.amax_block()
    if not backward:
        constants["product_amax_pointer"] = None
    constants |= {"GRANULARITY": granularity, "PRODUCT": backward, "MAX": 57344.0, "PRODUCT_MAX": 448.0}
    constants["FACTOR"] = 1.0
    return cast_kernels.cast_kernel, constants | cast_kernels.cast_block(granularity, producer, of_experts=of_experts)


def grouped(kind: str, granularity: str, capability: int) -> tuple[Any, dict[str, Any]]:
    """Return kernel and constants of a grouped matmul."""
    from stoker.kernels.fp8 import grouped_kernels

    few, fast = granularity == "few", granularity == "fast"
    granularity = "tensor" if few or fast else granularity
    constants = grouped_kernels.grouped_tile(kind, granularity, capability, fast_accumulation=fast, few_rows=few)
    constants |= {"A_SCALES": granularity, "FAST": fast, "EVEN_WIDTH": True}
    if kind == "outer":
        multiple = 128 if granularity == "tile" else 16
        return grouped_kernels.grouped_fp8_outer_kernel, constants | {"EVEN_HEIGHT": True, "MULTIPLE": multiple}
    scales = "block" if granularity == "tile" else granularity
    return grouped_kernels.grouped_fp8_kernel, constants | {"B_SCALES": scales, "EVEN_DEPTH": True, "ROW_AMAX": True}


def of_rows(kind: str, producer: str) -> tuple[Any, dict[str, Any]]:
    """Return kernel and constants of a cast of rows, of the maxima of its backward, or of the order of rows."""
    from stoker.kernels.fp8 import expert_rows, row_cast

    if kind == "align_rows":
        return expert_rows.align_rows_kernel, {"MULTIPLE": 128} | expert_rows.align_block(experts=128)

    if kind == "backward_amax":
        return row_cast.backward_amax_kernel, {"BLOCK": 512, "num_warps": 4}
    constants: dict[str, Any] = {"PARTS": 2 if producer == "gated" else 1, "KIND": "silu", "MAX": 448.0, "FACTOR": 1.0}
    return row_cast.row_cast_kernel, constants | {"ONE_BLOCK": True, "BLOCK": 8192, "num_warps": 8}


def compile_hopper(kind: str, granularity: str) -> tuple[dict[str, Any], str]:
    """Compile a grouped matmul for Hopper; return what it takes, and its PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from stoker.kernels.fp8.hopper_grouped import hopper_grouped_kernel as kernel
    from stoker.kernels.fp8.hopper_launch import hopper_tile

    fast, outer = granularity == "fast", kind == "hopper_outer"
    scales = "row" if granularity == "row" else "tensor"
    constants: dict[str, Any] = {"A_SCALES": scales, "B_SCALES": scales, "FAST": fast, "ROW_AMAX": not outer}
    constants |= {"EVEN_WIDTH": outer, "OUTER": outer, "STACKED": not outer}
    constants |= hopper_tile(outer=outer, fast_accumulation=fast).constants()
    columns = constants["BLOCK_N"]

    def layout(bits: int) -> Any:
        return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)

    types = {name: "constexpr" if name in constants else argument_type(kind, "none", name) for name in kernel.arg_names}
    types["a_descriptor"] = f"tensordesc<fp8e5[64, 128],{layout(8)!r}>"
    types["b_descriptor"] = f"tensordesc<fp8e4nv[{columns}, 128],{layout(8)!r}>"
    types["out_descriptor"] = f"tensordesc<bf16[64, {columns}],{layout(16)!r}>"
    names = kernel.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_pointer")}
    source = GluonASTSource(kernel, types, {(names.index(name),): value for name, value in constants.items()}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return resources(compiled.asm["cubin"]) | {"shared": compiled.metadata.shared}, compiled.asm["ptx"]


def argument_type(kind: str, producer: str, name: str) -> str:
    """Return the type of an argument that is no constant."""
    if not name.endswith("_pointer"):
        return "i32"
    if kind == "align_rows" or "order" in name or (name == "second_pointer" and producer == "gather"):
        return "*i32"
    if producer.startswith("experts' ") and name in ("gain_pointer", "mean_pointer"):
        return "*fp32" if name == "gain_pointer" else "*i32"
    if "scale" in name or name in ("mean_pointer", "dots_pointer", "gates_pointer"):
        return "*fp32"
    if (producer.endswith("norm") and name == "second_pointer") or (kind == "backward_amax" and "amax" not in name):
        return "*fp32"
    if kind in ("rows", "outer", "hopper_rows", "hopper_outer"):
        return {"a": "*fp8e5", "b": "*fp8e4nv", "out": "*bf16"}.get(name.removesuffix("_pointer"), "*i32")
    if "amax" in name or "peaks" in name:
        return "*i32"
    if name.startswith("product"):
        return "*fp8e4nv"
    if kind == "transpose":
        return "*fp8e4nv"
    return "*fp8e5" if name.startswith(("data", "transposed")) else "*bf16"


def compiled(which: str) -> list[dict[str, Any]]:
    """Compile these variants and return their rows."""
    rows: list[dict[str, Any]] = []
    for variant in variants(which):
        kind, producer, granularity, capability = variant
        if kind.startswith("hopper"):
            row, text = compile_hopper(kind, granularity)
        else:
            if kind in ("row_cast", "backward_amax", "align_rows"):
                kernel, constants = of_rows(kind, producer)
            elif kind in ("rows", "outer"):
                kernel, constants = grouped(kind, granularity, capability)
            else:
                kernel, constants = cast(kind, producer, granularity)
            launch = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
            launch["enable_fp_fusion"] = True
            row, text = compile_kernel(
                kernel, partial(argument_type, kind, producer), constants, lambda name: True, capability, launch
            )
        row |= variant._asdict()
        row["narrow_stores"] = len(re.findall(r"st\.global\.b8", text))
        row["wide_stores"] = len(re.findall(r"st\.global\.v[24]\.b32", text))
        row["wide_loads"] = len(re.findall(r"ld\.global\.v4\.b32", text))
        row["copies"] = len(re.findall(r"cp\.async\.cg\.shared\.global [^;]*, 16|cp\.async\.cg", text))
        row["narrow_copies"] = len(re.findall(r"cp\.async\.ca", text))
        row["wgmma"] = len(re.findall(r"wgmma\.mma_async[^;]*e[45]m[23]", text))
        rows.append(row)
    return rows


if __name__ == "__main__":
    print(*map(json.dumps, compiled(sys.argv[1])), sep="\n")
