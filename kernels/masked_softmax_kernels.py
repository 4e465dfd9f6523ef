"""Triton kernels of `masked_softmax.py` and their launches: several short rows in a program, or a long row in steps."""

# Triton resolves constexpr conditions at compile time, which type checkers do not know:
# pyrefly: ignore-errors[unbound-name]

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .launch import jit, next_power_of_2, rounded, tl, triton

ONE_PASS_COLUMNS = 32768  # a row in fp32 is half the registers of a multiprocessor; reading it twice is slower
TILE = 2048  # elements per program for several short rows
VECTOR = 8  # adjacent columns per thread: 16-byte loads
STEP = 8192  # columns per step over a long row
LONG_WARPS = 16


@jit
def _last_visible(row, queries, columns):
    """Return the last column visible to a row under a causal mask, in int32: 64-bit comparisons would dominate."""
    return (row % queries).to(tl.int32) + (columns - queries)


@jit
def _load_mask(row, column, total_rows, queries, columns, CAUSAL: tl.constexpr):
    """Return the load mask of a tile with rows `row` and columns `column`, as a 2-D tile.

    The causal bound is rounded up to vectors of 16 columns: a mask that changes within a vector would prevent
    vectorized loads.
    """
    inside = (row < total_rows)[:, None] & (column < columns)[None, :]
    if CAUSAL:
        inside = inside & ((column // 16 * 16)[None, :] <= _last_visible(row, queries, columns)[:, None])
    return inside


@jit
def _mask_row(row, queries, heads, mask_batch_stride, mask_head_stride, mask_query_stride):
    """Return the offset of a row's mask."""
    outer = row // queries
    place = (outer // heads) * mask_batch_stride + (outer % heads) * mask_head_stride
    return place + (row % queries) * mask_query_stride


@jit
def masked_softmax_kernel(
    x_pointer,
    mask_pointer,
    probabilities_pointer,
    sinks_pointer,
    sink_weights_pointer,
    scale,
    total_rows,
    queries,
    columns,
    heads,
    mask_batch_stride,
    mask_head_stride,
    mask_query_stride,
    mask_key_stride,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_SINK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Process ROWS whole rows per program, in registers; x and probabilities: (batch, heads, queries, columns).

    sinks: (heads,). sink_weights: (batch, heads, queries), the probability of the sink of each row.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    load_mask = _load_mask(row, column, total_rows, queries, columns, CAUSAL)
    place = row[:, None] * columns + column[None, :]
    x = tl.load(x_pointer + place, mask=load_mask, other=0.0).to(ACCUMULATE)
    visible = load_mask
    if CAUSAL:
        visible = visible & (column[None, :] <= _last_visible(row, queries, columns)[:, None])
    if MASKED:
        start = _mask_row(row, queries, heads, mask_batch_stride, mask_head_stride, mask_query_stride)
        mask_place = start[:, None] + (column.to(tl.int64) * mask_key_stride)[None, :]
        visible = visible & (tl.load(mask_pointer + mask_place, mask=load_mask, other=1) == 0)
    score = tl.where(visible, x * scale, float("-inf"))
    highest = tl.max(score, 1)
    if HAS_SINK:
        sink = tl.load(sinks_pointer + row // queries % heads, mask=row < total_rows, other=0.0).to(ACCUMULATE)
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # exp(-inf - -inf) would be NaN
    exponential = tl.exp(score - highest[:, None])
    total = tl.sum(exponential, 1)
    if HAS_SINK:
        sink_exponential = tl.exp(sink - highest)
        total += sink_exponential
        sink_weight = sink_exponential / tl.where(total == 0.0, 1.0, total)
        tl.store(sink_weights_pointer + row, sink_weight, mask=row < total_rows)
    probability = exponential / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        probabilities_pointer + place,
        rounded(probability, probabilities_pointer.dtype.element_ty),
        mask=(row < total_rows)[:, None] & (column < columns)[None, :],
    )


@jit
def _long_scores(
    x_row,
    mask_row,
    scale,
    column,
    bound,
    columns,
    mask_key_stride,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    VECTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Return the scores of one step over a long row, -inf where masked.

    `column` is (BLOCK // VECTOR, VECTOR), `bound` the last visible column. As in `_load_mask` the causal bound of loads
    is rounded up to vectors.
    """
    load_mask = column < columns
    if CAUSAL:
        load_mask = load_mask & (column // VECTOR * VECTOR <= bound)
    x = tl.load(x_row + column, mask=load_mask, other=0.0).to(ACCUMULATE)
    visible = load_mask
    if CAUSAL:
        visible = visible & (column <= bound)
    if MASKED:
        hidden = tl.load(mask_row + column.to(tl.int64) * mask_key_stride, mask=load_mask, other=1)
        visible = visible & (hidden == 0)
    return tl.where(visible, x * scale, float("-inf"))


@jit
def long_masked_softmax_kernel(
    x_pointer,
    mask_pointer,
    probabilities_pointer,
    sinks_pointer,
    sink_weights_pointer,
    scale,
    total_rows,
    queries,
    columns,
    heads,
    mask_batch_stride,
    mask_head_stride,
    mask_query_stride,
    mask_key_stride,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_SINK: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Process one row of x (batch, heads, queries, columns) per program, BLOCK columns per step, reading it twice.

    Online softmax with a maximum and a sum per vector of columns: the rescaling costs one exponential per vector
    instead of per element, and threads exchange nothing before the end.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row, probabilities_row = x_pointer + row * columns, probabilities_pointer + row * columns
    mask_row = mask_pointer
    if MASKED:
        mask_row += _mask_row(row, queries, heads, mask_batch_stride, mask_head_stride, mask_query_stride)
    bound = columns - 1
    if CAUSAL:
        bound = tl.program_id(0) % queries + columns - queries
    place = (tl.arange(0, BLOCK // VECTOR) * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    highest = tl.full((BLOCK // VECTOR,), float("-inf"), ACCUMULATE)
    total = tl.zeros((BLOCK // VECTOR,), ACCUMULATE)
    for start in range(0, tl.minimum(bound + 1, columns), BLOCK):
        score = _long_scores(
            x_row, mask_row, scale, start + place, bound, columns, mask_key_stride, CAUSAL, MASKED, VECTOR, ACCUMULATE
        )
        higher = tl.maximum(highest, tl.max(score, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(score - shift[:, None]), 1)
        highest = higher
    row_highest = tl.max(highest, 0)
    if HAS_SINK:
        sink = tl.load(sinks_pointer + row // queries % heads).to(ACCUMULATE)
        row_highest = tl.maximum(row_highest, sink)
    row_highest = tl.where(row_highest == float("-inf"), 0.0, row_highest)
    row_total = tl.sum(total * tl.exp(highest - row_highest), 0)
    if HAS_SINK:
        sink_exponential = tl.exp(sink - row_highest)
        row_total += sink_exponential
        tl.store(sink_weights_pointer + row, sink_exponential / tl.where(row_total == 0.0, 1.0, row_total))
    inverse = 1.0 / tl.where(row_total == 0.0, 1.0, row_total)
    for start in range(0, columns, BLOCK):
        column = start + place
        score = _long_scores(
            x_row, mask_row, scale, column, bound, columns, mask_key_stride, CAUSAL, MASKED, VECTOR, ACCUMULATE
        )
        probability = tl.exp(score - row_highest) * inverse
        tl.store(
            probabilities_row + column,
            rounded(probability, probabilities_pointer.dtype.element_ty),
            mask=column < columns,
        )


@jit
def masked_softmax_backward_kernel(
    output_gradient_pointer,
    probabilities_pointer,
    gradient_pointer,
    row_sums_pointer,
    scale,
    total_rows,
    queries,
    columns,
    CAUSAL: tl.constexpr,
    ROW_SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Compute scale * p * (dp - sum(p * dp)) of ROWS rows per program; every pointer is (rows, columns).

    Where p is 0, dp is ignored, even if it is NaN. row_sums (ROW_SUMS): (rows,), sum(p * dp).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    load_mask = _load_mask(row, column, total_rows, queries, columns, CAUSAL)
    place = row[:, None] * columns + column[None, :]
    probability = tl.load(probabilities_pointer + place, mask=load_mask, other=0.0).to(ACCUMULATE)
    output_gradient = tl.load(output_gradient_pointer + place, mask=load_mask, other=0.0).to(ACCUMULATE)
    weighted = probability * tl.where(probability == 0.0, 0.0, output_gradient)
    row_sum = tl.sum(weighted, 1)
    if ROW_SUMS:
        tl.store(row_sums_pointer + row, row_sum, mask=row < total_rows)
    gradient = (weighted - probability * tl.expand_dims(row_sum, 1)) * scale
    inside = (row < total_rows)[:, None] & (column < columns)[None, :]
    tl.store(gradient_pointer + place, rounded(gradient, gradient_pointer.dtype.element_ty), mask=inside)


@jit
def long_masked_softmax_backward_kernel(
    output_gradient_pointer,
    probabilities_pointer,
    gradient_pointer,
    row_sums_pointer,
    scale,
    queries,
    columns,
    CAUSAL: tl.constexpr,
    ROW_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Compute the gradient of one row per program, BLOCK columns per step, reading it twice."""
    row = tl.program_id(0).to(tl.int64) * columns
    end = columns
    if CAUSAL:  # rounded up to vectors: see `_load_mask`
        bound = tl.maximum(tl.program_id(0) % queries + columns - queries + 1, 0)
        end = tl.minimum(columns, tl.cdiv(bound, 16) * 16)
    total = tl.zeros((BLOCK,), ACCUMULATE)
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        load_mask = (column // 16 * 16 < end) & (column < columns)
        probability = tl.load(probabilities_pointer + row + column, mask=load_mask, other=0.0).to(ACCUMULATE)
        output_gradient = tl.load(output_gradient_pointer + row + column, mask=load_mask, other=0.0).to(ACCUMULATE)
        total += probability * tl.where(probability == 0.0, 0.0, output_gradient)
    row_total = tl.sum(total, 0)
    if ROW_SUMS:
        tl.store(row_sums_pointer + tl.program_id(0), row_total)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        load_mask = (column // 16 * 16 < end) & (column < columns)
        probability = tl.load(probabilities_pointer + row + column, mask=load_mask, other=0.0).to(ACCUMULATE)
        output_gradient = tl.load(output_gradient_pointer + row + column, mask=load_mask, other=0.0).to(ACCUMULATE)
        weighted = probability * tl.where(probability == 0.0, 0.0, output_gradient)
        gradient = (weighted - probability * row_total) * scale
        tl.store(
            gradient_pointer + row + column, rounded(gradient, gradient_pointer.dtype.element_ty), mask=column < columns
        )


def _accumulate(tensor: Tensor) -> Any:
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


def row_tile(columns: int) -> dict[str, int]:
    """Return rows and warps per program: about 2048 elements of short rows, 32 elements per thread of long ones."""
    block = max(16, next_power_of_2(columns))
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(4, rows * block // 1024))}


def _shape_4d(x: Tensor) -> tuple[int, int, int, int]:
    """Return the shape as (batch, heads, queries, columns), padded with ones or with leading dimensions merged."""
    shape = (1,) * (4 - x.ndim) + tuple(x.shape)
    outer = 1
    for size in shape[:-3]:
        outer *= size
    return outer, shape[-3], shape[-2], shape[-1]


def triton_forward(
    x: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    sinks: Tensor | None = None,
    sink_weights: Tensor | None = None,
) -> Tensor:
    """Launch the forward kernel for this row length; `x` must be contiguous and not empty.

    With `sinks` their probabilities are written to `sink_weights`, shaped like `x` without its last dimension.
    """
    batch, heads, queries, columns = _shape_4d(x)
    probabilities = torch.empty_like(x)
    mask_bytes, strides = x, (0, 0, 0, 0)  # without a mask its pointer is not read
    if mask is not None:
        mask_bytes = mask.view(torch.uint8).expand(x.shape)  # strides of 0, no copy
        mask_bytes = mask_bytes.flatten(0, x.ndim - 4) if x.ndim > 4 else mask_bytes
        strides = (0,) * (4 - mask_bytes.ndim) + mask_bytes.stride()
    rows = batch * heads * queries
    arguments = (x, mask_bytes, probabilities, sinks, sink_weights, scale, rows, queries, columns, heads, *strides)
    options = {
        "CAUSAL": causal,
        "MASKED": mask is not None,
        "HAS_SINK": sinks is not None,
        "ACCUMULATE": _accumulate(x),
        "enable_fp_fusion": True,
    }
    if columns <= ONE_PASS_COLUMNS:
        tile = row_tile(columns)
        masked_softmax_kernel[(triton.cdiv(rows, tile["ROWS"]),)](*arguments, **options, **tile)
    else:
        long_masked_softmax_kernel[(rows,)](*arguments, **options, BLOCK=STEP, VECTOR=VECTOR, num_warps=LONG_WARPS)
    return probabilities


def triton_backward(
    output_gradient: Tensor, probabilities: Tensor, scale: float, causal: bool, row_sums: Tensor | None = None
) -> Tensor:
    """Launch the backward kernel for this row length; both tensors must be contiguous and not empty.

    sum(p * dp) of each row is written to `row_sums` if given.
    """
    batch, heads, queries, columns = _shape_4d(probabilities)
    gradient = torch.empty_like(probabilities)
    rows = batch * heads * queries
    tensors = (output_gradient, probabilities, gradient, row_sums)
    options: dict[str, Any] = {"CAUSAL": causal, "ROW_SUMS": row_sums is not None}
    options |= {"ACCUMULATE": _accumulate(gradient), "enable_fp_fusion": True}
    if columns <= ONE_PASS_COLUMNS:
        tile = row_tile(columns)
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        masked_softmax_backward_kernel[grid](*tensors, scale, rows, queries, columns, **options, **tile)
    else:
        long_masked_softmax_backward_kernel[(rows,)](
            *tensors, scale, queries, columns, **options, BLOCK=STEP, num_warps=LONG_WARPS
        )
    return gradient
