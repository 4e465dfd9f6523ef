"""Launches of the grouped fp8 matmuls for Hopper, for operands that `uses_hopper` accepts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.flash.hopper.supported_calls import has_gluon, is_hopper
from ..launch import INTERPRETED
from ..moe.tile_map import find_tiles
from .operands import Quantized
from .recipe import TILE, Granularity


class HopperTile(NamedTuple):
    """Rows and columns of a tile of the result, pipeline stages of both operands, and row tiles of a band."""

    rows: int
    columns: int
    stages: int
    band: int = 8

    def constants(self) -> dict[str, int]:
        """Return the constexpr arguments of the kernel."""
        names = ("BLOCK_M", "BLOCK_N", "STAGES", "GROUP_M")
        return dict(zip(names, self, strict=True)) | {"BLOCK_K": TILE}


def hopper_tile(*, outer: bool, fast_accumulation: bool) -> HopperTile:
    """Return the tile of a product of rows, or of gradients of matrices (`outer`).

    Where the tensor cores do not add all products, two sums share the registers.
    """
    if fast_accumulation:
        return HopperTile(128, 256, 3)
    return HopperTile(256, 128, 4) if outer else HopperTile(128, 128, 5)


def uses_hopper(a: Quantized, b: Quantized, out_dtype: torch.dtype, multiple: int, *widths: int) -> bool:
    """Return True if the kernels for Hopper multiply these.

    Args:
        a: left operand.
        b: right operand.
        out_dtype: dtype of the result.
        multiple: a divisor of the rows of all experts.
        widths: the other dimensions of the matrices of an expert.
    """
    if INTERPRETED or not a.data.is_cuda or not has_gluon() or not is_hopper(a.data.device):
        return False
    return supports_product((a.granularity, b.granularity), out_dtype, multiple, *widths)


def supports_product(granularities: Iterable[Granularity], out_dtype: torch.dtype, *sizes: int) -> bool:
    """Return True if the kernels for Hopper have such operands, results and sizes, see `uses_hopper`."""
    scaled_after = all(each in ("tensor", "row") for each in granularities)
    return scaled_after and out_dtype in (torch.bfloat16, torch.float16) and not any(size % TILE for size in sizes)


def _launch(
    a: Quantized, b: Quantized, out: Tensor, largest: Tensor, tables: tuple[Tensor, Tensor, Tensor, Tensor],
    sizes: tuple[int, int, int, int], tile: HopperTile, constants: dict[str, Any],
) -> None:  # fmt: skip
    from triton.experimental.gluon import language as gl

    from ..attention.flash.hopper.launch_cache import TileDescriptor, launch_kernel
    from .hopper_grouped import hopper_grouped_kernel

    def tiles(matrix: Tensor, rows: int, columns: int) -> TileDescriptor:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * matrix.element_size(), rank=2)
        return TileDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)

    height, width, depth, experts = sizes
    processors = torch.cuda.get_device_properties(out.device).multi_processor_count
    dtypes = a.data.dtype, b.data.dtype, out.dtype
    with torch.cuda.device(out.device):
        launch_kernel(hopper_grouped_kernel, processors, dtypes, out.device, dict(
            a_descriptor=tiles(a.data, 64, TILE),
            b_descriptor=tiles(b.data, tile.columns, TILE),
            out_descriptor=tiles(out, 64, tile.columns),
            a_scale_pointer=a.scale,
            b_scale_pointer=b.scale,
            row_amax_pointer=largest,
            ends_pointer=tables[0],
            experts_pointer=tables[1],
            rows_pointer=tables[2],
            count_pointer=tables[3],
            height=height,
            width=width,
            depth=depth,
            experts=experts,
            A_SCALES=a.granularity,
            B_SCALES=b.granularity,
            EVEN_WIDTH=width % tile.columns == 0,
            **constants,
            **tile.constants(),
        ))  # fmt: skip


def hopper_grouped_fp8(
    a: Quantized, b: Quantized, ends: Tensor, width: int, out_dtype: torch.dtype, *, fast_accumulation: bool = False,
    row_amax: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel for `grouped_scaled_matmul`."""
    rows, depth = a.data.shape
    out = a.data.new_empty(rows, width, dtype=out_dtype)
    largest = a.data.new_zeros(rows * row_amax, dtype=torch.int32)
    if out.numel():
        tile = hopper_tile(outer=False, fast_accumulation=fast_accumulation)
        found = find_tiles(ends, rows, tile.rows)
        tables = ends, found.experts, found.rows, found.num_tiles
        constants = {"FAST": fast_accumulation, "ROW_AMAX": row_amax, "OUTER": False}
        constants["STACKED"] = b.data.shape[1] == depth
        _launch(a, b, out, largest, tables, (rows, width, depth, ends.shape[0]), tile, constants)
    return out, largest.view(torch.float32)


def hopper_grouped_fp8_outer(
    a: Quantized, b: Quantized, ends: Tensor, out_dtype: torch.dtype, *, fast_accumulation: bool = False
) -> Tensor:
    """Launch the kernel for `grouped_scaled_outer`."""
    height, width, experts = a.data.shape[0], b.data.shape[0], ends.shape[0]
    out = a.data.new_empty(experts * height, width, dtype=out_dtype)
    if out.numel():
        tile = hopper_tile(outer=True, fast_accumulation=fast_accumulation)
        found = find_tiles(ends, a.data.shape[1], TILE)
        tables = ends, found.experts_by_load, found.rows, found.num_tiles
        constants = {"FAST": fast_accumulation, "ROW_AMAX": False, "OUTER": True, "STACKED": True}
        _launch(a, b, out, ends, tables, (height, width, 0, experts), tile, constants)
    return out.view(experts, height, width)
