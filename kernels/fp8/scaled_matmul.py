"""Products of fp8 matrices, scaled to their values: torch's scaled matmul on a GPU, emulated elsewhere.

Scales of tiles and blocks, which cuBLAS knows on sm_90 for whole blocks, are else a grouped matmul of one group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_op import custom_op
from ..launch import triton_runs_on
from .grouped import triton_grouped_fp8
from .operands import Quantized, dequantize
from .recipe import TILE, Granularity

_torch_scaled_mm: Any = torch._scaled_mm


@custom_op("stoker::fp8_scaled_matmul")
def _scaled_matmul(
    a: Tensor, a_scale: Tensor, a_granularity: str, b: Tensor, b_scale: Tensor, b_granularity: str,
    out_dtype: torch.dtype, fast_accumulation: bool,
) -> Tensor:  # fmt: skip
    left, right = Quantized(a, a_scale, a_granularity), Quantized(b, b_scale, b_granularity)  # pyrefly: ignore[bad-argument-type]
    if not (a.numel() and b.numel()):
        return a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
    if a.is_cuda and out_dtype != torch.float64:
        if _torch_multiplies(left, right):
            return _by_torch(left, right, out_dtype, fast_accumulation)
        if triton_runs_on(a) and left.granularity == "tile":
            ends = torch.full((1,), a.shape[0], dtype=torch.int32, device=a.device)
            return triton_grouped_fp8(left, right, ends, b.shape[0], out_dtype)[0]
    return emulated_matmul(left, right, out_dtype)


@torch.library.register_fake("stoker::fp8_scaled_matmul")
def _(
    a: Tensor, a_scale: Tensor, a_granularity: str, b: Tensor, b_scale: Tensor, b_granularity: str,
    out_dtype: torch.dtype, fast_accumulation: bool,
) -> Tensor:  # fmt: skip
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def emulated_matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """Return the product of the values in fp32 (fp64), any device."""
    dtype = torch.promote_types(out_dtype, torch.float32)
    return (dequantize(a, dtype) @ dequantize(b, dtype).t()).to(out_dtype)


def has_scaled_matmul(device: torch.device, granularity: Granularity) -> bool:
    """Return True if torch multiplies fp8 matrices on a CUDA device: sm_89 or later, tiles and blocks on sm_90 only."""
    capability = torch.cuda.get_device_capability(device)
    return capability[0] == 9 if granularity in ("tile", "block") else capability >= (8, 9)


def _torch_multiplies(a: Quantized, b: Quantized) -> bool:
    """Return True if torch multiplies these; with scales of tiles cuBLAS takes whole blocks of e4m3 only."""
    if not has_scaled_matmul(a.data.device, a.granularity):
        return False
    if a.granularity in ("tensor", "row"):
        return True
    whole = b.data.shape[1] % TILE == 0 and a.data.shape[0] % 16 == 0
    return whole and a.data.dtype == b.data.dtype == torch.float8_e4m3fn


def _by_torch(a: Quantized, b: Quantized, out_dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    if a.granularity in ("tensor", "row"):
        scale = b.scale if b.granularity == "tensor" else b.scale.t()
        return _torch_scaled_mm(
            a.data, b.data.t(), a.scale, scale, out_dtype=out_dtype, use_fast_accum=fast_accumulation
        )
    recipes = {"tile": F.ScalingType.BlockWise1x128, "block": F.ScalingType.BlockWise128x128}
    operands = []
    for matrix in (a, b):
        scale = matrix.scale
        if matrix.granularity == "block":  # with its padding, blocks along the contraction first
            padded = -(-scale.shape[1] // 4) * 4
            scale = scale.as_strided((padded, scale.shape[0]), (1, padded))
        operands.append((scale, recipes[matrix.granularity]))
    (a_scale, a_recipe), (b_scale, b_recipe) = operands
    return F.scaled_mm(a.data, b.data.t(), a_scale, a_recipe, b_scale, b_recipe, output_dtype=out_dtype)


def scaled_matmul(a: Quantized, b: Quantized, out_dtype: torch.dtype, *, fast_accumulation: bool = False) -> Tensor:
    """Return a @ b^T of the values of two fp8 matrices.

    Args:
        a: (M, K); e5m2 with an e4m3 `b`, or the other way round, or both e4m3.
        b: (N, K); on a GPU M may be any number, N and K must be multiples of 16.
        out_dtype: dtype of the result; fp64 is computed in fp64, exactly what the rounded operands give.
        fast_accumulation: see `Fp8Recipe.fast_accumulation_backward`.

    Returns:
        (M, N). Not differentiable.

    Raises:
        ValueError: shapes do not match.
    """
    if a.data.shape[1] != b.data.shape[1]:
        raise ValueError(f"`a` {tuple(a.data.shape)} and `b` {tuple(b.data.shape)} must be (M, K) and (N, K).")
    return _scaled_matmul(*a, *b, out_dtype, fast_accumulation)
