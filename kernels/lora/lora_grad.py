"""Both low-rank gradients of a LoRA layer from one pass over its output gradient.

Besides the large GEMM, the output gradient g (n, out) is needed twice: for g B, (n, r), and g^T (x A^T), (out, r). Both
are bound by reading g, which the fused kernel does once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import jit, next_power_of_2, rounded, tl, triton

MAX_RANK = 64
"""Largest rank whose accumulators fit in registers."""
MAX_PARTS = 3
"""Most parts of a fused projection: queries, keys, values."""


class Tile(NamedTuple):
    """Tile of a kernel and its launch options.

    Attributes:
        rows: rows of the wide tensor in a tile.
        columns: columns of the wide tensor in a tile.
        warps: warps per program.
        stages: pipeline stages.
        programs: most programs when rows are split into chunks: 2 or 4 for each of 132 multiprocessors, since each
            chunk adds a partial sum to reduce.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int = 264

    def launch_options(self, rank: int) -> dict[str, int]:
        """Return constants and launch options for LoRA matrices of this rank."""
        # tl.dot needs at least 16 columns
        blocks = {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_R": max(16, next_power_of_2(rank))}
        return {"RANK": rank, **blocks, "num_warps": self.warps, "num_stages": self.stages}

    def row_chunks(self, rows: int, blocks: int) -> tuple[int, int]:
        """Return the number of row chunks, given the number of column blocks, and the rows of a chunk (whole tiles)."""
        size = triton.cdiv(triton.cdiv(rows, max(1, self.programs // blocks)), self.rows) * self.rows
        return triton.cdiv(rows, size), size


def choose_tile(rank: int, columns: int) -> Tile:
    """Return the tile of `lora_gradients_kernel`, wider for many columns, whose blocks each add a partial sum."""
    if rank <= 16 and columns >= 8192:
        return Tile(16, 512, 4, 3)
    return Tile(32, 256, 8, 3) if rank <= 32 else Tile(64, 128, 4, 2)


# ---------------------------------------------------------------- Triton


@jit
def select_part(part, first, second, third):
    """Return the value of part 0, 1 or 2."""
    return tl.where(part == 0, first, tl.where(part == 1, second, third))


@jit
def lora_gradients_kernel(
    gradient_pointer, lora_b_pointer, low_pointer, low_gradient_pointer, lora_b_gradient_pointer,
    rows, columns, chunk_rows, gradient_stride, low_stride, second_column, third_column, second_block, third_block,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Process BLOCK_N columns of one part in a chunk of rows per program.

    gradient (rows, columns), lora_b (columns, RANK), low = x A^T (rows, parts RANK). Written, as partial sums in fp32:
    low_gradient (column blocks, rows, RANK), lora_b_gradient (row chunks, columns, RANK). The second part starts at
    second_column and block second_block, the third likewise; absent parts start at the end.
    """
    block, chunk = tl.program_id(0), tl.program_id(1)
    part = (block >= second_block).to(tl.int32) + (block >= third_block).to(tl.int32)
    begin = select_part(part, 0, second_column, third_column)
    end = select_part(part, second_column, third_column, columns)
    column = begin + (block - select_part(part, 0, second_block, third_block)) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, BLOCK_R)
    inside, in_rank = column < end, rank < RANK
    matrix = inside[:, None] & in_rank[None, :]
    lora_b = tl.load(lora_b_pointer + column[:, None] * RANK + rank[None, :], mask=matrix, other=0.0)
    lora_b_gradient = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    first = chunk * chunk_rows
    for start in range(first, min(first + chunk_rows, rows), BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        exists = row < rows
        row = row.to(tl.int64)
        tile = exists[:, None] & inside[None, :]
        gradient = tl.load(gradient_pointer + row[:, None] * gradient_stride + column[None, :], mask=tile, other=0.0)
        narrow = exists[:, None] & in_rank[None, :]
        low_column = part * RANK + rank
        low = tl.load(low_pointer + row[:, None] * low_stride + low_column[None, :], mask=narrow, other=0.0)
        low_gradient = tl.dot(gradient, lora_b, input_precision="ieee")
        place = (block.to(tl.int64) * rows + row)[:, None] * RANK + rank[None, :]
        tl.store(low_gradient_pointer + place, low_gradient, mask=narrow)
        lora_b_gradient = tl.dot(tl.trans(gradient), low, lora_b_gradient, input_precision="ieee")
    place = (chunk * columns + column)[:, None] * RANK + rank[None, :]
    tl.store(lora_b_gradient_pointer + place, lora_b_gradient, mask=matrix)


@jit
def sum_kernel(
    partial_pointer, factors_pointer, sum_pointer, scaled_pointer, pieces, size, scale, second, third, width,
    FACTORS: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce one part of partial (pieces, size) over its pieces, times scale, for BLOCK columns per program.

    The pieces of the second part start at `second`, those of the third at `third`. sum: (size / width, PARTS, width);
    with FACTORS, factors: (size / width,) and scaled = sum * factors.
    """
    part = tl.program_id(1)
    first, end = select_part(part, 0, second, third), select_part(part, second, third, pieces)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = first + tl.arange(0, PIECES)
    inside = column < size
    mask = (piece < end)[:, None] & inside[None, :]
    partial = tl.load(partial_pointer + piece.to(tl.int64)[:, None] * size + column[None, :], mask=mask, other=0.0)
    total = tl.sum(partial, axis=0) * scale
    place = column
    if PARTS > 1:
        place = (column // width * PARTS + part) * width + column % width
    element = sum_pointer.dtype.element_ty
    tl.store(sum_pointer + place, rounded(total, element), mask=inside)
    if FACTORS:
        total = total * tl.load(factors_pointer + column // width, mask=inside, other=0.0)
        tl.store(scaled_pointer + place, rounded(total, element), mask=inside)


def part_offsets(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the offsets of the second and the third part; those of absent parts are the end."""
    return sizes[0], sum(sizes[:2])


def scaled_sums(
    partial: Tensor, scale: float, dtype: torch.dtype, parts: Sequence[int], factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `scale * partial.sum(0)` of each part, in a fixed order of summation, rounded once to `dtype`.

    Args:
        partial: (pieces, n, width), fp32, contiguous.
        scale: factor of the sums.
        dtype: dtype of the sums.
        parts: number of pieces of each part, up to `MAX_PARTS`; each part is summed separately.
        factors: fp32 (n, 1), or None.

    Returns:
        Sums (n, parts * width), and sums times factors, or the sums themselves without factors.
    """
    _, rows, width = partial.shape
    pieces = next_power_of_2(max(parts))
    total = partial.new_empty(rows, len(parts) * width, dtype=dtype)
    scaled = total if factors is None else torch.empty_like(total)
    block = max(64, 4096 // pieces)
    sum_kernel[(triton.cdiv(rows * width, block), len(parts))](
        partial, factors, total, scaled, len(partial), rows * width, scale, *part_offsets(parts), width,
        FACTORS=factors is not None, PARTS=len(parts), PIECES=pieces, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return total, scaled


def scaled_sum(partial: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return `scale * partial.sum(0)`, (n, width), as in `scaled_sums` with a single part."""
    return scaled_sums(partial, scale, dtype, [len(partial)])[0]


def triton_lora_gradients(
    gradient: Tensor, lora_b: Tensor, low: Tensor, scale: float, parts: Sequence[int], factors: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels.

    Args:
        gradient: output gradient, (n, out); may be columns of a wider tensor.
        lora_b: LoRA's B, (out, r), contiguous.
        low: low-rank activation x A^T, (n, parts * r), r columns per part; may be columns of a wider tensor.
        scale: factor of both results.
        parts: columns of `gradient` in each part, up to `MAX_PARTS`.
        factors: fp32 (n, 1), or None.

    Returns:
        For each part `scale * gradient @ lora_b`, together (n, parts * r), and `scale * gradient^T @ low`, (out, r), in
        the dtype of `low`; the third is the first times `factors`, or the first itself without factors.
    """
    (rows, columns), rank = gradient.shape, lora_b.shape[1]
    tile = choose_tile(rank, columns)
    blocks = [triton.cdiv(part, tile.columns) for part in parts]
    chunks, chunk_rows = tile.row_chunks(rows, sum(blocks))
    low_gradient = gradient.new_empty(sum(blocks), rows, rank, dtype=torch.float32)
    lora_b_gradient = gradient.new_empty(chunks, columns, rank, dtype=torch.float32)
    lora_gradients_kernel[(sum(blocks), chunks)](
        gradient, lora_b, low, low_gradient, lora_b_gradient,
        rows, columns, chunk_rows, gradient.stride(0), low.stride(0),
        *part_offsets(parts), *part_offsets(blocks), **tile.launch_options(rank),
    )  # fmt: skip
    sums, scaled = scaled_sums(low_gradient, scale, low.dtype, blocks, factors)
    return sums, scaled_sum(lora_b_gradient, scale, low.dtype), scaled
