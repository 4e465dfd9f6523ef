"""Round to nearest in Triton kernels; Triton's interpreter truncates to bf16 where a GPU rounds."""

from __future__ import annotations

from .launch import HAS_TRITON, INTERPRETED, jit, tl

_INTERPRETED = tl.constexpr(INTERPRETED) if HAS_TRITON else False


@jit
def rounded(value, dtype: tl.constexpr):
    """Cast `value` (fp32 or fp64) to `dtype`, rounding to nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        nearest = ((bits + 0x7FFF + odd) & 0xFFFF0000).to(tl.float32, bitcast=True)
        value = tl.where(value == value, nearest, value)  # the carry would turn some NaNs into infinity
    return value.to(dtype)
