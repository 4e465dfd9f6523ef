"""Compile the decode kernels for GPUs that are not installed; prints JSON lines, one per variant.

`python tests/helpers/decode_compile.py few` takes a few variants, `all` every width on every architecture. Must run in
its own process, because kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from offline_compile import CAPABILITIES, compile_kernel

TYPES = {
    "positions_pointer": "*i64", "lengths_pointer": "*i64", "lse_pointer": "*fp32", "distance_pointer": "*fp32",
    "slopes_pointer": "*fp32", "sinks_pointer": "*fp32", "parts_pointer": "*fp32", "cosine_pointer": "*fp32",
    "sine_pointer": "*fp32", "key_cosine_pointer": "*fp32", "key_sine_pointer": "*fp32", "scale": "fp32",
    "softcap": "fp32", "epsilon": "fp32",
}  # fmt: skip
OPTIONAL = {
    "distance_pointer": "HAS_DISTANCE", "slopes_pointer": "HAS_SLOPE", "sinks_pointer": "HAS_SINK",
    "lengths_pointer": "HAS_LENGTHS", "bias_pointer": "HAS_BIAS", "residual_pointer": "HAS_RESIDUAL",
    "gain_pointer": "NORM",
}  # fmt: skip


class Variant(NamedTuple):
    """A kernel, its head width, dtype ("bf16" or "fp32"), number of KV splits and compute capability."""

    kind: str
    width: int
    dtype: str
    splits: int
    capability: int
    flags: tuple[str, ...] = ()


def variants(which: str) -> Iterator[Variant]:
    """Yield the variants to compile: a `few`, or `all`."""
    yield Variant("split", 128, "bf16", 8, 90)
    yield Variant("split", 64, "bf16", 1, 80, ("HAS_LENGTHS", "HAS_DISTANCE"))
    yield Variant("sum", 128, "bf16", 64, 90)
    yield Variant("split", 128, "bf16", 4, 90, ("APPEND",))
    yield Variant("linear", 2048, "bf16", 0, 90, ("NORM", "GATED"))
    if which == "few":
        return
    for capability in CAPABILITIES:
        for width in (32, 80, 128, 256):
            for dtype in ("bf16", "fp32"):
                yield Variant("split", width, dtype, 16, capability)
        for flags in (
            ("HAS_LEFT", "HAS_SOFTCAP", "HAS_SLOPE"),
            ("HAS_DISTANCE",),
            ("HAS_LEFT", "HAS_SINK"),
            ("HAS_LEFT", "HAS_CHUNK"),
        ):
            yield Variant("split", 128, "bf16", 16, capability, flags)
        yield Variant("sum", 256, "bf16", 64, capability)
        yield Variant("split", 128, "bf16", 4, capability, ("APPEND",))
        yield Variant("linear", 2048, "bf16", 0, capability, ("HAS_RESIDUAL",))
        yield Variant("linear", 5632, "bf16", 0, capability, ("HAS_RESIDUAL", "HAS_BIAS"))
        yield Variant("linear", 2048, "bf16", 0, capability, ("NORM", "HAS_BIAS"))
        yield Variant("split", 80, "fp32", 1, capability, ("APPEND", "INTERLEAVED"))


def compile_variant(variant: Variant) -> dict[str, Any]:
    """Compile a variant; return its registers, spills, shared memory and instruction counts."""
    import torch
    import triton.language as tl

    from stoker.kernels import decode_linear
    from stoker.kernels.attention import decode

    kernels = {
        "split": decode.split_kernel, "sum": decode.combine_kernel, "linear": decode_linear.decode_linear_kernel,
    }  # fmt: skip
    kernel = kernels[variant.kind]
    dtype = torch.float32 if variant.dtype == "fp32" else torch.bfloat16
    values: dict[str, Any] = {name: name in variant.flags for name in kernel.arg_names if name.startswith("HAS_")}
    values |= {
        "HEAD_DIM": variant.width,
        "BLOCK_D": max(16, 1 << (variant.width - 1).bit_length()),
        "VALUE_DIM": variant.width,
        "BLOCK_V": max(16, 1 << (variant.width - 1).bit_length()),
        "BLOCK_H": 16,
        "BLOCK_N": decode.keys_per_tile(variant.width, dtype),
        "SPLITS": variant.splits,
        "HALF": variant.width // 2,
        "INTERLEAVED": "INTERLEAVED" in variant.flags,
        "ACCUMULATE": tl.float32,
        "APPEND": "APPEND" in variant.flags,
        "PDL": variant.capability >= 90,
        "PRECISION": "tf32" if variant.dtype == "fp32" else "ieee",
    }
    more: dict[str, dict[str, int]] = {"split": {"num_stages": 2}}
    if variant.kind == "linear":
        gated = "GATED" in variant.flags
        tile = decode_linear.choose_tile(variant.width, gated=gated)
        values |= {"INPUTS": variant.width, "BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs}
        values |= {"NORM": "NORM" in variant.flags, "ZERO_CENTERED": False, "GATED": gated}
        values["ACTIVATION"] = "silu" if gated else None
        more["linear"] = {"num_warps": tile.warps}
    values |= {name: None for name, flag in OPTIONAL.items() if not values.get(flag, True)}
    if variant.splits <= 1 and variant.kind == "split":
        values["lse_pointer"] = None
    if variant.kind == "split" and not values["APPEND"]:
        values |= dict.fromkeys(("cosine_pointer", "sine_pointer", "key_cosine_pointer", "key_sine_pointer"))
        values["HALF"] = 0
    chosen = {name: value for name, value in values.items() if name in kernel.arg_names}
    options = decode.LAUNCH_OPTIONS | more.get(variant.kind, {}) | {"launch_pdl": variant.capability >= 90}
    row, code = compile_kernel(
        kernel,
        lambda name: TYPES.get(name, f"*{variant.dtype}" if name.endswith("_pointer") else "i32"),
        chosen,
        lambda name: name.startswith("stride_") or name == "outputs",
        variant.capability,
        options,
    )
    wide = len(re.findall(r"(?:ld\.global|cp\.async)[\w.:]*(?:\.v4\.b32|\.v2\.b64|\.cg\.shared)", code))
    row |= variant._asdict() | {"wide_loads": wide, "weight_loads": 0}
    if variant.kind == "linear":
        rows = values["BLOCK_N"] * (2 if values["GATED"] else 1)
        row["weight_loads"] = rows * values["BLOCK_K"] // (8 * 32 * options["num_warps"])
    return row


def compiled(which: str) -> list[dict[str, Any]]:
    """Compile all variants and return their rows."""
    return [compile_variant(variant) for variant in variants(which)]


if __name__ == "__main__":
    print(*map(json.dumps, compiled(sys.argv[1])), sep="\n")
