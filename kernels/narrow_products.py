"""Products of a wide gradient with LoRA's narrow matrices, both from one pass over it.

The gradient g (n, out) of a linear layer with a low-rank update is needed twice besides the large product: g B, (n, r),
and g^T (x A^T), (out, r). Each reads all of g to write next to nothing, so the time is that of reading.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .launch import jit, next_power_of_2, tl, triton

WIDEST_RANK = 64
"""The largest rank whose sums fit in registers."""
PROGRAMS = 256
"""About as many as a large GPU runs at once; more of them would have more partial sums to add."""


class Tile(NamedTuple):
    """What a program of a kernel works on at a time.

    Attributes:
        rows: of the wide tensor.
        columns: likewise.
        warps: of the program.
        stages: tiles that are on their way.
    """

    rows: int
    columns: int
    warps: int
    stages: int

    def options(self, rank: int) -> dict[str, int]:
        """Of a launch, with matrices of a rank."""
        # the smallest tile of a matrix product has 16 columns
        blocks = {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_R": max(16, next_power_of_2(rank))}
        return {"RANK": rank, **blocks, "num_warps": self.warps, "num_stages": self.stages}

    def pieces(self, rows: int, blocks: int) -> tuple[int, int]:
        """Into how many pieces rows are cut for so many blocks of columns, and the rows of a piece: whole tiles."""
        size = triton.cdiv(triton.cdiv(rows, max(1, PROGRAMS // blocks)), self.rows) * self.rows
        return triton.cdiv(rows, size), size


def tile_of(rank: int) -> Tile:
    """Of `narrow_products_kernel`."""
    return Tile(64, 256 if rank <= 32 else 128, 4, 2)


# ---------------------------------------------------------------- Triton


@jit
def narrow_products_kernel(
    gradient_pointer, up_pointer, low_pointer, of_low_pointer, of_up_pointer,
    rows, columns, piece, gradient_stride, low_stride,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of a piece of the rows.

    gradient (rows, columns), up (columns, RANK), low (rows, RANK); the results are partial sums in fp32: of_low
    (blocks of columns, rows, RANK), of_up (pieces, columns, RANK).
    """
    block, number = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, BLOCK_R)
    inside, in_rank = column < columns, rank < RANK
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
        low = tl.load(low_pointer + row[:, None] * low_stride + rank[None, :], mask=narrow, other=0.0)
        of_low = tl.dot(gradient, up, input_precision="ieee")
        place = (block.to(tl.int64) * rows + row)[:, None] * RANK + rank[None, :]
        tl.store(of_low_pointer + place, of_low, mask=narrow)
        of_up = tl.dot(tl.trans(gradient), low, of_up, input_precision="ieee")
    place = (number * columns + column)[:, None] * RANK + rank[None, :]
    tl.store(of_up_pointer + place, of_up, mask=matrix)


@jit
def sum_kernel(partial_pointer, sum_pointer, pieces, size, scale, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """One program: scale times the sum over the first dimension of partial (pieces, size), of BLOCK columns."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    piece = tl.arange(0, PIECES)
    inside = column < size
    mask = (piece < pieces)[:, None] & inside[None, :]
    partial = tl.load(partial_pointer + piece.to(tl.int64)[:, None] * size + column[None, :], mask=mask, other=0.0)
    total = tl.sum(partial, axis=0) * scale
    tl.store(sum_pointer + column, total.to(sum_pointer.dtype.element_ty), mask=inside)


def scaled_sum(partial: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """`scale * partial.sum(0)` of a contiguous fp32 tensor, always in the same order, rounded once to `dtype`."""
    total = partial.new_empty(partial.shape[1:], dtype=dtype)
    pieces = next_power_of_2(len(partial))
    block = max(64, 4096 // pieces)
    grid = (triton.cdiv(total.numel(), block),)
    sum_kernel[grid](partial, total, len(partial), total.numel(), scale, PIECES=pieces, BLOCK=block, num_warps=4)
    return total


def triton_narrow_products(gradient: Tensor, up: Tensor, low: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Launch the kernels.

    Args:
        gradient: (n, out); may be columns of a wider tensor.
        up: (out, r), contiguous.
        low: (n, r), as `gradient`.
        scale: of both results.

    Returns:
        `scale * gradient @ up`, (n, r), and `scale * gradient^T @ low`, (out, r), in the dtype of `low`.
    """
    (rows, columns), rank = gradient.shape, up.shape[1]
    tile = tile_of(rank)
    blocks = triton.cdiv(columns, tile.columns)
    pieces, size = tile.pieces(rows, blocks)
    of_low = gradient.new_empty(blocks, rows, rank, dtype=torch.float32)
    of_up = gradient.new_empty(pieces, columns, rank, dtype=torch.float32)
    narrow_products_kernel[(blocks, pieces)](
        gradient, up, low, of_low, of_up, rows, columns, size, gradient.stride(0), low.stride(0),
        **tile.options(rank),
    )  # fmt: skip
    return scaled_sum(of_low, scale, low.dtype), scaled_sum(of_up, scale, low.dtype)
