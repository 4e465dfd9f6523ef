"""Casts of weights: kept by the caller for the micro batches of an optimizer step, or made for each product."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .operands import DTYPES, Quantized
from .quantize import Reduce, amaxes, quantize, transpose
from .recipe import Fp8Recipe


class WeightCast(NamedTuple):
    """Casts of a weight (N, K), or of a stack of them, which hold until the optimizer changes it.

    Attributes:
        rows: cast of the weight, which the forward reads.
        columns: cast of its transpose, which the backward reads; None to transpose `rows` in each backward, or where
            that has other scales (`Fp8Recipe.transposes_weights`), to cast the transpose there.
    """

    rows: Quantized
    columns: Quantized | None


def cast_weight(
    weight: Tensor,
    recipe: Fp8Recipe,
    *,
    columns: bool = True,
    reduce: Reduce | None = None,
    out: WeightCast | None = None,
) -> WeightCast:
    """Cast a weight, for all micro batches of an optimizer step.

    Args:
        weight: (N, K).
        recipe: the recipe of the layer.
        columns: cast the transpose too.
        reduce: as in `quantize.amaxes`, over ranks that hold parts of the weight.
        out: casts of an earlier step, whose memory is overwritten, so that CUDA graphs and compiled code find the new
            ones in the same place.

    Returns:
        The casts, `out` if given.
    """
    pair = quantize(weight, recipe.forward, recipe.weights, columns=columns, reduce=reduce, margin=recipe.margin)
    assert pair.rows is not None
    new = WeightCast(pair.rows, pair.columns)
    if out is None:
        return new
    for old, fresh in zip(out, new, strict=True):
        if old is not None and fresh is not None:
            old.data.copy_(fresh.data)
            old.scale.copy_(fresh.scale)
    return out


CastTensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Data and scale of the cast of a weight and of its transpose, as arguments of an autograd function; None without."""


def cast_tensors(cast: WeightCast | None) -> CastTensors:
    """Return the tensors of a cast."""
    rows, columns = cast or (None, None)
    return (
        None if rows is None else rows.data,
        None if rows is None else rows.scale,
        None if columns is None else columns.data,
        None if columns is None else columns.scale,
    )


def forward_cast(
    weight: Tensor, cast: CastTensors, recipe: Fp8Recipe, reduce: Reduce | None
) -> tuple[Quantized, tuple[Tensor | None, ...]]:
    """Return the cast that the forward multiplies by, and the three tensors that `backward_cast` needs."""
    data, scale, *columns = cast
    amax: tuple[Tensor | None, ...] = (None, None)
    if data is None or scale is None:
        found = amaxes(weight, recipe.weights, reduce=reduce)
        rows = quantize(weight, recipe.forward, recipe.weights, columns=False, amax=found, margin=recipe.margin).rows
        amax = found
    else:
        rows = Quantized(data, scale, recipe.weights)
        if recipe.transposes_weights:  # of the weight itself there may be no more
            weight, amax = data, (scale, None)
    assert rows is not None
    return rows, ((weight, *amax) if columns[0] is None else (None, *columns))


def backward_cast(saved: tuple[Tensor | None, ...], recipe: Fp8Recipe, reduce: Reduce | None) -> Quantized:
    """Return the cast of the transpose, from what `forward_cast` returned."""
    weight, first, second = saved
    if weight is None:
        assert first is not None
        assert second is not None
        return Quantized(first, second, recipe.weights)
    if weight.dtype in DTYPES.values():
        assert first is not None
        return transpose(Quantized(weight, first, recipe.weights))
    amax = None if first is None or second is None else (first, second)  # that of the forward, where it took it
    columns = quantize(
        weight, recipe.forward, recipe.weights, rows=False, amax=amax, reduce=reduce, margin=recipe.margin
    ).columns
    assert columns is not None
    return columns
