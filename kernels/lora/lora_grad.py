"""Products of a wide gradient with LoRA's narrow matrices, both from one pass over it.

The gradient g (n, out) of a linear layer with a low-rank update is needed twice besides the large product: g B, (n, r),
and g^T (x A^T), (out, r). Each reads all of g to write next to nothing, so the time is that of reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..interpreter_rounding import rounded
from ..launch import jit, next_power_of_2, tl, triton

WIDEST_RANK = 64
"""The largest rank whose sums fit in registers."""
MOST_PARTS = 3
"""Of a fused projection: queries, keys, values."""


class Tile(NamedTuple):
    """What a program of a kernel works on at a time.

    Attributes:
        rows: of the wide tensor.
        columns: likewise.
        warps: of the program.
        stages: tiles that are on their way.
        programs: at most as many are launched, where rows are cut into pieces: 2 or 4 for each of 132 multiprocessors,
            for each piece has partial sums to add.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int = 264

    def options(self, rank: int) -> dict[str, int]:
        """Of a launch, with matrices of a rank."""
        # the smallest tile of a matrix product has 16 columns
        blocks = {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_R": max(16, next_power_of_2(rank))}
        return {"RANK": rank, **blocks, "num_warps": self.warps, "num_stages": self.stages}

    def pieces(self, rows: int, blocks: int) -> tuple[int, int]:
        """Into how many pieces rows are cut for so many blocks of columns, and the rows of a piece: whole tiles."""
        size = triton.cdiv(triton.cdiv(rows, max(1, self.programs // blocks)), self.rows) * self.rows
        return triton.cdiv(rows, size), size


def tile_of(rank: int, columns: int) -> Tile:
    """Of `narrow_products_kernel`; for many columns a wider one, as each block of them has partial sums to add."""
    if rank <= 16 and columns >= 8192:
        return Tile(16, 512, 4, 3)
    return Tile(32, 256, 8, 3) if rank <= 32 else Tile(64, 128, 4, 2)


# ---------------------------------------------------------------- Triton


@jit
def of_part(part, first, second, third):
    """The number that belongs to part 0, 1 or 2."""
    return tl.where(part == 0, first, tl.where(part == 1, second, third))


@jit
def narrow_products_kernel(
    gradient_pointer, up_pointer, low_pointer, of_low_pointer, of_up_pointer,
    rows, columns, piece, gradient_stride, low_stride, second_column, third_column, second_block, third_block,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of a part, in a piece of the rows.

    gradient (rows, columns), up (columns, RANK), low (rows, parts RANK); the results are partial sums in fp32: of_low
    (blocks of columns, rows, RANK), of_up (pieces, columns, RANK). The second part begins at second_column and with
    block second_block, the third likewise; those that are not there begin at the end.
    """
    block, number = tl.program_id(0), tl.program_id(1)
    part = (block >= second_block).to(tl.int32) + (block >= third_block).to(tl.int32)
    begin = of_part(part, 0, second_column, third_column)
    end = of_part(part, second_column, third_column, columns)
    column = begin + (block - of_part(part, 0, second_block, third_block)) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, BLOCK_R)
    inside, in_rank = column < end, rank < RANK
    matrix = inside[:, None] & in_rank[None, :]
    up = tl.load(up_pointer + column[:, None] * RANK + rank[None, :], mask=matrix, other=0.0)
    of_up = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    first = number * piece
    for start in range(first, min(first + piece, rows), BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        exists = row < rows
        row = row.to(tl.int64)
        tile = exists[:, None] & inside[None, :]
        gradient = tl.load(gradient_pointer + row[:, None] * gradient_stride + column[None, :], mask=tile, other=0.0)
        narrow = exists[:, None] & in_rank[None, :]
        low_column = part * RANK + rank
        low = tl.load(low_pointer + row[:, None] * low_stride + low_column[None, :], mask=narrow, other=0.0)
        of_low = tl.dot(gradient, up, input_precision="ieee")
        place = (block.to(tl.int64) * rows + row)[:, None] * RANK + rank[None, :]
        tl.store(of_low_pointer + place, of_low, mask=narrow)
        of_up = tl.dot(tl.trans(gradient), low, of_up, input_precision="ieee")
    place = (number * columns + column)[:, None] * RANK + rank[None, :]
    tl.store(of_up_pointer + place, of_up, mask=matrix)


@jit
def sum_kernel(
    partial_pointer, factors_pointer, sum_pointer, scaled_pointer, pieces, size, scale, second, third, width,
    FACTORS: tl.constexpr, PARTS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: scale times the sum over the pieces of one part of partial (pieces, size), of BLOCK columns.

    The pieces of the second part begin at `second`, those of the third at `third`. Sums are (size / width, PARTS,
    width); with FACTORS, one for each of the first, scaled is their product.
    """
    part = tl.program_id(1)
    first, end = of_part(part, 0, second, third), of_part(part, second, third, pieces)
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


def begins(sizes: Sequence[int]) -> tuple[int, int]:
    """Where the second and the third part begin, at the end those that are not there."""
    return sizes[0], sum(sizes[:2])


def scaled_sums(
    partial: Tensor, scale: float, dtype: torch.dtype, parts: Sequence[int], factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`scale * partial.sum(0)` of a contiguous fp32 tensor, always in the same order, rounded once to `dtype`.

    Args:
        partial: (pieces, n, width).
        scale: of the sums.
        dtype: of the sums.
        parts: pieces of each part, up to `MOST_PARTS`, which are summed by themselves.
        factors: fp32 (n, 1), or None.

    Returns:
        (n, parts * width), and the same times the factors, or the same.
    """
    _, rows, width = partial.shape
    pieces = next_power_of_2(max(parts))
    total = partial.new_empty(rows, len(parts) * width, dtype=dtype)
    scaled = total if factors is None else torch.empty_like(total)
    block = max(64, 4096 // pieces)
    sum_kernel[(triton.cdiv(rows * width, block), len(parts))](
        partial, factors, total, scaled, len(partial), rows * width, scale, *begins(parts), width,
        FACTORS=factors is not None, PARTS=len(parts), PIECES=pieces, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return total, scaled


def scaled_sum(partial: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Likewise over all pieces together, (n, width)."""
    return scaled_sums(partial, scale, dtype, [len(partial)])[0]


def triton_narrow_products(
    gradient: Tensor, up: Tensor, low: Tensor, scale: float, parts: Sequence[int], factors: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels.

    Args:
        gradient: (n, out); may be columns of a wider tensor.
        up: (out, r), contiguous.
        low: (n, parts * r), as `gradient`: r columns for each part.
        scale: of both results.
        parts: columns of `gradient` that belong to each r columns of `low`; up to `MOST_PARTS`.
        factors: fp32 (n, 1), or None.

    Returns:
        For each part `scale * gradient @ up`, (n, parts * r) together, and `scale * gradient^T @ low`, (out, r), in the
        dtype of `low`; and the first times `factors`, or the first.
    """
    (rows, columns), rank = gradient.shape, up.shape[1]
    tile = tile_of(rank, columns)
    blocks = [triton.cdiv(part, tile.columns) for part in parts]
    pieces, size = tile.pieces(rows, sum(blocks))
    of_low = gradient.new_empty(sum(blocks), rows, rank, dtype=torch.float32)
    of_up = gradient.new_empty(pieces, columns, rank, dtype=torch.float32)
    narrow_products_kernel[(sum(blocks), pieces)](
        gradient, up, low, of_low, of_up, rows, columns, size, gradient.stride(0), low.stride(0),
        *begins(parts), *begins(blocks), **tile.options(rank),
    )  # fmt: skip
    sums, scaled = scaled_sums(of_low, scale, low.dtype, blocks, factors)
    return sums, scaled_sum(of_up, scale, low.dtype), scaled
