"""Compile the kernels of LSE-first attention, score recomputation and masked softmax for GPUs that are not installed.

`python tests/helpers/lse_first_compile.py few` takes a few variants, `all` every width on every architecture; it prints
JSON lines, one per variant. Must run in its own process, because kernels imported under TRITON_INTERPRET=1 cannot be
compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from offline_compile import CAPABILITIES, compile_kernel

DENSE_OUTPUT = ("weights", "score_gradient")
"""Stages that write one element per query and key."""
TYPES = {"lse_pointer": "*fp32", "delta_pointer": "*fp32", "mask_pointer": "*u8", "scale": "fp32"}
TYPES |= dict.fromkeys(("sinks_pointer", "sink_weights_pointer", "row_sums_pointer"), "*fp32")
ALIGNED = ("columns", "queries", "keys", "mask_query_stride")


class Variant(NamedTuple):
    """A kernel, its head width or number of columns, dtype ("bf16" or "fp32") and compute capability."""

    kind: str
    width: int
    dtype: str
    capability: int


def variants(which: str) -> Iterator[Variant]:
    """Yield the variants to compile: a `few`, or `all`."""
    if which == "few":
        yield Variant("lse", 128, "bf16", 90)
        yield Variant("output", 64, "bf16", 120)
        yield Variant("weights", 128, "bf16", 90)
        yield Variant("score_gradient", 128, "bf16", 90)
        yield Variant("softmax_forward", 65536, "bf16", 90)
        yield Variant("softmax_backward", 16384, "bf16", 80)
        yield Variant("softmax_forward_sinks", 2048, "bf16", 90)
        yield Variant("softmax_backward_sinks", 2048, "bf16", 90)
        return
    for capability in CAPABILITIES:
        for stage in ("lse", "output", "weights", "score_gradient"):
            for head_dim in (64, 80, 128, 256):
                yield Variant(stage, head_dim, "bf16", capability)
            yield Variant(stage, 128, "fp32", capability)
        for columns in (64, 2048, 8192, 32768, 131072):
            yield Variant("softmax_forward", columns, "bf16", capability)
            yield Variant("softmax_backward", columns, "bf16", capability)
        for columns in (2048, 131072):
            yield Variant("softmax_forward_sinks", columns, "bf16", capability)
            yield Variant("softmax_backward_sinks", columns, "bf16", capability)


def attention(variant: Variant) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return kernel, constexprs and launch options of a stage."""
    import torch
    import triton.language as tl

    from stoker.kernels.attention import recompute_scores_kernels
    from stoker.kernels.attention.lse_first import triton_stages
    from stoker.kernels.attention.lse_first.tile_configs import stage_config

    dtype = torch.float32 if variant.dtype == "fp32" else torch.bfloat16
    config = stage_config(variant.kind, variant.width, dtype, variant.capability)  # pyrefly: ignore[bad-argument-type]
    constants = {
        "HEAD_DIM": variant.width,
        "BLOCK_D": 1 << (variant.width - 1).bit_length(),
        "BLOCK_M": config.queries,
        "BLOCK_N": config.keys,
        "CAUSAL": True,
        **({"TILES": recompute_scores_kernels.TILES} if variant.kind in DENSE_OUTPUT else {"MERGE": True}),
        **({"NEGATIVE": False} if variant.kind == "lse" else {}),
        "ACCUMULATE": tl.float32,
        "PRECISION": "tf32" if variant.dtype == "fp32" else "ieee",
    }
    stage_kernels = {
        "lse": triton_stages.lse_kernel,
        "output": triton_stages.output_kernel,
        "weights": recompute_scores_kernels.weights_kernel,
        "score_gradient": recompute_scores_kernels.score_gradient_kernel,
    }
    return stage_kernels[variant.kind], constants, {"num_warps": config.warps, "num_stages": config.stages}


def softmax(variant: Variant) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return kernel, constexprs and launch options of a masked softmax."""
    import triton.language as tl

    from stoker.kernels import masked_softmax_kernels as kernels

    forward, sinks = variant.kind.startswith("softmax_forward"), variant.kind.endswith("sinks")
    constants: dict[str, Any] = {"CAUSAL": True, "ACCUMULATE": tl.float32}
    constants |= {"MASKED": True, "HAS_SINK": sinks} if forward else {"ROW_SUMS": sinks}
    if not sinks:
        constants |= dict.fromkeys(("sinks_pointer", "sink_weights_pointer") if forward else ("row_sums_pointer",))
    if variant.width > kernels.ONE_PASS_COLUMNS:
        kernel = kernels.long_masked_softmax_kernel if forward else kernels.long_masked_softmax_backward_kernel
        vector = {"VECTOR": kernels.VECTOR} if forward else {}
        return kernel, constants | {"BLOCK": kernels.STEP} | vector, {"num_warps": kernels.LONG_WARPS}
    tile = kernels.row_tile(variant.width)
    options = {"num_warps": tile.pop("num_warps")}
    return (
        (kernels.masked_softmax_kernel if forward else kernels.masked_softmax_backward_kernel),
        constants | tile,
        options,
    )


def compile_variant(variant: Variant) -> dict[str, Any]:
    """Compile a variant; return its registers, spills, shared memory and instruction counts."""
    kernel, constants, options = softmax(variant) if variant.kind.startswith("softmax") else attention(variant)
    row, code = compile_kernel(
        kernel,
        lambda name: TYPES.get(name, f"*{variant.dtype}" if name.endswith("_pointer") else "i32"),
        constants,
        lambda name: name.startswith("stride_") or name in ALIGNED,
        variant.capability,
        options | {"enable_fp_fusion": True},
    )
    narrow = len(re.findall(r"ld\.global[\w.:]*\.(?:b|u)16", code))  # loads of one element
    stores = [store for store in re.findall(r"st\.global[\w.:]*", code) if ".v4" not in store]
    counts = {"wgmma": code.count("wgmma.mma_async"), "narrow_loads": narrow, "narrow_stores": len(stores)}
    return variant._asdict() | row | counts


def compiled(which: str) -> list[dict[str, Any]]:
    """Compile all variants and return their rows."""
    return [compile_variant(variant) for variant in variants(which)]


if __name__ == "__main__":
    print(*map(json.dumps, compiled(sys.argv[1])), sep="\n")
