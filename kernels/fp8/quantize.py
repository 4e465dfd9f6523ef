"""Casts to fp8 with scales from the tensor itself (current scaling), in both layouts that the matmuls of a layer need.

An fp8 matmul on Hopper contracts the last dimension of both operands, so that the output gradient and the activations
of a layer are read along their rows by one product and along their columns by another: `quantize` returns the casts
of a matrix and of its transpose. Each is the rounded quotient of the values and their scale; the scale is at least
2^-100 / max, of zeros too, and inf or NaN where a value is, so that it propagates to every product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_op import custom_op
from ..launch import triton_runs_on
from .cast_kernels import triton_amax, triton_cast
from .operands import DTYPES, Quantized, QuantizedPair, Source, empty_cast, padding, source_shape
from .recipe import MAX_VALUE, Format, Fp8Recipe, Granularity
from .reference import produce, reference_amax, reference_cast, row_dots

Reduce = Callable[[Tensor], Tensor]
"""Elementwise maximum over ranks of int32 tensors: the bits of amaxes, whose order is theirs, with NaN the largest."""

_FUSED_BY_COMPILER = ("none", "rms_norm", "layer_norm")
"""Producers whose maxima the compiler may fuse with what comes before them."""

# ---------------------------------------------------------------- custom operations


@custom_op("stoker::fp8_amax")
def _amax(
    tensors: list[Tensor], producer: str, activation: str, granularity: str, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """Return the amax of the matrix and of its transpose; empty where not requested or not needed."""
    if triton_runs_on(tensors[0]):
        return triton_amax(tensors, producer, activation, granularity, rows, columns)
    return _eager_amax(produce(producer, tensors, activation)[0], granularity, rows, columns)


def _eager_amax(values: Tensor, granularity: str, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    none = values.new_empty(0, dtype=torch.float32)
    if granularity == "tensor":  # of rows first, as the statistics of a norm, so that one compiled kernel takes both
        return reference_amax(reference_amax(values, "row")[None], "tensor"), none
    return (
        reference_amax(values, "row") if rows else none,
        reference_amax(values.t(), "row") if columns else none,
    )


@torch.library.register_fake("stoker::fp8_amax")
def _(
    tensors: list[Tensor], producer: str, activation: str, granularity: str, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    height, width = source_shape(producer, tensors)
    sizes = (1, 0) if granularity == "tensor" else (height * rows, width * columns)
    first, second = (tensors[0].new_empty(size, dtype=torch.float32) for size in sizes)
    return first, second


@custom_op("stoker::fp8_cast")
def _cast(
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
    """Return data and scale of the cast of the matrix, then of its transpose; empty where not requested.

    With `product_format`, of a backward, also of the transpose of act(gate) * up, with this amax. Last, of a backward
    with gates, the sum over each row of the product, without the gate, times its gradient.
    """
    if triton_runs_on(tensors[0]):
        return triton_cast(
            tensors, producer, activation, row_amax, column_amax, format, granularity, margin, rows, columns,
            product_amax, product_format,
        )  # fmt: skip
    if tensors[0].dtype in DTYPES.values():  # of `transpose`
        tensors = [tensors[0].float()]
    values, product = produce(producer, tensors, activation)
    results: list[Tensor] = []
    for wanted, matrix, amax, kind in (
        (rows, values, row_amax, format),
        (columns, values.t(), row_amax if granularity == "tensor" else column_amax, format),
        (product_format, product.t(), product_amax, product_format or format),
    ):
        if not wanted:
            results += empty_cast(values, 0, 0, kind, granularity, False)
            continue
        if len(results):
            matrix = F.pad(matrix, (0, padding(matrix.shape[1], granularity)))
        results += reference_cast(matrix, amax, kind, granularity, margin)  # pyrefly: ignore[bad-argument-type]
    return *results, row_dots(producer, tensors, activation)  # pyrefly: ignore[bad-return]


@torch.library.register_fake("stoker::fp8_cast")
def _(
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
    height, width = source_shape(producer, tensors)
    padded, like = height + padding(height, granularity), tensors[0]
    inner = width // 2 if producer == "gated_backward" else width
    has_dots = producer.endswith("backward") and len(tensors) > 2
    return (
        *empty_cast(like, height, width, format, granularity, rows),
        *empty_cast(like, width, padded, format, granularity, columns),
        *empty_cast(like, inner, padded, product_format or format, granularity, bool(product_format)),
        like.new_empty(height * has_dots, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32),
    )


# ---------------------------------------------------------------- public functions


def amaxes(
    source: Tensor | Source,
    granularity: Granularity,
    *,
    rows: bool = True,
    columns: bool = True,
    reduce: Reduce | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes that the scales of `quantize` follow from.

    Args:
        source: (M, K), or what makes it.
        granularity: as in `quantize`; the maxima of tiles and blocks are found by the cast.
        rows: for the cast of the matrix.
        columns: for the cast of its transpose.
        reduce: takes their maximum over ranks that hold parts of one tensor; None: each rank has its own scales.

    Returns:
        Maxima for the cast of the matrix, `tensor` (1,), `row` (M,), and of its transpose, `row` (K,), fp32; empty
        where not requested, and that of the transpose for `tensor`, whose scale is the same.
    """
    producer, tensors, activation = _parts(source)
    if granularity in ("tile", "block"):
        return tensors[0].new_empty(0, dtype=torch.float32), tensors[0].new_empty(0, dtype=torch.float32)
    if producer in _FUSED_BY_COMPILER and torch.compiler.is_compiling():
        first, second = _eager_amax(produce(producer, tensors, activation)[0], granularity, rows, columns)
    else:
        first, second = _amax(tensors, producer, activation, granularity, rows, columns)
    return reduce_amax(first, reduce), reduce_amax(second, reduce)


def reduce_amax(amax: Tensor, reduce: Reduce | None) -> Tensor:
    """Return the maximum over the ranks of `reduce`; NaN if one is."""
    if reduce is None or not amax.numel():
        return amax
    return reduce(amax.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)  # a NaN may have a sign


def quantize(
    source: Tensor | Source,
    format: Format,
    granularity: Granularity,
    *,
    rows: bool = True,
    columns: bool = True,
    margin: int = 0,
    amax: tuple[Tensor, Tensor] | None = None,
    reduce: Reduce | None = None,
) -> QuantizedPair:
    """Cast a matrix and its transpose to fp8.

    Args:
        source: (M, K), any strides and floating dtype, or what makes it; computed in fp32 (fp64 for fp64).
        format: `e4m3` or `e5m2`.
        granularity: elements with a common scale, in each of the two casts along its rows: a transpose has other tiles.
        rows: cast the matrix.
        columns: cast the transpose.
        margin: scales are 2^margin times larger.
        amax: as `amaxes` returns them, from there or from what made the tensor; None computes them.
        reduce: as in `amaxes`, for an `amax` that is computed.

    Returns:
        Both casts, None where not requested. Not differentiable.

    Raises:
        ValueError: `source` is no matrix of floating dtype.
    """
    producer, tensors, activation = _parts(source)
    if amax is None:
        amax = amaxes(source, granularity, rows=rows, columns=columns, reduce=reduce)
    data, scale, transposed, transposed_scale, *_ = _cast(
        tensors, producer, activation, *amax, format, granularity, margin, rows, columns
    )
    return QuantizedPair(
        Quantized(data, scale, granularity) if rows else None,
        Quantized(transposed, transposed_scale, granularity) if columns else None,
    )


def transpose(matrix: Quantized) -> Quantized:
    """Return the transpose of a weight, exactly: one byte per element is read, and one written.

    Args:
        matrix: (N, K), with a granularity that a transpose has too: `tensor` or `block`; N a multiple of 16.

    Returns:
        (K, N), with the granularity of `matrix`.
    """
    format = next(name for name, dtype in DTYPES.items() if dtype == matrix.data.dtype)
    largest = torch.full((1,), MAX_VALUE[format], dtype=torch.float32, device=matrix.data.device)  # a scale of 1
    data = _cast([matrix.data], "none", "", largest, largest, format, "tensor", 0, False, True)[2]
    scale = matrix.scale
    if matrix.granularity == "block":
        scale = empty_cast(scale, data.shape[0], data.shape[1], format, "block", True)[1].copy_(scale.t())
    return Quantized(data, scale, matrix.granularity)


class BackwardCasts(NamedTuple):
    """Results of the backward of an activation.

    Attributes:
        gradient: casts of the gradient of [gate | up], (M, 2 f), or of the activation's input, (M, f).
        product: cast of the transpose of act(gate) * up, (f, M); None if not requested.
        dots: of experts, the sum over each row of act(gate) * up times its gradient, both without the gate, (M,); else
            empty.
    """

    gradient: QuantizedPair
    product: Quantized | None
    dots: Tensor


def quantize_backward(
    source: Source,
    recipe: Fp8Recipe,
    product_amax: Tensor | None,
    *,
    rows: bool,
    columns: bool,
    amax: tuple[Tensor, Tensor] | None = None,
    reduce: Reduce | None = None,
) -> BackwardCasts:
    """Cast the gradient of an activation's input, and the transpose of its result, which the same pass computes.

    Args:
        source: with the producer `gated_backward` or `activation_backward`.
        recipe: the gradient has the format `backward`, the product `forward`.
        product_amax: amax of the product, for rowwise scales of its columns, of tiles empty; None: no cast of it.
        rows: cast the gradient.
        columns: cast its transpose.
        amax: as in `quantize`.
        reduce: as in `amaxes`, for an `amax` that is computed.

    Returns:
        The casts; not differentiable.
    """
    granularity = recipe.inputs
    if amax is None:
        amax = amaxes(source, granularity, rows=rows, columns=columns, reduce=reduce)
    kind = "" if product_amax is None else recipe.forward
    *results, dots = _cast(
        list(source.tensors), source.producer, source.activation, *amax, recipe.backward, granularity,
        recipe.margin, rows, columns, product_amax, kind,
    )  # fmt: skip
    first, second, third = (Quantized(results[i], results[i + 1], granularity) for i in (0, 2, 4))
    pair = QuantizedPair(first if rows else None, second if columns else None)
    return BackwardCasts(pair, third if kind else None, dots)


def _parts(source: Tensor | Source) -> tuple[Any, list[Tensor], str]:
    """Return producer, tensors and activation of what is cast."""
    if isinstance(source, Source):
        return source.producer, [tensor.detach() for tensor in source.tensors], source.activation
    if source.ndim != 2 or not source.is_floating_point():
        raise ValueError(f"`source` {tuple(source.shape)} of {source.dtype} must be a matrix, floating point.")
    return "none", [source.detach()], ""
