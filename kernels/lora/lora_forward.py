"""LoRA's update of an output (arXiv 2106.09685), written before the large GEMM accumulates onto it.

The update s l B^T, (n, out), is bound by writing the output. The kernel adds the bias or residual in the same pass,
which torch would copy first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..launch import jit, rounded, tl, triton
from .lora_grad import Tile, part_offsets, select_part

TILE = Tile(32, 128, 4, 1)


@jit
def lora_update_kernel(
    low_pointer, lora_b_pointer, start_pointer, out_pointer,
    rows, columns, blocks, scale, low_stride, start_stride, second_column, third_column, second_block, third_block,
    HAS_START: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows and BLOCK_N columns of one part of out (rows, columns) = start + scale low lora_b^T.

    low = x A^T (rows, parts RANK), lora_b (columns, RANK); with HAS_START start (rows, columns), with row stride 0 for
    a bias. Parts as in `lora_gradients_kernel`.
    """
    block = tl.program_id(0) % blocks
    part = (block >= second_block).to(tl.int32) + (block >= third_block).to(tl.int32)
    begin = select_part(part, 0, second_column, third_column)
    end = select_part(part, second_column, third_column, columns)
    column = begin + (block - select_part(part, 0, second_block, third_block)) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    rank = tl.arange(0, BLOCK_R)
    inside, exists, in_rank = column < end, row < rows, rank < RANK
    row = row.to(tl.int64)
    low_place = row[:, None] * low_stride + part * RANK + rank[None, :]
    low = tl.load(low_pointer + low_place, mask=exists[:, None] & in_rank[None, :], other=0.0)
    lora_b_place = column[:, None] * RANK + rank[None, :]
    lora_b = tl.load(lora_b_pointer + lora_b_place, mask=inside[:, None] & in_rank[None, :], other=0.0)
    total = scale * tl.dot(low, tl.trans(lora_b), input_precision="ieee")
    tile = exists[:, None] & inside[None, :]
    if HAS_START:
        start = tl.load(start_pointer + row[:, None] * start_stride + column[None, :], mask=tile, other=0.0)
        total += start.to(tl.float32)
    place = row[:, None] * columns + column[None, :]
    tl.store(out_pointer + place, rounded(total, out_pointer.dtype.element_ty), mask=tile)


def triton_lora_update(low: Tensor, lora_b: Tensor, scale: float, parts: Sequence[int], start: Tensor | None) -> Tensor:
    """Launch the kernel.

    Args:
        low: low-rank activation x A^T, (n, parts * r), contiguous, r columns per part.
        lora_b: LoRA's B, (out, r), contiguous.
        scale: factor of the update.
        parts: rows of `lora_b` in each part, up to `MAX_PARTS`.
        start: bias (out,) or residual (n, out) that the update is added to, or None.

    Returns:
        (n, out) in the dtype of `low`.
    """
    rows, (columns, rank) = len(low), lora_b.shape
    output = low.new_empty(rows, columns)
    blocks = [triton.cdiv(part, TILE.columns) for part in parts]
    start = None if start is None else start.contiguous()
    stride = 0 if start is None or start.ndim == 1 else columns
    column_blocks = sum(blocks)
    # a 1-D grid: the second dimension of a grid is limited to 65535 programs
    lora_update_kernel[(triton.cdiv(rows, TILE.rows) * column_blocks,)](
        low, lora_b, start, output, rows, columns, column_blocks, scale, low.stride(0), stride,
        *part_offsets(parts), *part_offsets(blocks), HAS_START=start is not None, **TILE.launch_options(rank),
    )  # fmt: skip
    return output


def reference_lora_update(
    low: Tensor, lora_b: Tensor, scale: float, parts: Sequence[int], start: Tensor | None
) -> Tensor:
    """Reference of the kernel in plain PyTorch."""
    pairs = zip(low.split(lora_b.shape[1], dim=1), lora_b.split(list(parts)), strict=True)
    update = scale * torch.cat([part @ rows.t() for part, rows in pairs], dim=1)
    return update if start is None else start + update
