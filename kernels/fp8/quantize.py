"""Casts to fp8 with scales from the tensor itself (current scaling), in both layouts that the matmuls of a layer need.

An fp8 matmul on Hopper contracts the last dimension of both operands, so that the output gradient and the activations
of a layer are read along their rows by one product and along their columns by another: `quantize` returns the casts
of a matrix and of its transpose. Each is the rounded quotient of the values and their scale; the scale is at least
2^-100 / max, of zeros too, and inf or NaN where a value is, so that it propagates to every product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .recipe import MAX_VALUE, TILE, Format, Granularity

DTYPES: dict[Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SMALLEST_AMAX = 2.0**-100
"""What smaller maxima count as, so that neither a scale nor its reciprocal overflows."""

Reduce = Callable[[Tensor], Tensor]
"""Elementwise maximum over ranks of int32 tensors: the bits of amaxes, whose order is theirs, with NaN the largest."""


class Quantized(NamedTuple):
    """A matrix in fp8, contiguous along the rows.

    Attributes:
        data: (M, K) in fp8.
        scale: fp32; the value of an element is `data` times its scale. `tensor` (1,), `row` (M, 1), `tile`
            (M, K / 128, rounded up) with strides (1, M), `block` (M / 128, K / 128, both rounded up) in rows padded to
            a multiple of 4 scales, as cuBLAS reads them.
        granularity: elements with a common scale.
    """

    data: Tensor
    scale: Tensor
    granularity: Granularity


class QuantizedPair(NamedTuple):
    """Casts of a matrix.

    Attributes:
        rows: cast of the matrix, (M, K); None if not requested.
        columns: cast of its transpose, (K, M), with M padded by zeros to a multiple of 16, of 128 for `tile`.
    """

    rows: Quantized | None
    columns: Quantized | None


# ---------------------------------------------------------------- reference


def scale_of(amax: Tensor, format: Format, margin: int = 0, power_of_two: bool = False) -> Tensor:
    """Return the scales of these maxima, fp32; inf and NaN stay."""
    scale = amax.float().clamp_min(SMALLEST_AMAX) / MAX_VALUE[format] * 2.0**margin
    if power_of_two:  # the next exponent, unless the fraction is 0
        rounded = ((scale.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, rounded)
    return scale


def cast_to(values: Tensor, scale: Tensor, format: Format) -> Tensor:
    """Return values / scale in fp8, rounded to nearest, ties to even; beyond the largest value, saturated."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32)) * (1.0 / scale)
    return wide.clamp(-MAX_VALUE[format], MAX_VALUE[format]).to(DTYPES[format])


def reference_amax(tensor: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest magnitudes of a matrix (M, K): (1,), or for `row` (M,); fp32."""
    magnitudes = tensor.detach().abs()
    if not tensor.numel():
        return magnitudes.new_zeros(tensor.shape[0] if granularity == "row" else 1, dtype=torch.float32)
    return (magnitudes.amax(1) if granularity == "row" else magnitudes.amax().view(1)).float()


def reference_cast(
    tensor: Tensor, amax: Tensor | None, format: Format, granularity: Granularity, margin: int, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Return data and scale of `Quantized` of a matrix (M, K), whose amax is that of its granularity, if any."""
    if granularity in ("tensor", "row"):
        assert amax is not None
        scale = scale_of(amax, format, margin, power_of_two)
        scale = scale[:, None] if granularity == "row" else scale
        return cast_to(tensor, scale, format).contiguous(), scale
    rows, width = tensor.shape
    height = TILE if granularity == "block" else 1
    padded = F.pad(tensor, (0, -width % TILE, 0, -rows % height))
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // TILE, TILE)
    amax = blocks.abs().amax((1, 3)) if tensor.numel() else tensor.new_zeros(blocks.shape[0], blocks.shape[2])
    scale = scale_of(amax, format, margin, power_of_two)
    data = cast_to(blocks, scale[:, None, :, None], format).view(padded.shape)[:rows, :width].contiguous()
    if granularity == "tile":
        return data, scale.t().contiguous().t()
    return data, F.pad(scale, (0, -scale.shape[1] % 4))[:, : scale.shape[1]]


def dequantize(matrix: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of a quantized matrix, (M, K)."""
    scale, (rows, width) = matrix.scale, matrix.data.shape
    if matrix.granularity == "block":
        scale = scale.repeat_interleave(TILE, 0)[:rows]
    if matrix.granularity in ("tile", "block"):
        scale = scale.repeat_interleave(TILE, 1)[:, :width]
    return matrix.data.to(dtype) * scale.to(dtype)


# ---------------------------------------------------------------- custom operations


@torch.library.custom_op("stoker::fp8_amax", mutates_args=())
def _amax(tensor: Tensor, granularity: str, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Return the amax of the matrix and of its transpose; empty where not requested or not needed."""
    none = tensor.new_empty(0, dtype=torch.float32)
    if granularity == "tensor":
        return reference_amax(tensor, "tensor"), none
    return (
        reference_amax(tensor, "row") if rows else none,
        reference_amax(tensor.t(), "row") if columns else none,
    )


@_amax.register_fake
def _(tensor: Tensor, granularity: str, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    sizes = (1, 0) if granularity == "tensor" else (tensor.shape[0] * rows, tensor.shape[1] * columns)
    first, second = (tensor.new_empty(size, dtype=torch.float32) for size in sizes)
    return first, second


@torch.library.custom_op("stoker::fp8_cast", mutates_args=())
def _cast(
    tensor: Tensor,
    row_amax: Tensor,
    column_amax: Tensor,
    format: str,
    granularity: str,
    margin: int,
    power_of_two: bool,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return data and scale of the cast of the matrix, then of its transpose; empty where not requested."""
    results: list[Tensor] = []
    for wanted, matrix, amax in ((rows, tensor, row_amax), (columns, tensor.t(), column_amax)):
        if not wanted:
            results += [tensor.new_empty(0, dtype=DTYPES[format]), tensor.new_empty(0, dtype=torch.float32)]  # type: ignore[index]
            continue
        if matrix is not tensor:
            matrix = F.pad(matrix, (0, _padding(matrix.shape[1], granularity)))
        amax = row_amax if granularity == "tensor" else amax
        data, scale = reference_cast(matrix, amax, format, granularity, margin, power_of_two)  # type: ignore[arg-type]
        results += [data, scale if granularity != "tensor" else scale.clone()]
    return results[0], results[1], results[2], results[3]


@_cast.register_fake
def _(
    tensor: Tensor,
    row_amax: Tensor,
    column_amax: Tensor,
    format: str,
    granularity: str,
    margin: int,
    power_of_two: bool,
    rows: bool,
    columns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    height, width = tensor.shape
    return (
        *_empty_cast(tensor, height, width, format, granularity, rows),  # type: ignore[return-value]
        *_empty_cast(tensor, width, height + _padding(height, granularity), format, granularity, columns),
    )


def _padding(length: int, granularity: str) -> int:
    """Return the zeros after the rows of a transpose, along which products contract in steps of 16 or whole tiles."""
    return -length % (TILE if granularity == "tile" else 16)


def _empty_cast(
    like: Tensor, height: int, width: int, format: str, granularity: str, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Return uninitialized data and scale of a cast (height, width), in the layout of `Quantized`."""
    dtype = DTYPES[format]  # type: ignore[index]
    if not wanted:
        return like.new_empty(0, dtype=dtype), like.new_empty(0, dtype=torch.float32)
    data = like.new_empty(height, width, dtype=dtype)
    across = (width + TILE - 1) // TILE
    if granularity == "tile":
        return data, like.new_empty(across, height, dtype=torch.float32).t()
    if granularity == "block":
        down, padded = (height + TILE - 1) // TILE, (across + 3) // 4 * 4
        return data, like.new_empty(down, padded, dtype=torch.float32)[:, :across]
    return data, like.new_empty((height, 1) if granularity == "row" else (1,), dtype=torch.float32)


# ---------------------------------------------------------------- public functions


def amaxes(
    tensor: Tensor, granularity: Granularity, *, rows: bool = True, columns: bool = True, reduce: Reduce | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes that the scales of `quantize` follow from.

    Args:
        tensor: (M, K).
        granularity: as in `quantize`; the maxima of tiles and blocks are found by the cast.
        rows: for the cast of the matrix.
        columns: for the cast of its transpose.
        reduce: takes their maximum over ranks that hold parts of one tensor; None: each rank has its own scales.

    Returns:
        Maxima for the cast of the matrix, `tensor` (1,), `row` (M,), and of its transpose, `row` (K,), fp32; empty
        where not requested, and that of the transpose for `tensor`, whose scale is the same.
    """
    if granularity in ("tile", "block"):
        return tensor.new_empty(0, dtype=torch.float32), tensor.new_empty(0, dtype=torch.float32)
    first, second = _amax(tensor, granularity, rows, columns)
    return reduce_amax(first, reduce), reduce_amax(second, reduce)


def reduce_amax(amax: Tensor, reduce: Reduce | None) -> Tensor:
    """Return the maximum over the ranks of `reduce`; NaN if one is."""
    if reduce is None or not amax.numel():
        return amax
    return reduce(amax.view(torch.int32)).view(torch.float32)


def quantize(
    tensor: Tensor,
    format: Format,
    granularity: Granularity,
    *,
    rows: bool = True,
    columns: bool = True,
    margin: int = 0,
    power_of_two: bool = False,
    amax: tuple[Tensor, Tensor] | None = None,
    reduce: Reduce | None = None,
) -> QuantizedPair:
    """Cast a matrix and its transpose to fp8.

    Args:
        tensor: (M, K), any strides and floating dtype; computed in fp32 (fp64 for fp64).
        format: `e4m3` or `e5m2`.
        granularity: elements with a common scale, in each of the two casts along its rows: a transpose has other tiles.
        rows: cast the matrix.
        columns: cast the transpose.
        margin: scales are 2^margin times larger.
        power_of_two: round scales up to powers of two.
        amax: from `amaxes` or the producer of the tensor, as `amaxes` returns them; None computes them.
        reduce: as in `amaxes`, for an `amax` that is computed.

    Returns:
        Both casts, None where not requested. Not differentiable.

    Raises:
        ValueError: `tensor` is no matrix of floating dtype.
    """
    if tensor.ndim != 2 or not tensor.is_floating_point():
        raise ValueError(f"`tensor` {tuple(tensor.shape)} of {tensor.dtype} must be a matrix, floating point.")
    tensor = tensor.detach()
    if amax is None:
        amax = amaxes(tensor, granularity, rows=rows, columns=columns, reduce=reduce)
    data, scale, transposed, transposed_scale = _cast(
        tensor, *amax, format, granularity, margin, power_of_two, rows, columns
    )
    return QuantizedPair(
        Quantized(data, scale, granularity) if rows else None,
        Quantized(transposed, transposed_scale, granularity) if columns else None,
    )
