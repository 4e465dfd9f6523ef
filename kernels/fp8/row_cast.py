"""Casts of what experts multiply by between their projections, in few passes over memory.

act(gate) * up is cast with a scale for each row, by a program that holds the row while it finds the maximum: in bf16 4
bytes are read for each element and 1 is written, where the scale of a tensor takes 8 and 1. Its backward is cast with a
scale that follows from maxima of what it multiplies, which are known before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import NONLINEARITIES, activation_with_derivative
from ..custom_op import custom_op
from ..launch import jit, next_power_of_2, tl, triton, triton_runs_on
from .cast_kernels import _magnitude, _round_to_fp8, _scale_of
from .operands import DTYPES, Quantized, source_shape
from .recipe import MAX_VALUE, Fp8Recipe
from .reference import produce, reference_amax, reference_cast, row_gates, slope

_LARGEST_BLOCK = 8192


class RowCast(NamedTuple):
    """Cast of what an activation makes, and what bounds its backward.

    Attributes:
        rows: (M, K), with scales of rows.
        amax: largest magnitude of each row, (M,), fp32.
        peaks: largest magnitude of each row of the derivatives, act(gate) and act'(gate) * up, (M,), fp32.
    """

    rows: Quantized
    amax: Tensor
    peaks: Tensor


@jit
def _activated(pointer, column, width, PARTS: tl.constexpr, KIND: tl.constexpr):
    """Return act(gate) * up, and the larger magnitude of both derivatives, of a part of a row."""
    inside = column < width
    gate = tl.load(pointer + column, mask=inside, other=0.0).to(tl.float32)
    active, slope = activation_with_derivative(gate, KIND)
    value = active
    peak = _magnitude(slope)
    if PARTS == 2:
        up = tl.load(pointer + width + column, mask=inside, other=0.0).to(tl.float32)
        value = active * up
        peak = tl.maximum(_magnitude(active), _magnitude(slope * up))
    # an activation of 0 may have a slope
    return tl.where(inside, value, 0.0), tl.where(inside, peak, 0)


@jit
def row_cast_kernel(
    source_pointer, data_pointer, scale_pointer, amax_pointer, peaks_pointer, width,
    PARTS: tl.constexpr, KIND: tl.constexpr, MAX: tl.constexpr, FACTOR: tl.constexpr,
    ONE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cast one row per program. source_pointer: (rows, PARTS * width); amax and peaks (rows,), as int32 bits."""
    row = tl.program_id(0).to(tl.int64)
    source = source_pointer + row * PARTS * width
    column = tl.arange(0, BLOCK)
    element: tl.constexpr = data_pointer.dtype.element_ty
    value, peak = _activated(source, column, width, PARTS, KIND)
    bits = _magnitude(value)
    if not ONE_BLOCK:
        for begin in range(BLOCK, width, BLOCK):
            value, more = _activated(source, begin + column, width, PARTS, KIND)
            bits = tl.maximum(bits, _magnitude(value))
            peak = tl.maximum(peak, more)
    largest = tl.max(bits, axis=0)
    scale, reciprocal = _scale_of(largest, MAX, FACTOR)
    tl.store(scale_pointer + row, scale)
    tl.store(amax_pointer + row, largest)
    tl.store(peaks_pointer + row, tl.max(peak, axis=0))
    out = data_pointer + row * width + column
    if ONE_BLOCK:
        tl.store(out, _round_to_fp8(value * reciprocal, MAX, element), mask=column < width)
    else:
        for begin in range(0, width, BLOCK):
            value, _ = _activated(source, begin + column, width, PARTS, KIND)
            tl.store(out + begin, _round_to_fp8(value * reciprocal, MAX, element), mask=begin + column < width)


def triton_row_cast(
    source: Tensor, producer: str, activation: str, format: str, margin: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel of `cast_activated`; returns data, scale, amax and peaks."""
    height, width = source_shape(producer, [source])
    source = source.contiguous()
    data = source.new_empty(height, width, dtype=DTYPES[format])
    scale = source.new_empty(height, 1, dtype=torch.float32)
    amax, peaks = (source.new_empty(height, dtype=torch.float32) for _ in range(2))
    if data.numel():
        block = min(_LARGEST_BLOCK, next_power_of_2(width))
        row_cast_kernel[(height,)](
            source, data, scale, amax.view(torch.int32), peaks.view(torch.int32), width,
            PARTS=2 if producer == "gated" else 1, KIND=activation, MAX=MAX_VALUE[format],
            FACTOR=2.0**margin, ONE_BLOCK=width <= block, BLOCK=block,
            num_warps=8 if block > 2048 else 4, enable_fp_fusion=True,
        )  # fmt: skip
    return data, scale, amax, peaks


@custom_op("stoker::fp8_row_cast")
def _row_cast(
    source: Tensor, producer: str, activation: str, format: str, margin: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return data, scale, amax and peaks."""
    if triton_runs_on(source):
        return triton_row_cast(source, producer, activation, format, margin)
    values = produce(producer, [source], activation)[0]
    amax = reference_amax(values, "row")
    data, scale = reference_cast(values, amax, format, "row", margin)  # pyrefly: ignore[bad-argument-type]
    first, *up = source.to(values.dtype).chunk(2 if producer == "gated" else 1, dim=1)
    derivatives = [slope(first, activation)]
    if up:
        derivatives = [derivatives[0] * up[0], NONLINEARITIES[activation](first)]
    return data, scale, amax, reference_amax(torch.cat(derivatives, 1), "row")


@torch.library.register_fake("stoker::fp8_row_cast")
def _(
    source: Tensor, producer: str, activation: str, format: str, margin: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    height, width = source_shape(producer, [source])
    amax, peaks = (source.new_empty(height, dtype=torch.float32) for _ in range(2))
    data = source.new_empty(height, width, dtype=DTYPES[format])
    return data, source.new_empty(height, 1, dtype=torch.float32), amax, peaks


@jit
def backward_amax_kernel(
    gradient_pointer, product_pointer, peaks_pointer, order_pointer, gates_pointer, amax_pointer, rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the maxima over BLOCK rows per program into amax, int32 bits of zeros, (2,); see `backward_amax`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    assignment = tl.load(order_pointer + row, mask=row < rows, other=-1)
    used = assignment >= 0
    gate = tl.load(gates_pointer + assignment, mask=used, other=0.0).to(tl.float32)
    gradient = gate * tl.load(gradient_pointer + row, mask=used, other=0.0)
    gradient *= tl.load(peaks_pointer + row, mask=used, other=0.0)
    product = gate * tl.load(product_pointer + row, mask=used, other=0.0)
    tl.atomic_max(amax_pointer, tl.max(_magnitude(gradient), axis=0), sem="relaxed")
    tl.atomic_max(amax_pointer + 1, tl.max(_magnitude(product), axis=0), sem="relaxed")


def triton_backward_amax(gradient: Tensor, product: Tensor, peaks: Tensor, order: Tensor, gates: Tensor) -> Tensor:
    """Launch the kernel of `backward_amax`."""
    amax = gates.new_zeros(2, dtype=torch.int32)
    if order.numel():
        block = 512
        backward_amax_kernel[(triton.cdiv(order.numel(), block),)](
            gradient, product, peaks, order, gates.contiguous(), amax, order.numel(), BLOCK=block, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return amax.view(torch.float32)


@custom_op("stoker::fp8_backward_amax")
def _backward_amax(gradient: Tensor, product: Tensor, peaks: Tensor, order: Tensor, gates: Tensor) -> Tensor:
    if triton_runs_on(gates):
        return triton_backward_amax(gradient, product, peaks, order, gates)
    gate = row_gates(order, gates).abs()
    found = torch.where(order >= 0, torch.stack((gate * gradient * peaks, gate * product)), 0)
    return (found.amax(1) if order.numel() else found.new_zeros(2)).float()


@torch.library.register_fake("stoker::fp8_backward_amax")
def _(gradient: Tensor, product: Tensor, peaks: Tensor, order: Tensor, gates: Tensor) -> Tensor:
    return gates.new_empty(2, dtype=torch.float32)


def cast_activated(projected: Tensor, recipe: Fp8Recipe, activation: str, *, gated: bool) -> RowCast:
    """Cast act(gate) * up, or act(x), with a scale for each row, whatever the scaling of the recipe.

    Args:
        projected: [gate | up] (R, 2 f), or x (R, f).
        recipe: of its format `forward`.
        activation: a name in `activations.FUSED_ACTIVATIONS`.
        gated: `projected` is [gate | up].
    """
    producer = "gated" if gated else "activation"
    data, scale, amax, peaks = _row_cast(projected, producer, activation, recipe.forward, recipe.margin)
    return RowCast(Quantized(data, scale, "row"), amax, peaks)


def backward_amax(gradient: Tensor, product: Tensor, peaks: Tensor, order: Tensor, gates: Tensor) -> Tensor:
    """Return an upper bound of the amax of the gradient of [gate | up], and the amax of act(gate) * up: (2,), fp32.

    The bound is the largest, over the rows, of the gate times the largest magnitudes of gradient and derivative, whose
    product is at least that of the elements.

    Args:
        gradient: largest magnitude of each row of the gradient of act(gate) * up, without the gate, (R,), fp32.
        product: `amax` of `cast_activated`.
        peaks: `peaks` of it.
        order: assignment of each row, (R,).
        gates: (T, k), which multiply both.
    """
    return _backward_amax(gradient, product, peaks, order, gates)
