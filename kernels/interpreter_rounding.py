"""Rounding to bf16 that is the same in the interpreter of Triton, which cuts off, as on a GPU."""

from __future__ import annotations

from .launch import HAS_TRITON, INTERPRETED, jit, tl

_INTERPRETED = tl.constexpr(INTERPRETED) if HAS_TRITON else False


@jit
def rounded(value, dtype: tl.constexpr):
    """`value` (fp32 or fp64) in `dtype`, rounded to the nearest, ties to even."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        near = ((bits + 0x7FFF + odd) & 0xFFFF0000).to(tl.float32, bitcast=True)
        value = tl.where(value == value, near, value)
    return value.to(dtype)
