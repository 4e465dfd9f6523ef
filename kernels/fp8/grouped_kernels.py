"""Triton kernels of grouped fp8 matmuls: rows times the matrix of their expert, and the gradients of the matrices.

Accumulation is fp32; with scales of tiles each 128 products are summed by the tensor cores and added to fp32 registers
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Results are deterministic.
"""

from __future__ import annotations

from typing import Any

from ..launch import _INTERPRETED_IN_KERNEL, jit, rounded, tl
from ..moe.grouped_kernels import _tile_position
from .cast_kernels import _magnitude


@jit
def _dot(a, b, total, FAST: tl.constexpr):
    """Return total + a @ b; FAST: by the tensor cores, else the product is added to fp32 registers."""
    if _INTERPRETED_IN_KERNEL:
        total += tl.dot(a.to(tl.float32), b.to(tl.float32))
    elif FAST:
        total = tl.dot(a, b, total)
    else:
        total = tl.dot(a, b, total, max_num_imprecise_acc=a.shape[1])
    return total


@jit
def _load(pointers, first, stop, inside, MASKED: tl.constexpr):
    """Load a tile; with MASKED, zeros outside."""
    return tl.load(pointers, mask=(first < stop) & inside, other=0.0) if MASKED else tl.load(pointers)


@jit
def grouped_fp8_kernel(
    a_pointer, b_pointer, a_scale_pointer, b_scale_pointer, out_pointer, row_amax_pointer,
    ends_pointer, tile_experts_pointer, tile_rows_pointer, tile_count_pointer,
    rows, experts, width, depth, b_expert_stride, b_row_stride, b_scale_expert_stride, b_scale_row_stride,
    A_SCALES: tl.constexpr, B_SCALES: tl.constexpr, FAST: tl.constexpr, ROW_AMAX: tl.constexpr,
    EVEN_DEPTH: tl.constexpr, EVEN_WIDTH: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out[r] = a[r] @ b[e(r)]^T, 0 in rows after the last expert's; persistent programs.

    a_pointer: (rows, depth). b_pointer: (experts, width, depth), the depth contiguous. out_pointer: (rows, width).
    A_SCALES: `tensor` (1,), `row` (rows,), `tile` (depth / 128, rows). B_SCALES: `tensor` (1,), `row` (experts, width),
    `block` (experts, width / 128, depth / 128), or of one expert `tile` (depth / 128, width). row_amax_pointer
    (ROW_AMAX): (rows,) int32 bits of zeros, which become the largest magnitudes of the rows of the result.
    """
    row_tiles = tl.load(tile_count_pointer)
    column_tiles = tl.cdiv(width, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = _tile_position(tile, row_tiles, column_tiles, GROUP_M)
        expert = tl.load(tile_experts_pointer + row_tile)
        first = tl.load(tile_rows_pointer + row_tile)
        used = expert < experts
        stop = tl.load(ends_pointer + expert, mask=used, other=rows)
        expert = tl.where(used, expert, 0).to(tl.int64)
        steps = tl.where(used, tl.cdiv(depth, BLOCK_K), 0)
        row = first + tl.arange(0, BLOCK_M)
        inside = row < stop
        source = tl.where(inside, row, first)  # rows that are not stored read the first one, so that loads need no mask
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_width = column < width
        a = a_pointer + source.to(tl.int64)[:, None] * depth + step[None, :]
        b = b_pointer + expert * b_expert_stride + column.to(tl.int64)[None, :] * b_row_stride + step[:, None]
        a_scale = a_scale_pointer + source
        b_scale = b_scale_pointer + expert * b_scale_expert_stride
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for number in range(steps):
            place = number * BLOCK_K + step
            left = _load(a, place[None, :], depth, True, MASKED=not EVEN_DEPTH)
            right = _load(b, place[:, None], depth, in_width[None, :], MASKED=not (EVEN_DEPTH and EVEN_WIDTH))
            if A_SCALES == "tile":
                tl.static_assert(BLOCK_K == 128, "a tile has 128 columns")
                zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                left_scale = tl.load(a_scale + tl.cast(number, tl.int64) * rows)
                if B_SCALES == "tile":
                    right_scale = b_scale + tl.cast(number, tl.int64) * width + column
                    right_scale = tl.load(right_scale, mask=in_width, other=0.0)
                else:
                    tl.static_assert(BLOCK_N == 128, "a block has 128 rows")
                    right_scale = tl.load(b_scale + column_tile * b_scale_row_stride + number)
                    right_scale += tl.zeros((BLOCK_N,), tl.float32)
                scale = left_scale[:, None] * right_scale[None, :]
                total += _dot(left, right, zeros, True) * scale
            else:
                total = _dot(left, right, total, FAST)
            a += BLOCK_K
            b += BLOCK_K
        if A_SCALES != "tile":
            left_scale = tl.load(a_scale) if A_SCALES == "row" else tl.load(a_scale_pointer + 0 * row)
            right_scale = tl.load(b_scale + (column if B_SCALES == "row" else 0 * column), mask=in_width, other=0.0)
            total = total * (left_scale[:, None] * right_scale[None, :])
        total = tl.where(used, total, 0.0)
        out = out_pointer + row.to(tl.int64)[:, None] * width + column[None, :]
        value = rounded(total, out_pointer.dtype.element_ty)
        tl.store(out, value, mask=inside[:, None] & in_width[None, :])
        if ROW_AMAX:
            largest = tl.max(tl.where(in_width[None, :], _magnitude(value.to(tl.float32)), 0), axis=1)
            tl.atomic_max(row_amax_pointer + row, largest, mask=inside, sem="relaxed")


@jit
def grouped_fp8_outer_kernel(
    a_pointer, b_pointer, a_scale_pointer, b_scale_pointer, out_pointer, ends_pointer, heaviest_pointer,
    height, width, a_stride, b_stride,
    A_SCALES: tl.constexpr, FAST: tl.constexpr, EVEN_HEIGHT: tl.constexpr, EVEN_WIDTH: tl.constexpr,
    MULTIPLE: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile per program of out[e] = sum over the rows r of expert e of a[:, r] b[:, r]^T.

    a_pointer: (height, a_stride), b_pointer: (width, b_stride), whose columns are the rows. Experts begin at multiples
    of MULTIPLE. out_pointer: (experts, height, width). Scales of both: `tensor` (1,), `row` (height,) and (width,),
    `tile` (rows / 128, height) and (rows / 128, width).
    """
    row_tiles = tl.cdiv(height, BLOCK_M)
    column_tiles = tl.cdiv(width, BLOCK_N)
    program = tl.program_id(0)
    expert = tl.load(heaviest_pointer + program // (row_tiles * column_tiles))
    row_tile, column_tile = _tile_position(program % (row_tiles * column_tiles), row_tiles, column_tiles, GROUP_M)
    first = tl.multiple_of(tl.load(ends_pointer + expert - 1, mask=expert > 0, other=0), MULTIPLE)
    stop = tl.multiple_of(tl.load(ends_pointer + expert), MULTIPLE)
    down = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    across = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_height = down < height
    in_width = across < width
    step = tl.arange(0, BLOCK_K)
    a = a_pointer + down.to(tl.int64)[:, None] * a_stride + step[None, :]
    b = b_pointer + across.to(tl.int64)[None, :] * b_stride + step[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(first, stop, BLOCK_K):
        begin = tl.multiple_of(begin, MULTIPLE)
        in_left = in_height[:, None] if not EVEN_HEIGHT else True
        in_right = in_width[None, :] if not EVEN_WIDTH else True
        left = tl.load(a + begin, mask=(begin + step < stop)[None, :] & in_left, other=0.0)
        right = tl.load(b + begin, mask=(begin + step < stop)[:, None] & in_right, other=0.0)
        if A_SCALES == "tile":
            tl.static_assert(BLOCK_K == 128, "a tile has 128 columns")
            tile = tl.cast(begin // 128, tl.int64)
            left_scale = tl.load(a_scale_pointer + tile * height + down, mask=in_height, other=0.0)
            right_scale = tl.load(b_scale_pointer + tile * width + across, mask=in_width, other=0.0)
            zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            total += _dot(left, right, zeros, True) * (left_scale[:, None] * right_scale[None, :])
        else:
            total = _dot(left, right, total, FAST)
    if A_SCALES != "tile":
        left_scale = tl.load(a_scale_pointer + (down if A_SCALES == "row" else 0 * down), mask=in_height, other=0.0)
        right_scale = tl.load(b_scale_pointer + (across if A_SCALES == "row" else 0 * across), mask=in_width, other=0.0)
        total = total * (left_scale[:, None] * right_scale[None, :])
    out = out_pointer + (expert.to(tl.int64) * height + down.to(tl.int64)[:, None]) * width + across[None, :]
    tl.store(out, rounded(total, out_pointer.dtype.element_ty), mask=in_height[:, None] & in_width[None, :])


def grouped_tile(
    kind: str, granularity: str, capability: int | None, *, fast_accumulation: bool = False, few_rows: bool = False
) -> dict[str, Any]:
    """Return the tile of a grouped matmul (`rows` or `outer`) and its launch options.

    Args:
        kind: rows times matrices, or their gradients.
        granularity: of the scales of the left operand.
        capability: compute capability of the GPU, 90 for sm_90; None in the interpreter.
        fast_accumulation: the tensor cores add all products; otherwise two sums share the registers.
        few_rows: experts have so few rows that tiles of 64 waste less.
    """
    tiles = granularity in ("tile", "block")
    two_sums = tiles or not fast_accumulation
    if capability is None:
        m, n, k, warps, stages = (16, 128, 128, 4, 1) if tiles else (16, 32, 32, 4, 1)
    elif 90 <= capability < 120:  # 227 KB of shared memory
        wide = capability < 100 and not two_sums
        m, n, k, warps, stages = (128, 256, 128, 8, 3) if wide else (128, 128, 128, 8, 4)
    else:
        m, n, k, warps, stages = (128, 128, 128, 8, 2) if tiles else (128, 128, 64, 8, 3)
    if few_rows and kind == "rows" and capability is not None:
        m, n, warps = 64, 128, 4
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages, "GROUP_M": 8}
