"""Optional import of Triton and helpers shared by the kernel files."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # macOS, Windows: every operation falls back to plain PyTorch
    HAS_TRITON = False

    class _NoTriton:
        """Stub of the Triton modules that lets the kernel files be imported; no kernel is launched without Triton."""

        @staticmethod
        def jit(function: Any = None, **_: Any) -> Any:
            return function or (lambda decorated: decorated)

        def __getattr__(self, name: str) -> Any:
            return None

    triton: Any = _NoTriton()
    tl: Any = _NoTriton()

Function = TypeVar("Function", bound=Callable[..., Any])
jit: Any = triton.jit  # untyped: kernels are launched with a grid and options that are not in their signatures

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"


def disable_compile(function: Function) -> Function:
    """Exclude a function from torch.compile: third-party extensions cannot be traced and may synchronize."""
    return cast("Function", torch.compiler.disable(function))


def triton_runs_on(tensor: torch.Tensor) -> bool:
    """Return True if Triton kernels support `tensor`: on CUDA, not fp64, Triton installed and not interpreting.

    The kernels compute in fp32; fp64 tensors, used where exactness matters, fall back to plain PyTorch.
    """
    return HAS_TRITON and not INTERPRETED and tensor.is_cuda and tensor.dtype != torch.float64


def supports_fp32_output(*widths: int) -> bool:
    """Return True if cuBLAS supports fp32 output for 16-bit matrices of these widths (rows of 16-byte multiples)."""
    return not any(width % 8 for width in widths)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n` (n >= 1)."""
    return 1 << (n - 1).bit_length()


_INTERPRETED_IN_KERNEL: Any = tl.constexpr(INTERPRETED) if HAS_TRITON else False


@jit
def rounded(value, dtype: tl.constexpr):  # pyright: ignore[reportInvalidTypeForm]
    """Cast `value` (fp32 or fp64) to `dtype`, rounding to nearest, ties to even; the interpreter truncates to bf16."""
    if _INTERPRETED_IN_KERNEL and dtype == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        nearest = ((bits + 0x7FFF + odd) & 0xFFFF0000).to(tl.float32, bitcast=True)
        value = tl.where(value == value, nearest, value)  # the carry would turn some NaNs into infinity
    return value.to(dtype)
