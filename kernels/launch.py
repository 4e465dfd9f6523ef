"""The only helpers the kernel files share: Triton where the platform has it, and when to use it."""

from __future__ import annotations

import os
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # macOS, Windows: the plain torch path of every operation remains
    HAS_TRITON = False

    class _NoTriton:
        """Stands in for the module so that kernel files import; nothing launches without Triton."""

        @staticmethod
        def jit(function: Any = None, **_: Any) -> Any:
            return function or (lambda decorated: decorated)

        def __getattr__(self, name: str) -> Any:
            return None

    triton: Any = _NoTriton()
    tl: Any = _NoTriton()

jit: Any = triton.jit  # untyped: a kernel is called with grid and launch options that its signature does not show

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_runs_on(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernel of an operation serves `tensor`: on CUDA, Triton present and compiling, not fp64.

    The kernels compute in fp32; fp64 tensors are there to be exact and take the plain torch path.
    """
    return HAS_TRITON and not INTERPRETED and tensor.is_cuda and tensor.dtype != torch.float64


def sums_wide(*widths: int) -> bool:
    """Whether cuBLAS multiplies 16-bit matrices of these widths into fp32: it wants rows of a multiple of 16 bytes."""
    return not any(width % 8 for width in widths)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n` (n >= 1)."""
    return 1 << (n - 1).bit_length()
