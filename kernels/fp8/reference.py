"""Casts to fp8 in plain PyTorch, any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import NONLINEARITIES
from .operands import DTYPES
from .recipe import MAX_VALUE, TILE, Format, Granularity

SMALLEST_AMAX = 2.0**-100
"""Smallest maximum that counts, so that neither a scale nor its reciprocal overflows."""


def scale_of(amax: Tensor, format: Format, margin: int) -> Tensor:
    """Return the scales of these maxima, fp32; inf and NaN stay."""
    return amax.float().clamp_min(SMALLEST_AMAX) / MAX_VALUE[format] * 2.0**margin


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
    tensor: Tensor, amax: Tensor | None, format: Format, granularity: Granularity, margin: int
) -> tuple[Tensor, Tensor]:
    """Return data and scale of `Quantized` of a matrix (M, K), whose amax is that of its granularity, if any."""
    if granularity in ("tensor", "row"):
        assert amax is not None
        scale = scale_of(amax, format, margin)
        scale = scale[:, None] if granularity == "row" else scale
        return cast_to(tensor, scale, format).contiguous(), scale
    rows, width = tensor.shape
    height = TILE if granularity == "block" else 1
    padded = F.pad(tensor, (0, -width % TILE, 0, -rows % height))
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // TILE, TILE)
    amax = blocks.abs().amax((1, 3)) if tensor.numel() else tensor.new_zeros(blocks.shape[0], blocks.shape[2])
    scale = scale_of(amax, format, margin)
    data = cast_to(blocks, scale[:, None, :, None], format).view(padded.shape)[:rows, :width].contiguous()
    if granularity == "tile":
        return data, scale.new_empty(scale.shape[1], scale.shape[0]).copy_(scale.t()).t()
    return data, F.pad(scale, (0, -scale.shape[1] % 4))[:, : scale.shape[1]]


def slope(inputs: Tensor, activation: str) -> Tensor:
    """Return the derivative of an activation."""
    if activation in ("silu", "gelu_sigmoid"):
        factor = 1.0 if activation == "silu" else 1.702
        sigmoid = torch.sigmoid(factor * inputs)
        return sigmoid * (1.0 + factor * inputs * (1.0 - sigmoid))
    if activation in ("gelu", "gelu_tanh"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward(torch.ones_like(inputs), inputs, approximate=approximate)
    return (inputs > 0).to(inputs.dtype) if activation == "relu" else 2.0 * F.relu(inputs)


def produce(producer: str, tensors: list[Tensor], activation: str) -> tuple[Tensor, Tensor]:
    """Return what is cast (`Source`), in fp32 (fp64) but for `none` and `gather`, and for a backward also the product
    act(gate) * up.
    """
    if producer == "none":
        return tensors[0], tensors[0]
    if producer == "gather":
        hidden, order, places = tensors
        if not hidden.shape[0]:  # of a rank that no token arrives at
            rows = hidden.new_zeros(order.shape[0], hidden.shape[1])
            return rows, rows
        rows = torch.where((order >= 0)[:, None], hidden[order.clamp(min=0) // places.shape[1]], 0)
        return rows, rows
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if producer in ("rms_norm", "layer_norm"):
        inputs, inverse, gain, *others = (tensor.to(dtype) for tensor in tensors)
        centred = inputs - others[0][:, None] if others else inputs
        normed = centred * inverse[:, None] * gain
        normed = normed + others[1] if others else normed
        return normed, normed
    first, *up = (tensor.to(dtype) for tensor in tensors[0].chunk(2 if producer.startswith("gated") else 1, dim=1))
    active = NONLINEARITIES[activation](first)
    product, factor = active * up[0] if up else active, None
    if len(tensors) > 2:  # of experts
        factor = row_gates(*tensors[-2:]).to(dtype)[:, None]
        product = torch.where(tensors[-2][:, None] >= 0, product * factor, 0)
    if producer in ("activation", "gated"):
        return product, product
    outer = tensors[1].to(dtype)
    outer = outer if factor is None else outer * factor
    parts = (outer * up[0] * slope(first, activation), outer * active) if up else (outer * slope(first, activation),)
    return torch.cat(parts, 1), product


def row_gates(order: Tensor, gates: Tensor) -> Tensor:
    """Return the gate of each row, 0 in an empty row."""
    if not gates.numel():
        return gates.new_zeros(order.shape)
    return torch.where(order >= 0, gates.flatten()[order.clamp(min=0).long()], 0)


def row_dots(producer: str, tensors: list[Tensor], activation: str) -> Tensor:
    """Return, of a backward with gates, the sum over each row of act(gate) * up times its gradient, else nothing."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if not producer.endswith("backward") or len(tensors) < 3:
        return tensors[0].new_empty(0, dtype=dtype)
    product = produce("gated" if producer.startswith("gated") else "activation", tensors[:1], activation)[0]
    return torch.where(tensors[2] >= 0, (product * tensors[1].to(dtype)).sum(1), 0)
