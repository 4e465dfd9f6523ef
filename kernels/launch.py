"""Optional import of Triton and helpers shared by the kernel files."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    gdc_launch_dependents: Any = None
    gdc_wait: Any = None

Function = TypeVar("Function", bound=Callable[..., Any])
jit: Any = triton.jit  # untyped: kernels are launched with a grid and options that are not in their signatures

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"


def constant(value: Any) -> Any:
    """Return a constant of a module that kernels may read."""
    return tl.constexpr(value) if HAS_TRITON else value


def disable_compile(function: Function) -> Function:
    """Exclude a function from torch.compile: third-party extensions cannot be traced and may synchronize."""
    return cast("Function", torch.compiler.disable(function))


def triton_runs_on(tensor: torch.Tensor) -> bool:
    """Return True if Triton kernels support `tensor`: on CUDA, not fp64, Triton installed and not interpreting.

    The kernels compute in fp32; fp64 tensors, used where exactness matters, fall back to plain PyTorch.
    """
    return HAS_TRITON and not INTERPRETED and tensor.is_cuda and tensor.dtype != torch.float64


def device_capability(device: torch.device) -> int | None:
    """Return the compute capability of a device, 90 for sm_90; None in the interpreter."""
    if INTERPRETED:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def pdl_options(device: torch.device) -> dict[str, Any]:
    """Return options of the launch of a kernel that calls `pdl_wait`: PDL on Hopper and later GPUs."""
    is_nvidia = torch.version.cuda is not None and not INTERPRETED
    if is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}  # `launch_pdl` is unknown to other backends of Triton


def supports_fp32_output(*widths: int) -> bool:
    """Return True if cuBLAS supports fp32 output for 16-bit matrices of these widths (rows of 16-byte multiples)."""
    return not any(width % 8 for width in widths)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n` (n >= 1)."""
    return 1 << (n - 1).bit_length()


@jit
def pdl_wait(PDL: tl.constexpr):
    """Programmatic dependent launch (PDL): let the next kernel start now, then wait until all previous ones are done.

    The programs of a kernel start while the previous kernel runs, so the latency of the launch is hidden. The wait ends
    when the previous kernel is complete and its writes are visible. As that one waited too, so is every kernel before
    it: after the wait, memory is as in a launch without PDL. Call it before any load or store but loads of weights.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


_INTERPRETED_IN_KERNEL = constant(INTERPRETED)


@jit
def rounded(value, dtype: tl.constexpr):
    """Cast `value` (fp32 or fp64) to `dtype`, rounding to nearest, ties to even; the interpreter truncates to bf16."""
    if _INTERPRETED_IN_KERNEL and dtype == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        nearest = ((bits + 0x7FFF + odd) & 0xFFFF0000).to(tl.float32, bitcast=True)
        value = tl.where(value == value, nearest, value)  # the carry would turn some NaNs into infinity
    return value.to(dtype)
