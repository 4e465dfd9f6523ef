"""Fused softmax(scale * x + mask) over the last dimension, for rows of any length.

Forward and backward read and write each element once up to 32768 columns; longer rows are read twice, the second time
from cache. A causal mask is never materialized, and beyond its edge at most a few elements are read. Only the
probabilities are saved for the backward pass.

Masks follow Megatron's FusedScaleMaskSoftmax: True masks out a position. Unlike there, a fully masked row gives zeros
and a zero gradient, and every length, alignment and dtype is supported.
"""

# Triton resolves constexpr conditions at compile time, which pyright does not know:
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .launch import jit, next_power_of_2, rounded, tl, triton, triton_runs_on

ONE_PASS_COLUMNS = 32768  # a row in fp32 is half the registers of a multiprocessor; reading it twice is slower
TILE = 2048  # elements per program for several short rows
VECTOR = 8  # adjacent columns per thread: 16-byte loads
STEP = 8192  # columns per step over a long row
LONG_WARPS = 16


# ---------------------------------------------------------------- reference


def reference_scaled_masked_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False, sinks: Tensor | None = None
) -> Tensor:
    """Reference in plain PyTorch, any device and dtype; arguments as in `scaled_masked_softmax`."""
    if x.numel() == 0:
        return torch.empty_like(x)
    return _wide_probabilities(x, mask, scale, causal, sinks)[..., : x.shape[-1]].to(x.dtype)


def _wide_probabilities(x: Tensor, mask: Tensor | None, scale: float, causal: bool, sinks: Tensor | None) -> Tensor:
    """Return the probabilities in fp32 or fp64, with `sinks` also those of the sinks, as the last column."""
    scores = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    if causal:
        queries, keys = x.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=x.device).triu(keys - queries + 1)
        scores = scores.masked_fill(later, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    empty = scores.amax(dim=-1, keepdim=True) == float("-inf")
    # fully masked rows are made finite before the softmax, so that neither they nor their gradients are NaN
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)


def reference_backward(output_gradient: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    """Return the gradient of `x`; it is 0 where the probability is 0, whatever the output gradient holds there."""
    accumulate = torch.promote_types(probabilities.dtype, torch.float32)
    wide = probabilities.to(accumulate)
    visible_gradient = output_gradient.to(accumulate).masked_fill(probabilities == 0, 0.0)
    weighted = wide * visible_gradient
    return ((weighted - wide * weighted.sum(dim=-1, keepdim=True)) * scale).to(probabilities.dtype)


# ---------------------------------------------------------------- Triton


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
def _forward_kernel(
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
def _long_forward_kernel(
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
def _backward_kernel(
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
def _long_backward_kernel(
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


def _tile(columns: int) -> dict[str, int]:
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
        tile = _tile(columns)
        _forward_kernel[(triton.cdiv(rows, tile["ROWS"]),)](*arguments, **options, **tile)
    else:
        _long_forward_kernel[(rows,)](*arguments, **options, BLOCK=STEP, VECTOR=VECTOR, num_warps=LONG_WARPS)
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
        tile = _tile(columns)
        grid = (triton.cdiv(rows, tile["ROWS"]),)
        _backward_kernel[grid](*tensors, scale, rows, queries, columns, **options, **tile)
    else:
        _long_backward_kernel[(rows,)](*tensors, scale, queries, columns, **options, BLOCK=STEP, num_warps=LONG_WARPS)
    return gradient


# ---------------------------------------------------------------- custom operations


@torch.library.custom_op("stoker::scaled_masked_softmax", mutates_args=())
def _scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    if triton_runs_on(x) and x.numel():
        return triton_forward(x.contiguous(), mask, scale, causal)
    return reference_scaled_masked_softmax(x, mask, scale, causal).contiguous()


@_scaled_masked_softmax.register_fake
def _(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("stoker::scaled_masked_softmax_backward", mutates_args=())
def _scaled_masked_softmax_backward(
    output_gradient: Tensor, probabilities: Tensor, scale: float, causal: bool
) -> Tensor:
    if triton_runs_on(probabilities) and probabilities.numel():
        return triton_backward(output_gradient.contiguous(), probabilities.contiguous(), scale, causal)
    return reference_backward(output_gradient, probabilities, scale).contiguous()


@_scaled_masked_softmax_backward.register_fake
def _(output_gradient: Tensor, probabilities: Tensor, scale: float, causal: bool) -> Tensor:
    return torch.empty_like(probabilities, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    _, _, ctx.scale, ctx.causal = inputs


def _backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor, None, None, None]:
    gradient = _scaled_masked_softmax_backward(output_gradient, ctx.saved_tensors[0], ctx.scale, ctx.causal)
    return gradient, None, None, None


_scaled_masked_softmax.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("stoker::scaled_masked_softmax_sinks", mutates_args=())
def _softmax_with_sinks(
    x: Tensor, mask: Tensor | None, scale: float, causal: bool, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the probabilities, and those of the sinks, (batch, heads, queries) in fp32 or fp64."""
    weights = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    if triton_runs_on(x) and x.numel():
        return triton_forward(x.contiguous(), mask, scale, causal, sinks.contiguous(), weights), weights
    wide = _wide_probabilities(x, mask, scale, causal, sinks)
    return wide[..., :-1].to(x.dtype).contiguous(), wide[..., -1].contiguous()


@_softmax_with_sinks.register_fake
def _(x: Tensor, mask: Tensor | None, scale: float, causal: bool, sinks: Tensor) -> tuple[Tensor, Tensor]:
    weights = x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x, memory_format=torch.contiguous_format), weights


@torch.library.custom_op("stoker::scaled_masked_softmax_sinks_backward", mutates_args=())
def _softmax_with_sinks_backward(
    output_gradient: Tensor, probabilities: Tensor, sink_weights: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, in fp32 or fp64, of the sinks."""
    if triton_runs_on(probabilities) and probabilities.numel():
        row_sums = torch.empty_like(sink_weights)
        gradient = triton_backward(output_gradient.contiguous(), probabilities.contiguous(), scale, causal, row_sums)
    else:
        gradient = reference_backward(output_gradient, probabilities, scale).contiguous()
        visible_gradient = output_gradient.to(sink_weights.dtype).masked_fill(probabilities == 0, 0.0)
        row_sums = (probabilities.to(sink_weights.dtype) * visible_gradient).sum(dim=-1)
    return gradient, -(sink_weights * row_sums).sum((0, 2))


@_softmax_with_sinks_backward.register_fake
def _(
    output_gradient: Tensor, probabilities: Tensor, sink_weights: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    like = torch.empty_like(probabilities, memory_format=torch.contiguous_format)
    return like, sink_weights.new_empty(sink_weights.shape[1])


def _save_with_sinks(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.sinks_dtype = inputs[4].dtype
    _, _, ctx.scale, ctx.causal, _ = inputs


def _backward_with_sinks(ctx: Any, output_gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, Tensor]:
    probabilities, sink_weights = ctx.saved_tensors
    gradient, of_sinks = _softmax_with_sinks_backward(
        output_gradient, probabilities, sink_weights, ctx.scale, ctx.causal
    )
    return gradient, None, None, None, of_sinks.to(ctx.sinks_dtype)


_softmax_with_sinks.register_autograd(_backward_with_sinks, setup_context=_save_with_sinks)


# ---------------------------------------------------------------- public function


def scaled_masked_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False, sinks: Tensor | None = None
) -> Tensor:
    """Return softmax(scale * x) over the positions that are not masked out.

    Args:
        x: (..., queries, keys), bf16, fp16, fp32 or fp64; computed in fp32 (fp64 for fp64).
        mask: bool, broadcastable to `x`; True masks out a position, as in Megatron. (The masks of SDPA and the
            `key_padding_mask` of `flash_attention` have the opposite meaning.) None for no mask.
        scale: factor of `x`, any sign.
        causal: query i attends to keys 0 to i + keys - queries only (bottom-right aligned).
        sinks: fp32 (or fp64) (heads,), for `x` (batch, heads, queries, keys): each adds exp(sink) to the denominator
            of its head's rows (Megatron's learnable softmax; zeros are its off-by-one softmax). None for none.

    Returns:
        Probabilities, same shape and dtype as `x`, differentiable once with respect to `x` and `sinks`. Masked
        positions are 0 and get gradient 0, whatever `x` and the output gradient hold there. Rows that are fully masked
        or all -inf are 0, and so are their gradients.

    Raises:
        ValueError: `x` is not floating point or has fewer than two dimensions with `causal`; `mask` is not bool, does
            not broadcast to `x` or is on another device; `sinks` does not fit `x`.
    """
    if not x.is_floating_point() or x.ndim < (2 if causal else 1):
        raise ValueError(
            f"`x` must be floating point, (..., queries, keys), but is {x.dtype} {tuple(x.shape)} (causal={causal})."
        )
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"`mask` must be bool (True masks out), but is {mask.dtype}.")
        if mask.device != x.device:
            raise ValueError(f"`mask` must be on the device of `x` ({x.device}), but is on {mask.device}.")
        sizes = zip(mask.shape[::-1], x.shape[::-1], strict=False)
        if mask.ndim > x.ndim or any(size not in (1, target) for size, target in sizes):
            raise ValueError(f"`mask` {tuple(mask.shape)} must broadcast to `x` {tuple(x.shape)}.")
    if sinks is None:
        return _scaled_masked_softmax(x, mask, float(scale), causal)
    if x.ndim != 4 or sinks.shape != (x.shape[1],) or sinks.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"`sinks` {tuple(sinks.shape)} of {sinks.dtype} must be (heads,), fp32, for `x` (batch, heads, queries, "
            f"keys), but `x` is {tuple(x.shape)}."
        )
    return _softmax_with_sinks(x, mask, float(scale), causal, sinks)[0]
