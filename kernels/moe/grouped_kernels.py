"""Triton kernels of the grouped matmuls: rows times the matrix of their expert, and the gradient of the matrices.

Operands are read in 16 bits (or fp32) and summed in fp32. No result depends on the order in which programs run.
"""

from __future__ import annotations

from ..attention.flash.portable.tile import dot
from ..gated_activation import _gate_and_slope, _sigmoid
from ..interpreter_rounding import rounded
from ..launch import jit, tl


@jit
def value_and_slope(x, KIND: tl.constexpr):
    """act(x) and act'(x) in fp32, for every name in `NONLINEARITIES`."""
    if KIND == "gelu_sigmoid":
        sigmoid = _sigmoid(1.702 * x)
        value = x * sigmoid
        slope = sigmoid + 1.702 * x * sigmoid * (1.0 - sigmoid)
    elif KIND == "relu_squared":
        positive = tl.where(x > 0.0, x, 0.0)
        value = positive * positive
        slope = 2.0 * positive
    else:
        value, slope = _gate_and_slope(x, KIND)
    return value, slope


@jit
def _tile_place(tile, row_tiles, column_tiles, TOGETHER: tl.constexpr):
    """Row and column of a tile: down a band of TOGETHER row tiles, then the next column of the band."""
    band = tile // (TOGETHER * column_tiles)
    height = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    within = tile - band * TOGETHER * column_tiles
    return band * TOGETHER + within % height, within // height


@jit
def _loaded(pointers, first, stop, inside, MASKED: tl.constexpr):
    """A tile; where it may reach beyond its matrix (MASKED), zeros there."""
    return tl.load(pointers, mask=(first < stop) & inside, other=0.0) if MASKED else tl.load(pointers)


@jit
def rows_kernel(
    left_pointer, order_pointer, matrices_pointer, bias_pointer, out_pointer, active_pointer,
    ends_pointer, tile_experts_pointer, tile_rows_pointer, tile_count_pointer,
    rows, experts, width, depth, topk, stride_left, stride_expert, stride_depth, stride_width,
    GATHER: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_DEPTH: tl.constexpr, EVEN_WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[r] = left[r] @ matrices[e(r)] + bias[e(r)], 0 in the rows after the last expert's; programs loop over tiles.

    left_pointer: (rows, depth), or with GATHER (tokens, depth), of which a row reads order[r] // topk.
    matrices_pointer: (experts, depth, width), any strides; GATED twice as wide, [gate | up].
    bias_pointer: (experts, width), GATED (experts, 2 width).
    out_pointer: (rows, width), GATED (rows, 2 width).
    active_pointer: (rows, width), act(out), GATED act(gate) * up; None without ACTIVATION, the name or "".
    """
    row_tiles = tl.load(tile_count_pointer)
    column_tiles = tl.cdiv(width, BLOCK_N)
    out_width = 2 * width if GATED else width
    step = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row_tile, column_tile = _tile_place(tile, row_tiles, column_tiles, TOGETHER)
        expert = tl.load(tile_experts_pointer + row_tile)
        first = tl.load(tile_rows_pointer + row_tile)
        used = expert < experts
        stop = tl.load(ends_pointer + expert, mask=used, other=rows)
        steps = tl.where(used, tl.cdiv(depth, BLOCK_K), 0)
        row = first + tl.arange(0, BLOCK_M)
        inside = row < stop
        # rows beyond the tile read its first row; they are not stored
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
            a = _loaded(left, place[None, :], depth, True, MASKED=not EVEN_DEPTH)
            b = _loaded(matrix, place[:, None], depth, in_width[None, :], MASKED=not (EVEN_DEPTH and EVEN_WIDTH))
            total = dot(a, b, total, PRECISION)
            if GATED:
                b_up = _loaded(
                    matrix + to_up, place[:, None], depth, in_width[None, :], MASKED=not (EVEN_DEPTH and EVEN_WIDTH)
                )
                up_total = dot(a, b_up, up_total, PRECISION)
            left += BLOCK_K
            matrix += BLOCK_K * stride_depth
        stored = inside[:, None] & in_width[None, :]
        element = out_pointer.dtype.element_ty
        if BIAS:
            bias = bias_pointer + tl.where(used, expert, 0).to(tl.int64) * out_width + column
            taken = tl.where(used, 1.0, 0.0)
            total += tl.load(bias, mask=in_width, other=0.0).to(tl.float32)[None, :] * taken
            if GATED:
                up_total += tl.load(bias + width, mask=in_width, other=0.0).to(tl.float32)[None, :] * taken
        out = out_pointer + row.to(tl.int64)[:, None] * out_width + column[None, :]
        result = rounded(total, element)
        tl.store(out, result, mask=stored)
        if ACTIVATION != "":
            # of the rounded numbers, which are what the backward pass sees
            value, _ = value_and_slope(result.to(tl.float32), ACTIVATION)
            if GATED:
                up_result = rounded(up_total, element)
                tl.store(out + width, up_result, mask=stored)
                value = value * up_result.to(tl.float32)
            active = active_pointer + row.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(active, rounded(value, element), mask=stored)


@jit
def outer_kernel(
    left_pointer, right_pointer, order_pointer, out_pointer, ends_pointer, heaviest_pointer,
    height, width, topk, stride_left, stride_right,
    GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_HEIGHT: tl.constexpr, EVEN_WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[e] = sum over the rows r of expert e of left[r]^T right[r], 0 without rows; one program: a tile of an expert.

    The programs of the experts with the most rows come first: what is left for the end is short.
    left_pointer: (rows, height), or with GATHER_LEFT (tokens, height), of which a row reads order[r] // topk.
    right_pointer: (rows, width), likewise. out_pointer: (experts, height, width).
    """
    row_tiles = tl.cdiv(height, BLOCK_M)
    column_tiles = tl.cdiv(width, BLOCK_N)
    program = tl.program_id(0)
    expert = tl.load(heaviest_pointer + program // (row_tiles * column_tiles))
    row_tile, column_tile = _tile_place(program % (row_tiles * column_tiles), row_tiles, column_tiles, TOGETHER)
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
    # the tokens of the next rows are looked up a step ahead: a load whose address waits for another is not pipelined
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
