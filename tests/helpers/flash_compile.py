"""Compile the flash attention kernels for GPUs that are not installed; prints JSON lines, one per variant.

`python tests/helpers/flash_compile.py few` takes a kernel of each kind, `all` every family of variants on every
architecture. Must run in its own process, because kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from offline_compile import CAPABILITIES, compile_kernel

FLAGS = (
    "HAS_LEFT", "HAS_RIGHT", "HAS_SOFTCAP", "HAS_BIAS", "HAS_DISTANCE", "HAS_SLOPE", "HAS_PADDING", "HAS_DROPOUT",
    "HAS_SINK", "HAS_CHUNK", "PACKED",
)  # fmt: skip
# families of variants: name -> flags that are set
FAMILIES = {
    "causal": {"HAS_RIGHT"},
    "full": set(),
    "distance": {"HAS_DISTANCE"},
    "causal_distance": {"HAS_RIGHT", "HAS_DISTANCE"},
    "causal_slopes": {"HAS_RIGHT", "HAS_SLOPE"},
    "window_softcap": {"HAS_RIGHT", "HAS_LEFT", "HAS_SOFTCAP"},
    "bias_padding": {"HAS_BIAS", "HAS_PADDING"},
    "causal_dropout": {"HAS_RIGHT", "HAS_DROPOUT"},
    "packed": {"HAS_RIGHT", "PACKED"},
    "sinks": {"HAS_RIGHT", "HAS_LEFT", "HAS_SINK"},
    "chunks": {"HAS_RIGHT", "HAS_LEFT", "HAS_CHUNK"},
}
# pointers that are None unless their flag is set
OPTIONAL = {
    "bias_pointer": "HAS_BIAS",
    "distance_pointer": "HAS_DISTANCE",
    "slopes_pointer": "HAS_SLOPE",
    "sinks_pointer": "HAS_SINK",
    "chunk": "HAS_CHUNK",
    "padding_pointer": "HAS_PADDING",
    "rng_pointer": "HAS_DROPOUT",
    "cu_seqlens_q": "PACKED",
    "cu_seqlens_k": "PACKED",
    "tiles_pointer": "PACKED",
    "far_pointer": "FAR_SUMS",
    "slope_gradient_pointer": "SLOPE_SUMS",
    "bias_gradient_pointer": "WRITE_BIAS_GRADIENT",
    "lse_gradient_pointer": "HAS_LSE_GRADIENT",
}
FP32 = (
    "lse_pointer", "lse_gradient_pointer", "delta_pointer", "distance_pointer", "slopes_pointer", "sinks_pointer",
    "far_pointer",    "slope_gradient_pointer", "partial_pointer",
)  # fmt: skip
TYPES = dict.fromkeys(FP32, "*fp32") | {
    "padding_pointer": "*u8",
    "rng_pointer": "*i64",
    "cu_seqlens_q": "*i32",
    "cu_seqlens_k": "*i32",
    "tiles_pointer": "*i32",
    "scale": "fp32",
    "softcap": "fp32",
    "keep_scale": "fp32",
    "threshold": "i32",
}


class Variant(NamedTuple):
    """A kernel, its family of flags, head width, dtype ("bf16" or "fp32"), compute capability and width of values, if
    another.
    """

    kind: str
    family: str
    head_dim: int
    dtype: str
    capability: int
    value_dim: int | None = None


def variants(which: str) -> Iterator[Variant]:
    """Yield the variants to compile: a `few`, or `all`."""
    if which == "few":
        yield Variant("forward", "causal", 64, "bf16", 90)
        yield Variant("dq", "causal", 64, "bf16", 80)
        yield Variant("distance_gradient", "distance", 64, "bf16", 90)
        return
    streams = ("forward", "dq", "dkdv")
    for kind in streams:
        for capability in CAPABILITIES:
            for head_dim in (64, 128, 256):
                yield Variant(kind, "causal", head_dim, "bf16", capability)
            yield Variant(kind, "distance", 64, "bf16", capability)
            yield Variant(kind, "chunks", 64, "bf16", capability)
            yield Variant(kind, "causal", 192, "bf16", capability, 128)  # MLA
        yield Variant(kind, "distance", 256, "bf16", 80)
        yield Variant(kind, "bias_padding", 64, "bf16", 120)
        if kind == "forward":
            for capability in CAPABILITIES:
                yield Variant(kind, "sinks", 64, "bf16", capability)
        for family in FAMILIES:
            if family not in ("causal", "distance"):
                yield Variant(kind, family, 128, "bf16", 90)
        yield Variant(kind, "causal", 80, "bf16", 90)
        for head_dim in (64, 128, 256):
            yield Variant(kind, "causal", head_dim, "fp32", 90)
        yield Variant(kind, "causal", 256, "fp32", 120)
    for head_dim in (64, 128, 256):
        yield Variant("bias_gradient", "bias_padding", head_dim, "bf16", 90)
        yield Variant("distance_gradient", "distance", head_dim, "bf16", 90)
    yield Variant("distance_gradient", "distance", 64, "fp32", 120)


def constants(variant: Variant) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the kernel of a variant, its constexprs and its launch options."""
    import torch
    import triton.language as tl

    from stoker.kernels.attention.flash.portable import backward, bias_gradient, forward
    from stoker.kernels.attention.flash.portable.tile_configs import tile_config

    kernels = {
        "forward": forward.forward_kernel,
        "dq": backward.dq_kernel,
        "dkdv": backward.dkdv_kernel,
        "bias_gradient": bias_gradient.bias_gradient_kernel,
        "distance_gradient": bias_gradient.distance_gradient_kernel,
    }
    dtype = torch.float32 if variant.dtype == "fp32" else torch.bfloat16
    kind: Any = variant.kind
    with_bias = "bias" in variant.family
    value_dim = variant.value_dim or variant.head_dim
    config = tile_config(kind, max(variant.head_dim, value_dim), dtype, variant.capability, dense_bias=with_bias)
    values = {flag: flag in FAMILIES[variant.family] for flag in FLAGS} | {
        "HEAD_DIM": variant.head_dim,
        "BLOCK_D": 1 << (variant.head_dim - 1).bit_length(),
        "VALUE_DIM": value_dim,
        "BLOCK_V": 1 << (value_dim - 1).bit_length(),
        "BLOCK_M": config.queries,
        "BLOCK_N": config.keys,
        "ACCUMULATE": tl.float32,
        "PRECISION": "tf32" if variant.dtype == "fp32" else "ieee",
        "HEADS_PER_GROUP": 1,
        "CORRECT_DELTA": "distance" in variant.family or "slopes" in variant.family,
        "HAS_LSE_GRADIENT": False,
        "FAR_SUMS": variant.family == "distance",
        "SLOPE_SUMS": "slopes" in variant.family,
        "WRITE_BIAS_GRADIENT": "bias" in variant.family,
        "BATCH_BROADCAST": True,
        "HEADS_BROADCAST": True,
        "SUM_QUERIES": False,
        "SUM_KEYS": False,
    }
    kernel = kernels[variant.kind]
    none = {name: None for name, flag in OPTIONAL.items() if not values.get(flag, False)}
    chosen = {name: value for name, value in (values | none).items() if name in kernel.arg_names}
    return kernel, chosen, {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}


def compile_variant(variant: Variant) -> dict[str, Any]:
    """Compile a variant; return its registers, spills, shared memory and instruction counts."""
    kernel, chosen, options = constants(variant)
    row, code = compile_kernel(
        kernel,
        lambda name: TYPES.get(name, f"*{variant.dtype}" if name.endswith("_pointer") else "i32"),
        chosen,
        lambda name: name.startswith("stride_"),
        variant.capability,
        options,
    )
    return variant._asdict() | row | {"wgmma": code.count("wgmma.mma_async")}


def compiled(which: str) -> list[dict[str, Any]]:
    """Compile all variants and return their rows."""
    return [compile_variant(variant) for variant in variants(which)]


if __name__ == "__main__":
    print(*map(json.dumps, compiled(sys.argv[1])), sep="\n")
