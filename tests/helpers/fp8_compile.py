"""Compile the fp8 kernels for GPUs that are not installed; prints JSON lines, one per variant.

`python tests/helpers/fp8_compile.py few` takes a few variants, `all` every kernel on every architecture with fp8. Must
run in its own process, because kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
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
        return
    for capability in SHARED_MEMORY:
        for producer in ("none", "gated", "gated_backward"):
            for granularity in ("tensor", "row"):
                yield Variant("amax", producer, granularity, capability)
            for granularity in ("tensor", "row", "tile", *(("block",) if producer == "none" else ())):
                yield Variant("cast", producer, granularity, capability)


def compiled(which: str) -> list[dict[str, Any]]:
    """Compile these variants and return their rows."""
    from stoker.kernels.fp8 import cast_kernels

    rows: list[dict[str, Any]] = []
    for variant in variants(which):
        kind, producer, granularity, capability = variant
        constants: dict[str, Any] = {"PRODUCER": producer, "KIND": "" if producer == "none" else "silu"}
        constants |= {"ROWS": True, "COLUMNS": True}
        if producer != "gated_backward":
            constants["second_pointer"] = None
        if kind == "amax":
            kernel, constants["PER_ROW"] = cast_kernels.amax_kernel, granularity == "row"
            block = cast_kernels.amax_block()
        else:
            kernel = cast_kernels.cast_kernel
            product = producer == "gated_backward"
            if not product:
                constants["product_amax_pointer"] = None
            constants |= {"GRANULARITY": granularity, "PRODUCT": product, "MAX": 57344.0, "PRODUCT_MAX": 448.0}
            constants |= {"FACTOR": 1.0, "POWER_OF_TWO": granularity == "tile"}
            block = cast_kernels.cast_block(granularity, producer)
        launch = {"num_warps": block.pop("num_warps"), "enable_fp_fusion": True}

        def type_of(name: str) -> str:
            if not name.endswith("_pointer"):
                return "i32"
            if "amax" in name:
                return "*i32"
            if "scale" in name:
                return "*fp32"
            if name.startswith("product"):
                return "*fp8e4nv"
            return "*fp8e5" if name.startswith(("data", "transposed")) else "*bf16"

        row, text = compile_kernel(kernel, type_of, constants | block, lambda name: True, capability, launch)
        row |= variant._asdict()
        row["narrow_stores"] = len(re.findall(r"st\.global\.b8", text))
        row["wide_stores"] = len(re.findall(r"st\.global\.v[24]\.b32", text))
        row["wide_loads"] = len(re.findall(r"ld\.global\.v4\.b32", text))
        rows.append(row)
    return rows


if __name__ == "__main__":
    print(*map(json.dumps, compiled(sys.argv[1])), sep="\n")
