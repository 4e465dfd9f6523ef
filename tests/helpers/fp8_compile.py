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

from offline_compile import compile_kernel

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
        yield Variant("rows", "none", "tile", 90)
        return
    for capability in SHARED_MEMORY:
        yield Variant("transpose", "none", "tensor", capability)
        for producer in ("none", "activation", "gated", "gated_backward", "rms_norm", "layer_norm"):
            for granularity in ("tensor", "row"):
                yield Variant("amax", producer, granularity, capability)
            for granularity in ("tensor", "row", "tile", *(("block",) if producer == "none" else ())):
                yield Variant("cast", producer, granularity, capability)
        for granularity in ("tensor", "fast", "row", "tile", "few"):
            yield Variant("rows", "none", granularity, capability)
        for granularity in ("tensor", "fast", "row", "tile"):
            yield Variant("outer", "none", granularity, capability)


def cast(kind: str, producer: str, granularity: str) -> tuple[Any, dict[str, Any]]:
    """Return kernel and constants of a cast, or of its maxima."""
    from stoker.kernels.fp8 import cast_kernels

    normed = producer.endswith("norm")
    constants: dict[str, Any] = {"PRODUCER": producer, "KIND": "" if producer == "none" or normed else "silu"}
    constants |= {"ROWS": kind != "transpose", "COLUMNS": True}
    pointers = {"second_pointer": normed or producer == "gated_backward", "gain_pointer": normed}
    pointers |= dict.fromkeys(("mean_pointer", "bias_pointer"), producer == "layer_norm")
    constants |= {name: None for name, read in pointers.items() if not read}
    if kind == "amax":
        return cast_kernels.amax_kernel, constants | {"PER_ROW": granularity == "row"} | cast_kernels.amax_block()
    product = producer == "gated_backward"
    if not product:
        constants["product_amax_pointer"] = None
    constants |= {"GRANULARITY": granularity, "PRODUCT": product, "MAX": 57344.0, "PRODUCT_MAX": 448.0}
    constants |= {"FACTOR": 1.0, "POWER_OF_TWO": granularity == "tile"}
    return cast_kernels.cast_kernel, constants | cast_kernels.cast_block(granularity, producer)


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
    return grouped_kernels.grouped_fp8_kernel, constants | {"B_SCALES": scales, "EVEN_DEPTH": True}


def argument_type(kind: str, producer: str, name: str) -> str:
    """Return the type of an argument that is no constant."""
    if not name.endswith("_pointer"):
        return "i32"
    if "scale" in name or name == "mean_pointer" or (producer.endswith("norm") and name == "second_pointer"):
        return "*fp32"
    if kind in ("rows", "outer"):
        return {"a": "*fp8e5", "b": "*fp8e4nv", "out": "*bf16"}.get(name.removesuffix("_pointer"), "*i32")
    if "amax" in name:
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
        casts = kind in ("amax", "cast", "transpose")
        kernel, constants = cast(kind, producer, granularity) if casts else grouped(kind, granularity, capability)
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
