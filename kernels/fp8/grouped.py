"""Grouped matmuls in fp8: rows sorted by expert times the matrix of their expert, and its gradient, without host syncs.

R rows, E experts; expert e has the rows from ends[e - 1] to ends[e]. The gradients of the matrices contract rows, which
fp8 operands hold along their own rows: experts begin at multiples of 16 rows (`expert_rows`). At multiples of 128 the
kernels for Hopper run (`hopper_grouped`), else Triton's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..custom_op import custom_op
from ..launch import INTERPRETED, device_capability, triton, triton_runs_on
from ..moe.grouped_matmul import _programs
from ..moe.tile_configs import has_few_rows
from ..moe.tile_map import find_tiles
from .grouped_kernels import grouped_fp8_kernel, grouped_fp8_outer_kernel, grouped_tile
from .hopper_launch import hopper_grouped_fp8, hopper_grouped_fp8_outer, uses_hopper
from .operands import Quantized, dequantize, row_multiple
from .recipe import TILE
from .reference import reference_amax

# ---------------------------------------------------------------- Triton


def triton_grouped_fp8(
    a: Quantized, b: Quantized, ends: Tensor, width: int, out_dtype: torch.dtype, *, fast_accumulation: bool = False,
    row_amax: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel of `grouped_scaled_matmul`."""
    rows, depth = a.data.shape
    experts = ends.shape[0]
    stacked = b.data.shape[1] == depth  # else side by side
    out = a.data.new_empty(rows, width, dtype=out_dtype)
    largest = a.data.new_zeros(rows * row_amax, dtype=torch.int32)
    if not out.numel():
        return out, largest.view(torch.float32)
    capability = device_capability(a.data.device)
    few_rows = has_few_rows(rows, experts)
    tile = grouped_tile(
        "rows", a.granularity, capability, fast_accumulation=fast_accumulation, few_rows=few_rows
    )  # fmt: skip
    tiles = find_tiles(ends, rows, tile["BLOCK_M"])
    grid = (_programs(out.device, len(tiles.experts) * triton.cdiv(width, tile["BLOCK_N"]), 1),)
    block_stride = b.scale.stride(0)
    scale_stride = {"tensor": 0, "tile": 0, "row": width if stacked else 0, "block": 0}[b.granularity]
    if b.granularity == "block":
        scale_stride = width // TILE * block_stride if stacked else depth // TILE
    grouped_fp8_kernel[grid](
        a.data, b.data, a.scale, b.scale, out, largest, ends, tiles.experts, tiles.rows, tiles.num_tiles,
        rows, experts, width, depth, width * depth if stacked else depth, b.data.stride(0), scale_stride, block_stride,
        A_SCALES=a.granularity, B_SCALES=b.granularity, FAST=fast_accumulation, ROW_AMAX=row_amax,
        EVEN_DEPTH=depth % tile["BLOCK_K"] == 0, EVEN_WIDTH=width % tile["BLOCK_N"] == 0,
        enable_fp_fusion=True, **tile,
    )  # fmt: skip
    return out, largest.view(torch.float32)


def triton_grouped_fp8_outer(
    a: Quantized, b: Quantized, ends: Tensor, out_dtype: torch.dtype, *, fast_accumulation: bool = False
) -> Tensor:
    """Launch the kernel of `grouped_scaled_outer`."""
    height, width = a.data.shape[0], b.data.shape[0]
    out = a.data.new_empty(ends.shape[0], height, width, dtype=out_dtype)
    if not out.numel():
        return out
    capability = device_capability(a.data.device)
    tile = grouped_tile("outer", a.granularity, capability, fast_accumulation=fast_accumulation)
    heaviest = find_tiles(ends, a.data.shape[1], TILE).experts_by_load
    grid = (ends.shape[0] * triton.cdiv(height, tile["BLOCK_M"]) * triton.cdiv(width, tile["BLOCK_N"]),)
    grouped_fp8_outer_kernel[grid](
        a.data, b.data, a.scale, b.scale, out, ends, heaviest, height, width, a.data.stride(0), b.data.stride(0),
        A_SCALES=a.granularity, FAST=fast_accumulation,
        EVEN_HEIGHT=height % tile["BLOCK_M"] == 0, EVEN_WIDTH=width % tile["BLOCK_N"] == 0,
        MULTIPLE=row_multiple(a.granularity), enable_fp_fusion=True, **tile,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- custom operations


def _use_triton(tensor: Tensor, out_dtype: torch.dtype) -> bool:
    return (triton_runs_on(tensor) or (INTERPRETED and tensor.is_cpu)) and out_dtype != torch.float64


def _expert_matrices(b: Quantized, experts: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Return the values of the matrices, (E, N, K)."""
    values = dequantize(b, dtype)
    return (
        values.view(experts, -1, depth)
        if b.data.shape[1] == depth
        else values.unflatten(1, (experts, depth)).transpose(0, 1)
    )


@custom_op("stoker::fp8_grouped_matmul")
def _grouped(
    a: Tensor, a_scale: Tensor, a_granularity: str, b: Tensor, b_scale: Tensor, b_granularity: str, ends: Tensor,
    width: int, out_dtype: torch.dtype, fast_accumulation: bool, multiple: int, row_amax: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    left: Any = Quantized(a, a_scale, a_granularity)  # pyrefly: ignore[bad-argument-type]
    right: Any = Quantized(b, b_scale, b_granularity)  # pyrefly: ignore[bad-argument-type]
    if _use_triton(a, out_dtype):
        hopper = uses_hopper(left, right, out_dtype, multiple, a.shape[1], width)
        launch = hopper_grouped_fp8 if hopper else triton_grouped_fp8
        return launch(left, right, ends, width, out_dtype, fast_accumulation=fast_accumulation, row_amax=row_amax)
    dtype = torch.promote_types(out_dtype, torch.float32)
    rows, matrices = dequantize(left, dtype), _expert_matrices(right, ends.shape[0], a.shape[1], dtype)
    out, first = rows.new_zeros(a.shape[0], width), 0
    for expert, end in enumerate(ends.tolist()):
        out[first:end] = rows[first:end] @ matrices[expert].t()
        first = end
    out = out.to(out_dtype)
    return out, reference_amax(out, "row") if row_amax else out.new_empty(0, dtype=torch.float32)


@torch.library.register_fake("stoker::fp8_grouped_matmul")
def _(
    a: Tensor, a_scale: Tensor, a_granularity: str, b: Tensor, b_scale: Tensor, b_granularity: str, ends: Tensor,
    width: int, out_dtype: torch.dtype, fast_accumulation: bool, multiple: int, row_amax: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    largest = a.new_empty(a.shape[0] * row_amax, dtype=torch.float32)
    return a.new_empty(a.shape[0], width, dtype=out_dtype), largest


@custom_op("stoker::fp8_grouped_outer")
def _outer(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, granularity: str, ends: Tensor, out_dtype: torch.dtype,
    fast_accumulation: bool, multiple: int,
) -> Tensor:  # fmt: skip
    left: Any = Quantized(a, a_scale, granularity)  # pyrefly: ignore[bad-argument-type]
    right: Any = Quantized(b, b_scale, granularity)  # pyrefly: ignore[bad-argument-type]
    if _use_triton(a, out_dtype):
        hopper = uses_hopper(left, right, out_dtype, multiple, a.shape[0], b.shape[0])
        launch = hopper_grouped_fp8_outer if hopper else triton_grouped_fp8_outer
        return launch(left, right, ends, out_dtype, fast_accumulation=fast_accumulation)
    dtype = torch.promote_types(out_dtype, torch.float32)
    wide, deep, first, out = dequantize(left, dtype), dequantize(right, dtype), 0, []
    for end in ends.tolist():
        out.append(wide[:, first:end] @ deep[:, first:end].t())
        first = end
    return torch.stack(out).to(out_dtype)


@torch.library.register_fake("stoker::fp8_grouped_outer")
def _(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, granularity: str, ends: Tensor, out_dtype: torch.dtype,
    fast_accumulation: bool, multiple: int,
) -> Tensor:  # fmt: skip
    return a.new_empty(ends.shape[0], a.shape[0], b.shape[0], dtype=out_dtype)


# ---------------------------------------------------------------- public functions


def grouped_scaled_matmul(
    a: Quantized,
    b: Quantized,
    ends: Tensor,
    width: int,
    out_dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
    multiple: int = 1,
    row_amax: bool = False,
) -> tuple[Tensor, Tensor]:
    """Multiply each row by the transposed matrix of its expert.

    Args:
        a: rows sorted by expert, (R, K).
        b: matrices (N, K) of the experts, stacked (E N, K), or side by side, (N, E K); for `block` scales N or K, along
            which they lie, must be a multiple of 128.
        ends: exclusive end row of each expert, (E,) int32, ascending.
        width: N.
        out_dtype: dtype of the result; fp64 is computed in fp64.
        fast_accumulation: as in `scaled_matmul`.
        multiple: a divisor of R and all ends.
        row_amax: return the largest magnitudes of the rows of the result.

    Returns:
        The result, (R, N), whose rows after ends[-1] are 0, and with `row_amax` the magnitudes, (R,), fp32, else empty.
        Not differentiable.
    """
    assert b.granularity != "block" or (width if b.data.shape[1] == a.data.shape[1] else a.data.shape[1]) % TILE == 0
    return _grouped(*a, *b, ends, width, out_dtype, fast_accumulation, multiple, row_amax)


def grouped_scaled_outer(
    a: Quantized,
    b: Quantized,
    ends: Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accumulation: bool = False,
    multiple: int = 1,
) -> Tensor:
    """Sum a[:, r] b[:, r]^T over the rows r of each expert: (E, M, N), 0 for an expert without rows.

    Args:
        a: transposed rows, (M, R), of experts from `expert_rows.aligned_assignments`.
        b: likewise, (N, R), with scales of the same granularity.
        ends: exclusive end row of each expert, (E,) int32, multiples of `operands.row_multiple`.
        out_dtype: as in `grouped_scaled_matmul`.
        fast_accumulation: as in `scaled_matmul`.
        multiple: as in `grouped_scaled_matmul`.
    """
    return _outer(a.data, a.scale, b.data, b.scale, a.granularity, ends, out_dtype, fast_accumulation, multiple)
