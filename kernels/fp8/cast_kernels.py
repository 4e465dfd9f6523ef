"""Triton kernels of the casts to fp8: maxima in one pass, then both layouts of the cast in another.

What is cast may be a matrix or what an elementwise producer makes of others, which each pass computes anew, so that it
is written in fp8 only. Bytes moved per element of the cast, in bf16, of which fp8 without a producer takes 2 + 2 + 2:

| producer | read for the maxima | read for the cast | written |
|---|---|---|---|
| none | 2 | 2 | 1 per layout |
| rms_norm, layer_norm; activation | 2 | 2 | 1 per layout |
| gated: act(gate) * up | 4 | 4 | 1 per layout |
| gated_backward: gradients of gate and up | 3 | 3 | 1 per layout, and half of one for act(gate) * up |

Tiles and blocks of 128 need no pass for maxima. A compiled layer takes those of a norm in the kernel of its statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations import activation_with_derivative
from ..launch import _INTERPRETED_IN_KERNEL, INTERPRETED, jit, tl, triton
from .operands import empty_cast, padding
from .recipe import MAX_VALUE, TILE


@jit
def _round_to_fp8(value, MAX: tl.constexpr, dtype: tl.constexpr):
    """Cast fp32 to fp8, rounding to nearest, ties to even, and saturating, as GPUs do; the interpreter does not."""
    if _INTERPRETED_IN_KERNEL:
        fraction = 3 if dtype == tl.float8e4nv else 2
        smallest = -6 if dtype == tl.float8e4nv else -14
        value = tl.where(value > MAX, MAX, tl.where(value < -MAX, -MAX, value))
        exponent = ((value.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        exponent = tl.where(exponent < smallest, smallest, exponent) - fraction
        step = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        value = ((value / step + 12582912.0) - 12582912.0) * step  # 1.5 * 2^23: no fraction is left
    return value.to(dtype)


@jit
def _magnitude(value):
    """Return |value| as int32 bits, whose order is that of the magnitudes, with NaN the largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def _scale_of(bits, MAX: tl.constexpr, FACTOR: tl.constexpr):
    """Return the scale of a maximum, given as int32 bits, and its reciprocal; as `reference.scale_of`."""
    bits = tl.maximum(bits & 0x7FFFFFFF, 0x0D800000)  # 2^-100; without the sign that a NaN may have
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, MAX, tl.float32)) * FACTOR
    return scale, tl.div_rn(tl.full(bits.shape, 1.0, tl.float32), scale)


@jit
def _produce(
    first_pointer, second_pointer, gain_pointer, mean_pointer, bias_pointer,
    row, column, inside, rows, width, row_stride,
    PRODUCER: tl.constexpr, KIND: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Return a tile of what is cast, its second part (of `gated_backward`), the product act(gate) * up, and the product
    times its gradient, in fp32.

    first_pointer: of gates, gate and up, (rows, 2 width), else (rows, width); of `gather` (tokens, width).
    second_pointer: of a backward, the gradient of the product, (rows, width); of a norm, fp32 (rows,), its inverse root
    mean square or deviation; of `gather` the assignment of each row, int32 (rows,), TOPK of a token.
    gain_pointer (width,): of a norm. mean_pointer (rows,), fp32, and bias_pointer (width,): of `layer_norm`. Of an
    activation with TOPK: gain_pointer, factors of product and gradient by assignment; mean_pointer, as of `gather`.
    """
    assignment = row
    factor = 1.0
    if PRODUCER == "gather":
        assignment = tl.load(second_pointer + row, mask=row < rows, other=-1)
        inside = inside & (assignment >= 0)
        row = assignment // TOPK
    if TOPK and PRODUCER != "gather":
        assignment = tl.load(mean_pointer + row, mask=row < rows, other=-1)
        inside = inside & (assignment >= 0)
    place = first_pointer + row.to(tl.int64) * row_stride + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = value
    product = value
    dot = value
    if PRODUCER == "rms_norm" or PRODUCER == "layer_norm":
        if PRODUCER == "layer_norm":
            value -= tl.load(mean_pointer + row, mask=row < rows, other=0.0)
        value *= tl.load(second_pointer + row, mask=row < rows, other=0.0)
        value *= tl.load(gain_pointer + column, mask=column < width, other=0.0).to(tl.float32)
        if PRODUCER == "layer_norm":
            value += tl.load(bias_pointer + column, mask=column < width, other=0.0).to(tl.float32)
        value = tl.where(inside, value, 0.0)
    elif PRODUCER != "none" and PRODUCER != "gather":
        active, slope = activation_with_derivative(value, KIND)
        product = active
        if PRODUCER == "gated" or PRODUCER == "gated_backward":
            up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
            product = active * up
            slope *= up
        if TOPK:
            factor = tl.load(gain_pointer + assignment, mask=assignment >= 0, other=0.0).to(tl.float32)
        if PRODUCER == "gated_backward" or PRODUCER == "activation_backward":
            outer = second_pointer + row.to(tl.int64) * width + column
            outer = tl.load(outer, mask=inside, other=0.0).to(tl.float32)
            dot = outer * product
            if TOPK:
                outer *= factor
            second = outer * active
            value = outer * slope
        if TOPK:
            product *= factor
        if PRODUCER == "activation" or PRODUCER == "gated":
            value = product
    return value, second, product, dot


@jit
def amax_kernel(
    first_pointer, second_pointer, gain_pointer, mean_pointer, bias_pointer, row_amax_pointer, column_amax_pointer,
    rows, width, row_stride,
    PRODUCER: tl.constexpr, KIND: tl.constexpr, TOPK: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the maxima of one tile per program into int32 buffers of zeros.

    row_amax_pointer: (1,), with PER_ROW (rows,) if ROWS. column_amax_pointer: with PER_ROW (width,), of
    `gated_backward` (2 width,), if COLUMNS.
    """
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = (row < rows) & (column < width)
    value, second, _, _ = _produce(
        first_pointer, second_pointer, gain_pointer, mean_pointer, bias_pointer, row, column, inside, rows, width,
        row_stride, PRODUCER, KIND, TOPK,
    )  # fmt: skip
    bits = _magnitude(value)
    second_bits = bits
    both = bits
    if PRODUCER == "gated_backward":
        second_bits = _magnitude(second)
        both = tl.maximum(bits, second_bits)
    if not PER_ROW:
        tl.atomic_max(row_amax_pointer, tl.max(tl.max(both, axis=1), axis=0), sem="relaxed")
    else:
        if ROWS:
            place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.atomic_max(row_amax_pointer + place, tl.max(both, axis=1), mask=place < rows, sem="relaxed")
        if COLUMNS:
            place = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            tl.atomic_max(column_amax_pointer + place, tl.max(bits, axis=0), mask=place < width, sem="relaxed")
            if PRODUCER == "gated_backward":
                place += width
                tl.atomic_max(
                    column_amax_pointer + place, tl.max(second_bits, axis=0), mask=place < 2 * width, sem="relaxed"
                )


@jit
def _store_cast(
    value, amax_pointer, data_pointer, scale_pointer, row_tile, column_tile, first_row, first_column,
    part_rows, part_columns, rows, columns, scale_stride,
    GRANULARITY: tl.constexpr, MAX: tl.constexpr, FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Cast a tile of the part (part_rows, part_columns) at (first_row, first_column) of a matrix (rows, columns)."""
    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < part_rows
    row_of_all = first_row + row
    if GRANULARITY == "tensor":
        scale, reciprocal = _scale_of(tl.load(amax_pointer), MAX, FACTOR)
        if row_tile + column_tile + first_row + first_column == 0:
            tl.store(scale_pointer, scale)
        scaled = value * reciprocal
    elif GRANULARITY == "block":
        tl.static_assert(BLOCK_M == 128 and BLOCK_N == 128, "a block has 128 rows and columns")
        bits = tl.max(tl.max(_magnitude(value), axis=1), axis=0)
        scale, reciprocal = _scale_of(bits, MAX, FACTOR)
        tl.store(scale_pointer + row_tile * scale_stride + column_tile, scale)
        scaled = value * reciprocal
    else:
        if GRANULARITY == "row":
            bits = tl.load(amax_pointer + row_of_all, mask=inside, other=0)
            place = scale_pointer + row_of_all
            stored = row < tl.where(column_tile + first_column == 0, part_rows, 0)
        else:
            tl.static_assert(BLOCK_N == 128, "a tile has 128 columns")
            bits = tl.max(_magnitude(value), axis=1)
            place = scale_pointer + (column_tile + first_column // BLOCK_N).to(tl.int64) * rows + row_of_all
            stored = inside
        scale, reciprocal = _scale_of(bits, MAX, FACTOR)
        tl.store(place, scale, mask=stored)
        scaled = value * reciprocal[:, None]
    out = data_pointer + row_of_all.to(tl.int64)[:, None] * columns + (first_column + column)[None, :]
    element: tl.constexpr = data_pointer.dtype.element_ty
    tl.store(out, _round_to_fp8(scaled, MAX, element), mask=inside[:, None] & (column < part_columns)[None, :])


@jit
def cast_kernel(
    first_pointer, second_pointer, gain_pointer, mean_pointer, bias_pointer,
    row_amax_pointer, column_amax_pointer, product_amax_pointer,
    data_pointer, scale_pointer, transposed_pointer, transposed_scale_pointer,
    product_pointer, product_scale_pointer, dots_pointer, rows, width, padded_rows, row_stride, scale_stride,
    transposed_scale_stride,
    PRODUCER: tl.constexpr, KIND: tl.constexpr, TOPK: tl.constexpr, GRANULARITY: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRODUCT: tl.constexpr, MAX: tl.constexpr, PRODUCT_MAX: tl.constexpr, FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Cast one tile per program, in the layouts asked for.

    The amaxes are int32 bits, (1,), for `row` (rows,) and (parts * width,); parts is 2 for `gated_backward`.
    data_pointer (ROWS): (rows, parts * width). transposed_pointer (COLUMNS): (parts * width, padded_rows).
    product_pointer (PRODUCT, of a backward): the transpose of act(gate) * up, (width, padded_rows).
    dots_pointer (of a backward with TOPK): sums over the tile of the product times its gradient, (column tiles, rows).
    Scales are in the layout of `Quantized`.
    """
    row_tile, column_tile = tl.program_id(0), tl.program_id(1)
    row = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    column = (column_tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = (row < rows) & (column < width)
    value, second, product, dot = _produce(
        first_pointer, second_pointer, gain_pointer, mean_pointer, bias_pointer, row, column, inside, rows, width,
        row_stride, PRODUCER, KIND, TOPK,
    )  # fmt: skip
    gradients: tl.constexpr = PRODUCER == "gated_backward"
    if TOPK and (gradients or PRODUCER == "activation_backward"):
        place = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(dots_pointer + column_tile.to(tl.int64) * rows + place, tl.sum(dot, axis=1), mask=place < rows)
    whole = 2 * width if gradients else width
    if ROWS:
        _store_cast(
            value, row_amax_pointer, data_pointer, scale_pointer, row_tile, column_tile, 0, 0, rows, width, rows, whole,
            scale_stride, GRANULARITY, MAX, FACTOR, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    # the registers hold one tile of 128 x 128 at a time: it is loaded again, from L1, for each cast
    again: tl.constexpr = GRANULARITY == "tile" or GRANULARITY == "block"
    if COLUMNS:
        if ROWS and again:
            value, _, _, _ = _produce(
                first_pointer, second_pointer, gain_pointer, mean_pointer, bias_pointer, row, column, inside, rows,
                width, row_stride, PRODUCER, KIND, TOPK,
            )  # fmt: skip
        _store_cast(
            tl.trans(value), column_amax_pointer, transposed_pointer, transposed_scale_pointer, column_tile, row_tile,
            0, 0, width, padded_rows, whole, padded_rows, transposed_scale_stride,
            GRANULARITY, MAX, FACTOR, BLOCK_N, BLOCK_M,
        )  # fmt: skip
    if gradients:
        if again:
            _, second, _, _ = _produce(
                first_pointer, second_pointer, gain_pointer, mean_pointer, bias_pointer, row, column, inside, rows,
                width, row_stride, PRODUCER, KIND, TOPK,
            )  # fmt: skip
        if ROWS:
            _store_cast(
                second, row_amax_pointer, data_pointer, scale_pointer, row_tile, column_tile, 0, width, rows, width,
                rows, whole, scale_stride, GRANULARITY, MAX, FACTOR, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if COLUMNS:
            if ROWS and again:
                _, second, _, _ = _produce(
                    first_pointer, second_pointer, gain_pointer, mean_pointer, bias_pointer, row, column, inside,
                    rows, width, row_stride, PRODUCER, KIND, TOPK,
                )  # fmt: skip
            _store_cast(
                tl.trans(second), column_amax_pointer, transposed_pointer, transposed_scale_pointer, column_tile,
                row_tile, width, 0, width, padded_rows, whole, padded_rows, transposed_scale_stride,
                GRANULARITY, MAX, FACTOR, BLOCK_N, BLOCK_M,
            )  # fmt: skip
    if PRODUCT:
        if again:
            _, _, product, _ = _produce(
                first_pointer, second_pointer, gain_pointer, mean_pointer, bias_pointer, row, column, inside, rows,
                width, row_stride, PRODUCER, KIND, TOPK,
            )  # fmt: skip
        _store_cast(
            tl.trans(product), product_amax_pointer, product_pointer, product_scale_pointer, column_tile, row_tile,
            0, 0, width, padded_rows, width, padded_rows, transposed_scale_stride,
            GRANULARITY, PRODUCT_MAX, FACTOR, BLOCK_N, BLOCK_M,
        )  # fmt: skip


def amax_block() -> dict[str, int]:
    """Return the tile of a program of the maxima, and its warps."""
    return (
        {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4}
        if INTERPRETED
        else {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8}
    )


def cast_block(granularity: str, producer: str, *, of_experts: bool = False) -> dict[str, int]:
    """Return the tile of a program of the cast, and its warps."""
    wide = granularity == "block" or producer in ("gated_backward", "layer_norm")
    if granularity in ("tile", "block"):
        return {"BLOCK_M": TILE, "BLOCK_N": TILE, "num_warps": 16 if wide else 8}
    if INTERPRETED:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 4}
    if producer == "gated_backward":
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 16 if of_experts and granularity == "tensor" else 8}
    return {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8}


def _operands(tensors: list[Tensor], producer: str) -> tuple[tuple[Tensor | None, ...], int, int, int]:
    """Return the five operands of `_produce`, with contiguous rows, the rows and width of their tiles, and TOPK."""
    first, others = tensors[0], list[Tensor | None](tensors[1:])
    first = first if first.stride(1) == 1 else first.contiguous()
    height, topk = first.shape[0], 0
    if producer == "gather":
        _, order, places = tensors
        others, height, topk = [order], order.shape[0], places.shape[1]
    elif not producer.endswith("norm") and len(others) > 1:  # of experts
        order, gates = tensors[-2:]
        others, topk = [others[0] if producer.endswith("backward") else None, gates, order], gates.shape[1]
    second, gain, mean, bias = (
        *(None if tensor is None else tensor.contiguous() for tensor in others),
        *(None,) * (4 - len(others)),
    )
    parts = 2 if producer.startswith("gated") else 1
    return (first, second, gain, mean, bias), height, first.shape[1] // parts, topk


def _row_stride(operands: tuple[Tensor | None, ...]) -> int:
    assert operands[0] is not None
    return operands[0].stride(0)


def triton_amax(
    tensors: list[Tensor], producer: str, activation: str, granularity: str, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """Launch the kernel of the maxima; arguments and result as `quantize.amaxes`, without tiles and blocks."""
    operands, height, width, topk = _operands(tensors, producer)
    first = tensors[0]
    per_row = granularity == "row"
    whole = 2 * width if producer == "gated_backward" else width
    row_bits = first.new_zeros(height * rows if per_row else 1, dtype=torch.int32)
    column_bits = first.new_zeros(whole * columns if per_row else 0, dtype=torch.int32)
    if height * width:
        block = amax_block()
        grid = (triton.cdiv(height, block["BLOCK_M"]), triton.cdiv(width, block["BLOCK_N"]))
        amax_kernel[grid](
            *operands, row_bits, column_bits, height, width, _row_stride(operands),
            PRODUCER=producer, KIND=activation, TOPK=topk, PER_ROW=per_row, ROWS=rows, COLUMNS=columns,
            enable_fp_fusion=True, **block,
        )  # fmt: skip
    return row_bits.view(torch.float32), column_bits.view(torch.float32)


def triton_cast(
    tensors: list[Tensor],
    producer: str,
    activation: str,
    row_amax: Tensor,
    column_amax: Tensor,
    format: str,
    granularity: str,
    margin: int,
    rows: bool,
    columns: bool,
    product_amax: Tensor | None = None,
    product_format: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel of the casts; arguments and results as the custom operation in `quantize`."""
    operands, height, width, topk = _operands(tensors, producer)
    first = tensors[0]
    whole = 2 * width if producer == "gated_backward" else width
    padded = height + padding(height, granularity)
    if granularity == "tile" and producer == "gated_backward":
        assert width % TILE == 0
    results = (
        *empty_cast(first, height, whole, format, granularity, rows),
        *empty_cast(first, whole, padded, format, granularity, columns),
        *empty_cast(first, width, padded, product_format or format, granularity, bool(product_format)),
    )
    if granularity == "tensor":
        column_amax = row_amax
    block = cast_block(granularity, producer, of_experts=topk > 0)
    grid = (triton.cdiv(padded, block["BLOCK_M"]), triton.cdiv(width, block["BLOCK_N"]))
    has_dots = topk > 0 and producer.endswith("backward")
    dots = first.new_empty((grid[1], height) if has_dots else 0, dtype=torch.float32)
    if not padded * width:
        return *results, dots.sum(0) if has_dots else dots
    cast_kernel[grid](
        *operands, *(None if x is None else x.view(torch.int32) for x in (row_amax, column_amax, product_amax)),
        *results, dots, height, width, padded, _row_stride(operands), results[1].stride(0), results[3].stride(0),
        PRODUCER=producer, KIND=activation, TOPK=topk, GRANULARITY=granularity, ROWS=rows, COLUMNS=columns,
        PRODUCT=bool(product_format), MAX=MAX_VALUE[format],
        PRODUCT_MAX=MAX_VALUE[product_format or format],
        FACTOR=2.0**margin, enable_fp_fusion=True, **block,
    )  # fmt: skip
    return *results, dots.sum(0) if has_dots else dots
