"""Low-rank updates of a wide output (LoRA, arXiv 2106.09685), written before the large product adds to it.

An update s l B^T, (n, out), is next to no arithmetic: its time is that of writing. Here it is written together with
what the output begins with, a bias or a stream, which torch would copy first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..interpreter_rounding import rounded
from ..launch import jit, tl, triton
from .lora_grad import Tile, begins, of_part

TILE = Tile(32, 128, 4, 1)


@jit
def narrow_update_kernel(
    low_pointer, up_pointer, start_pointer, out_pointer,
    rows, columns, blocks, scale, low_stride, start_stride, second_column, third_column, second_block, third_block,
    STARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows and BLOCK_N columns of a part of out (rows, columns): start + scale low up^T.

    low (rows, parts RANK), up (columns, RANK); with STARTS start (rows, columns), whose stride of rows is 0 where all
    are one. Parts as in `narrow_products_kernel`.
    """
    block = tl.program_id(0) % blocks
    part = (block >= second_block).to(tl.int32) + (block >= third_block).to(tl.int32)
    begin = of_part(part, 0, second_column, third_column)
    end = of_part(part, second_column, third_column, columns)
    column = begin + (block - of_part(part, 0, second_block, third_block)) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(0) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    rank = tl.arange(0, BLOCK_R)
    inside, exists, in_rank = column < end, row < rows, rank < RANK
    row = row.to(tl.int64)
    low_place = row[:, None] * low_stride + part * RANK + rank[None, :]
    low = tl.load(low_pointer + low_place, mask=exists[:, None] & in_rank[None, :], other=0.0)
    up_place = column[:, None] * RANK + rank[None, :]
    up = tl.load(up_pointer + up_place, mask=inside[:, None] & in_rank[None, :], other=0.0)
    total = scale * tl.dot(low, tl.trans(up), input_precision="ieee")
    tile = exists[:, None] & inside[None, :]
    if STARTS:
        start = tl.load(start_pointer + row[:, None] * start_stride + column[None, :], mask=tile, other=0.0)
        total += start.to(tl.float32)
    place = row[:, None] * columns + column[None, :]
    tl.store(out_pointer + place, rounded(total, out_pointer.dtype.element_ty), mask=tile)


def triton_narrow_update(low: Tensor, up: Tensor, scale: float, parts: Sequence[int], start: Tensor | None) -> Tensor:
    """Launch the kernel.

    Args:
        low: (n, parts * r), contiguous: r columns for each part.
        up: (out, r), contiguous.
        scale: of the update.
        parts: rows of `up` that belong to each r columns of `low`; up to `MOST_PARTS`.
        start: (out,) or (n, out), what the update is added to; None for nothing.

    Returns:
        (n, out) in the dtype of `low`.
    """
    rows, (columns, rank) = len(low), up.shape
    output = low.new_empty(rows, columns)
    blocks = [triton.cdiv(part, TILE.columns) for part in parts]
    start = None if start is None else start.contiguous()
    stride = 0 if start is None or start.ndim == 1 else columns
    across = sum(blocks)
    # one dimension: rows may need more programs than the second one of a grid has
    narrow_update_kernel[(triton.cdiv(rows, TILE.rows) * across,)](
        low, up, start, output, rows, columns, across, scale, low.stride(0), stride, *begins(parts), *begins(blocks),
        STARTS=start is not None, **TILE.options(rank),
    )  # fmt: skip
    return output


def reference_narrow_update(
    low: Tensor, up: Tensor, scale: float, parts: Sequence[int], start: Tensor | None
) -> Tensor:
    """What the kernel does, in plain torch."""
    pairs = zip(low.split(up.shape[1], dim=1), up.split(list(parts)), strict=True)
    update = scale * torch.cat([part @ rows.t() for part, rows in pairs], dim=1)
    return update if start is None else start + update
