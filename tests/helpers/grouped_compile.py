"""Compile the MoE kernels for GPUs that are not installed; prints JSON lines, one per variant.

`python tests/helpers/grouped_compile.py few` takes a few variants, `all` every kernel on every architecture. Must run
in its own process, because kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from offline_compile import CAPABILITIES, compile_kernel

INT32 = ("order", "ends", "places", "tile_experts", "tile_rows", "tile_count", "heaviest", "experts", "rows", "count")
FP32 = ("gates", "gate_gradient")


class Variant(NamedTuple):
    """A kernel, its variant, dtype ("bf16" or "fp32") and compute capability."""

    kind: str
    family: str
    dtype: str
    capability: int


# weights are contiguous along the depth (K) in forward kernels, along the width (N) in `rows_backward`
MATMULS = ("gated", "activated", "rows", "rows_backward", "outer")


def variants(which: str) -> Iterator[Variant]:
    """Yield the variants to compile: a `few`, or `all`."""
    if which == "few":
        yield Variant("gated", "silu", "bf16", 90)
        yield Variant("rows_backward", "gather", "bf16", 80)
        yield Variant("outer", "left", "bf16", 90)
        return
    for capability in CAPABILITIES:
        for family in ("silu", "gelu", "gelu_tanh", "bias", "low", "uneven", "unaligned"):
            yield Variant("gated", family, "bf16", capability)
        for family in ("gelu", "relu_squared"):
            yield Variant("activated", family, "bf16", capability)
        for family in ("plain", "gather", "bias", "low", "uneven"):
            yield Variant("rows", family, "bf16", capability)
        for family in ("plain", "gather", "low", "unaligned"):
            yield Variant("rows_backward", family, "bf16", capability)
        for family in ("left", "right", "uneven", "unaligned"):
            yield Variant("outer", family, "bf16", capability)
        for family in ("silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu_squared"):
            yield Variant("activation_backward", family, "bf16", capability)
        for kind in ("gather", "combine", "gate_gradient", "tiles"):
            yield Variant(kind, "", "bf16", capability)
        yield Variant("gated", "gelu", "fp32", capability)
        yield Variant("rows", "gather", "fp32", capability)
        yield Variant("rows_backward", "plain", "fp32", capability)
        yield Variant("outer", "left", "fp32", capability)


def matmul(variant: Variant) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return kernel, constexprs and launch options of a grouped matmul."""
    import torch

    from stoker.kernels.activations import NONLINEARITIES
    from stoker.kernels.moe import grouped_kernels
    from stoker.kernels.moe.tile_configs import tile_config

    dtype = torch.float32 if variant.dtype == "fp32" else torch.bfloat16
    family = variant.family
    kind: Any = "rows" if variant.kind == "rows_backward" else variant.kind
    even = family not in ("uneven", "unaligned")
    activation = ""
    if kind in ("gated", "activated"):
        activation = family if family in NONLINEARITIES else "silu"
    config = tile_config(
        kind,
        dtype,
        variant.capability,
        few_rows=family == "low",
        aligned=family != "unaligned",
        exact_gelu=activation == "gelu",
    )
    constants: dict[str, Any] = {
        "PRECISION": "tf32" if variant.dtype == "fp32" else "ieee",
        "EVEN_WIDTH": even,
        "GROUP_M": config.group_m,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if kind == "outer":
        constants |= {"GATHER_LEFT": family == "left", "GATHER_RIGHT": family != "left", "EVEN_HEIGHT": even}
        return grouped_kernels.grouped_outer_kernel, constants, options
    contiguous = "stride_width" if variant.kind == "rows_backward" else "stride_depth"
    constants |= {
        "GATHER": kind != "rows" or family == "gather",
        "BIAS": family == "bias",
        "GATED": kind == "gated",
        "ACTIVATION": activation,
        "EVEN_DEPTH": even,
        contiguous: 1,
    }
    return grouped_kernels.grouped_matmul_kernel, constants, options


def by_row(variant: Variant) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return kernel, constexprs and launch options of a row-wise operation, or of the tile search."""
    from stoker.kernels.moe import permute, tile_map

    constants: dict[str, Any] = {"BLOCK": 2048}
    if variant.kind == "activation_backward":
        constants = {"BLOCK": 1024, "GATED": variant.family != "relu_squared", "ACTIVATION": variant.family}
    elif variant.kind == "gather":
        constants |= {"WEIGHTED": True}
    elif variant.kind == "combine":
        constants |= {"WEIGHTED": True, "HAS_RESIDUAL": True, "TOPK": 8}
    elif variant.kind == "gate_gradient":
        constants |= {"TOPK": 8}
    else:
        constants = {"BLOCK_ROWS": 128, "BLOCK_E": 512, "BLOCK": 256}
        return tile_map.tiles_kernel, constants, {"num_warps": 4}
    return getattr(permute, f"{variant.kind}_kernel"), constants, {"num_warps": 4}


def type_of(name: str, variant: Variant) -> str:
    """Return the Triton type of an argument."""
    stem = name.removesuffix("_pointer")
    if stem == name:
        return "i32"
    if stem in INT32 and not (stem == "rows" and variant.kind != "tiles"):
        return "*i32"
    return "*fp32" if stem in FP32 else f"*{variant.dtype}"


def compile_variant(variant: Variant) -> dict[str, Any]:
    """Compile a variant; return its registers, spills, shared memory and instruction counts."""
    kernel, constants, options = matmul(variant) if variant.kind in MATMULS else by_row(variant)
    row, code = compile_kernel(
        kernel,
        lambda name: type_of(name, variant),
        constants,
        lambda name: (
            variant.family != "unaligned" and (name in ("width", "depth", "height") or name.startswith("stride_"))
        ),
        variant.capability,
        options | {"enable_fp_fusion": True},
    )
    narrow = len(re.findall(r"cp\.async\.ca\.shared\.global [^;]*, 0x[48],", code))  # loads of less than 16 bytes
    counts = {"wgmma": code.count("wgmma.mma_async"), "copies": code.count("cp.async.c"), "narrow_copies": narrow}
    return variant._asdict() | row | counts


def compiled(which: str) -> list[dict[str, Any]]:
    """Compile all variants and return their rows."""
    return [compile_variant(variant) for variant in variants(which)]


if __name__ == "__main__":
    print(*map(json.dumps, compiled(sys.argv[1])), sep="\n")
