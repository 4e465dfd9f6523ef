"""Triton kernels of the grouped matmuls: rows times the matrix of their expert, and the gradients of the matrices.

Operands are 16-bit or fp32, accumulation is fp32. Results are deterministic.
"""

from __future__ import annotations

from ..activations import activation_with_derivative
from ..attention.flash.portable.tile import dot
from ..launch import jit, rounded, tl


@jit
def _tile_position(tile, row_tiles, column_tiles, GROUP_M: tl.constexpr):
    """Return row and column of a tile, ordered column by column within bands of GROUP_M row tiles, for L2 reuse."""
    band = tile // (GROUP_M * column_tiles)
    height = tl.minimum(row_tiles - band * GROUP_M, GROUP_M)
    within = tile - band * GROUP_M * column_tiles
    return band * GROUP_M + within % height, within // height


@jit
def _load_tile(pointers, first, stop, inside, MASKED: tl.constexpr):
    """Load a tile; with MASKED, for tiles that may reach beyond the matrix, zeros outside."""
    return tl.load(pointers, mask=(first < stop) & inside, other=0.0) if MASKED else tl.load(pointers)


@jit(do_not_specialize=["rows"])  # changes from step to step where ranks exchange tokens
def grouped_matmul_kernel(
    left_pointer, order_pointer, matrices_pointer, bias_pointer, out_pointer, active_pointer,
    ends_pointer, tile_experts_pointer, tile_rows_pointer, tile_count_pointer,
    rows, experts, width, depth, topk, stride_left, stride_expert, stride_depth, stride_width,
    GATHER: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_DEPTH: tl.constexpr, EVEN_WIDTH: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out[r] = left[r] @ matrices[e(r)] + bias[e(r)], 0 in rows after the last expert's; persistent programs.

    left_pointer: (rows, depth), or with GATHER (tokens, depth), where row r reads token order[r] // topk.
    matrices_pointer: (experts, depth, width), any strides; GATED twice as wide, [gate | up].
    bias_pointer: (experts, width), GATED (experts, 2 width).
    out_pointer: (rows, width), GATED (rows, 2 width).
    active_pointer: (rows, width), act(out), GATED act(gate) * up; None if ACTIVATION, the name, is "".
    """
    row_tiles = tl.load(tile_count_pointer)
    column_tiles = tl.cdiv(width, BLOCK_N)
    out_width = 2 * width if GATED else width
    step = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = _tile_position(tile, row_tiles, column_tiles, GROUP_M)
        expert = tl.load(tile_experts_pointer + row_tile)
        first = tl.load(tile_rows_pointer + row_tile)
        used = expert < experts
        stop = tl.load(ends_pointer + expert, mask=used, other=rows)
        steps = tl.where(used, tl.cdiv(depth, BLOCK_K), 0)
        row = first + tl.arange(0, BLOCK_M)
        inside = row < stop
        # rows beyond the expert's last are not stored; they read the tile's first row, or token 0 with GATHER, so that
        # loads need no row mask
        if GATHER:
            source = tl.load(order_pointer + row, mask=row < tl.where(used, stop, 0), other=0) // topk
        else:
            source = tl.where(inside, row, first)
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        left = left_pointer + source.to(tl.int64)[:, None] * stride_left + step[None, :]
        matrix = matrices_pointer + expert.to(tl.int64) * stride_expert
        matrix += step.to(tl.int64)[:, None] * stride_depth + column.to(tl.int64)[None, :] * stride_width
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        in_width = column < width
        up_total = total
        to_up = tl.cast(width, tl.int64) * stride_width
        for number in range(steps):
            place = number * BLOCK_K + step
            a = _load_tile(left, place[None, :], depth, True, MASKED=not EVEN_DEPTH)
            b = _load_tile(matrix, place[:, None], depth, in_width[None, :], MASKED=not (EVEN_DEPTH and EVEN_WIDTH))
            total = dot(a, b, total, PRECISION)
            if GATED:
                b_up = _load_tile(
                    matrix + to_up, place[:, None], depth, in_width[None, :], MASKED=not (EVEN_DEPTH and EVEN_WIDTH)
                )
                up_total = dot(a, b_up, up_total, PRECISION)
            left += BLOCK_K
            matrix += BLOCK_K * stride_depth
        stored = inside[:, None] & in_width[None, :]
        element = out_pointer.dtype.element_ty
        if BIAS:
            bias = bias_pointer + tl.where(used, expert, 0).to(tl.int64) * out_width + column
            bias_scale = tl.where(used, 1.0, 0.0)  # no bias in rows after the last expert's
            total += tl.load(bias, mask=in_width, other=0.0).to(tl.float32)[None, :] * bias_scale
            if GATED:
                up_total += tl.load(bias + width, mask=in_width, other=0.0).to(tl.float32)[None, :] * bias_scale
        out = out_pointer + row.to(tl.int64)[:, None] * out_width + column[None, :]
        result = rounded(total, element)
        tl.store(out, result, mask=stored)
        if ACTIVATION != "":
            # computed from the rounded values, which the backward pass sees
            value, _ = activation_with_derivative(result.to(tl.float32), ACTIVATION)
            if GATED:
                up_result = rounded(up_total, element)
                tl.store(out + width, up_result, mask=stored)
                value = value * up_result.to(tl.float32)
            active = active_pointer + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(active, rounded(value, element), mask=stored)


@jit
def grouped_outer_kernel(
    left_pointer, right_pointer, order_pointer, out_pointer, ends_pointer, heaviest_pointer,
    height, width, topk, stride_left, stride_right,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_HEIGHT: tl.constexpr, EVEN_WIDTH: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one tile per program of out[e] = sum over the rows r of expert e of left[r]^T right[r].

    Experts without rows get 0. Experts with the most rows are scheduled first, for a short tail.
    left_pointer: (rows, height), or with GATHER_LEFT (tokens, height), where row r reads token order[r] // topk.
    right_pointer: (rows, width), likewise. out_pointer: (experts, height, width).
    """
    row_tiles = tl.cdiv(height, BLOCK_M)
    column_tiles = tl.cdiv(width, BLOCK_N)
    program = tl.program_id(0)
    expert = tl.load(heaviest_pointer + program // (row_tiles * column_tiles))
    row_tile, column_tile = _tile_position(program % (row_tiles * column_tiles), row_tiles, column_tiles, GROUP_M)
    first = tl.load(ends_pointer + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends_pointer + expert)
    down = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    across = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_height = down < height
    in_width = across < width
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    step = tl.arange(0, BLOCK_K)
    row = first + step
    source = row
    # token indices are prefetched one step ahead: a load whose address depends on another load is not pipelined
    if GATHER_LEFT or GATHER_RIGHT:
        source = tl.load(order_pointer + row, mask=row < stop, other=0) // topk
    for begin in range(first, stop, BLOCK_K):
        row = begin + step
        inside = row < stop
        left_row = (source if GATHER_LEFT else row).to(tl.int64)
        right_row = (source if GATHER_RIGHT else row).to(tl.int64)
        in_left = inside[:, None] if EVEN_HEIGHT else inside[:, None] & in_height[None, :]
        in_right = inside[:, None] if EVEN_WIDTH else inside[:, None] & in_width[None, :]
        left = tl.load(left_pointer + left_row[:, None] * stride_left + down[None, :], mask=in_left, other=0.0)
        right = tl.load(right_pointer + right_row[:, None] * stride_right + across[None, :], mask=in_right, other=0.0)
        total = dot(tl.trans(left), right, total, PRECISION)
        if GATHER_LEFT or GATHER_RIGHT:
            source = tl.load(order_pointer + row + BLOCK_K, mask=row + BLOCK_K < stop, other=0) // topk
    out = out_pointer + (expert.to(tl.int64) * height + down.to(tl.int64)[:, None]) * width + across[None, :]
    tl.store(out, rounded(total, out_pointer.dtype.element_ty), mask=in_height[:, None] & in_width[None, :])
