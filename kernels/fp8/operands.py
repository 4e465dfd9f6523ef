"""fp8 matrices with their scales, and what they are cast from."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .recipe import TILE, Granularity

DTYPES: dict[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
Producer = Literal[
    "none", "gather", "activation", "gated", "activation_backward", "gated_backward", "rms_norm", "layer_norm"
]


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


class Source(NamedTuple):
    """Operand of a cast: a matrix, or what an elementwise producer makes of others, which the casts compute.

    Attributes:
        producer: `none`, the tensor (M, K); `gather`, the token of each row, of tokens (T, K), assignments of rows (M,)
            and rows of assignments (T, k), see `moe.assignments`; `activation`, act(x) of (M, K); `gated`, act(gate)
            * up of [gate | up], (M, 2 K); `activation_backward`, the gradient of x, of x (M, K) and the gradient of
            act(x), (M, K); `gated_backward`, the gradient of [gate | up], of [gate | up] (M, K) and the gradient of
            act(gate) * up, (M, K / 2); these four, of experts, times the gate of the row: also of assignments of rows
            (M,) and gates (T, k); `rms_norm`, of its input (M, K), inverse root mean squares (M,), fp32, and gain
            (K,); `layer_norm`, of input, inverse deviations, gain, means (M,), fp32, and bias (K,).
        tensors: these.
        activation: a name in `activations.FUSED_ACTIVATIONS`; "" for `none` and norms.
    """

    producer: Producer
    tensors: tuple[Tensor, ...]
    activation: str = ""


def source_arguments(source: Source | None) -> tuple[Producer | None, str, *tuple[Tensor, ...]]:
    """Return producer, activation and tensors, as arguments of an autograd function; None without."""
    return (None, "") if source is None else (source.producer, source.activation, *source.tensors)


def source_shape(producer: str, tensors: list[Tensor]) -> tuple[int, int]:
    """Return (M, K) of what a producer makes of its tensors."""
    first = tensors[0]
    height = tensors[1].shape[0] if producer == "gather" else first.shape[0]
    return height, first.shape[1] // 2 if producer == "gated" else first.shape[1]


def dequantize(matrix: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of a quantized matrix, (M, K)."""
    scale, (rows, width) = matrix.scale, matrix.data.shape
    if matrix.granularity == "block":
        scale = scale.repeat_interleave(TILE, 0)[:rows]
    if matrix.granularity in ("tile", "block"):
        scale = scale.repeat_interleave(TILE, 1)[:, :width]
    return matrix.data.to(dtype) * scale.to(dtype)


def row_multiple(granularity: str) -> int:
    """Return what products contract the rows of a transpose in multiples of: 16 bytes, or whole tiles."""
    return TILE if granularity == "tile" else 16


def padding(length: int, granularity: str) -> int:
    """Return the zeros after the rows of a transpose."""
    return -length % row_multiple(granularity)


def empty_cast(
    like: Tensor, height: int, width: int, format: str, granularity: str, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Return uninitialized data and scale of a cast (height, width), in the layout of `Quantized`."""
    dtype = DTYPES[format]
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
