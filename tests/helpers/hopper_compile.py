"""Compile the Hopper kernels of flash attention for sm_90 without a GPU; prints JSON lines, one per variant.

Must run in its own process, because kernels imported under TRITON_INTERPRET=1 cannot be compiled.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from offline_compile import disassembly, resources


def variants() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (name, kernel, constexprs) of each kernel as launched by `hopper/launchers.py`."""
    from stoker.kernels.attention.backend_support import ATOMIC_BACKWARD_FROM, FUSED_BACKWARD_FROM
    from stoker.kernels.attention.flash.hopper import launchers

    for head_dim in (64, 128, 256):
        for causal in (False, True):
            constants = {"HEAD_DIM": head_dim, "CAUSAL": causal, "MERGE": causal}
            yield "lse", launchers.hopper_lse, constants | launchers._LSE[head_dim].constants()
            for bias in ("none", "distance", "slopes") if head_dim <= 128 else ("none",):
                distance, slopes = bias == "distance", bias == "slopes"
                shared = {"HEAD_DIM": head_dim, "CAUSAL": causal, "HAS_DISTANCE": distance, "HAS_SLOPE": slopes}
                apart = {"SEPARATE_OUT": head_dim <= 128}
                packed = (False, True) if causal and bias == "none" and head_dim <= 128 else (False,)
                for blocks in {launchers._FORWARD[head_dim], launchers._FORWARD_FULL[head_dim]}:
                    if blocks.consumers == 3 and (causal or slopes):
                        continue
                    constants = {"CONSUMERS": blocks.consumers} | blocks.constants()
                    for sinks, documents in itertools.product((False, True), packed):
                        options = {"HAS_SINK": sinks, "DOCUMENTS": documents}
                        if not (sinks and (documents or bias != "none")):
                            yield "forward", launchers.hopper_forward, shared | apart | constants | options
                sums = {"FAR_SUMS": distance and not causal, "SLOPE_SUMS": slopes}
                sums |= {"CORRECT_DELTA": distance or slopes, "HAS_LSE_GRADIENT": causal}
                sums |= {"ROW_STATISTICS": head_dim <= 128 and not slopes}
                sums |= apart | (launchers._DQ_SLOPES if slopes else launchers._DQ)[head_dim].constants()
                blocks = (launchers._DKDV_DISTANCE if distance else launchers._DKDV)[head_dim]
                for documents in packed:
                    options = shared | {"DOCUMENTS": documents}
                    yield "dq", launchers.hopper_dq, options | sums
                    yield "dkdv", launchers.hopper_dkdv, options | {"DIAGONALS": distance} | blocks.constants()
            for ordered, fewest in ((True, FUSED_BACKWARD_FROM), (False, ATOMIC_BACKWARD_FROM)):
                if (head_dim, causal) not in fewest:
                    continue
                blocks = launchers._FUSED[head_dim]
                constants = {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys, "STAGES": blocks.stages}
                constants |= {"HEAD_DIM": head_dim, "CAUSAL": causal, "ORDERED": ordered}
                yield "fused", launchers.hopper_fused_backward, constants
    blocks = launchers._SHORT
    constants = {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys, "STAGES": blocks.stages}
    yield "short", launchers.hopper_short_backward, {"HEAD_DIM": 64} | constants


def compile_variant(name: str, kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Compile a variant; return its registers, spills, shared memory and instruction counts.

    `awaited` counts the wgmma instructions that are waited for at once. ptxas does that to all of them where it finds
    that their registers do not suffice, without a word. `vector_stores` counts those of 8 or 16 bytes by a thread.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from stoker.kernels.attention.flash.hopper import launchers

    block = {"k": constants["BLOCK_N"], "v": constants["BLOCK_N"]}
    types, aligned = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        name_stem, _, kind = argument.rpartition("_")
        if argument in constants:
            types[argument] = "constexpr"
        elif kind == "descriptor" and name_stem in ("lse", "delta"):
            types[argument] = f"tensordesc<fp32[1, {constants['BLOCK_M']}],{launchers._ROW!r}>"
        elif argument == "sums_descriptor":
            types[argument] = f"tensordesc<fp32[1, 64, 1, 64],{launchers._SUMS!r}>"
        elif argument == "dq_descriptor" and name in ("fused", "short"):
            types[argument] = f"tensordesc<bf16[1, 64, 1, 64],{launchers._TILE!r}>"
        elif kind == "descriptor":
            rows = block.get(name_stem, constants["BLOCK_M"])
            types[argument] = f"tensordesc<bf16[1, {rows}, 1, {constants['HEAD_DIM']}],{launchers._TILE!r}>"
        elif kind == "pointer":
            dtypes = {"bf16": ("out", "dk", "dv"), "i32": ("order", "turns", "begins", "ends")}
            types[argument] = "*" + next((dtype for dtype, of in dtypes.items() if name_stem in of), "fp32")
            aligned[(index,)] = [["tt.divisibility", 16]]
        else:
            types[argument] = "fp32" if argument.startswith("scale") else "i32"
    constexprs = {
        (kernel.arg_names.index(constant),): value for constant, value in constants.items() if types.get(constant)
    }
    source = GluonASTSource(kernel, types, constexprs, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    row = {"kernel": name, **constants} | resources(compiled.asm["cubin"]) | {"shared": compiled.metadata.shared}
    waits = re.findall(r"HGMMA|WARPGROUP\.DEPBAR", disassembly(compiled.asm["cubin"]))
    return row | {
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "awaited": sum(pair == ("HGMMA", "WARPGROUP.DEPBAR") for pair in itertools.pairwise(waits)),
        "vector_stores": len(re.findall(r"st\.global\.v[24]\.b32", compiled.asm["ptx"])),
        "triton": triton.__version__,
    }


def compiled() -> list[dict[str, Any]]:
    """Compile all variants and return their rows."""
    return [compile_variant(*variant) for variant in variants()]


if __name__ == "__main__":
    print(*map(json.dumps, compiled()), sep="\n")
