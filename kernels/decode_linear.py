"""Linear layers of the decode step of one sequence, each with the norm before it and what follows it in one kernel.

Such a product is bound by reading the weight. A program multiplies some rows of it by all inputs, so that nothing is
summed over programs and results do not depend on their order. The scale of an RMSNorm is a factor of all inputs: it is
summed beside the products and applied to the result, so that no program waits for a pass over the inputs.
"""

# Triton resolves constexpr conditions at compile time, which type checkers do not know:
# pyrefly: ignore-errors[unbound-name]

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import NONLINEARITIES, activation_with_derivative
from .gated_activation import gated_activation
from .launch import jit, pdl_options, pdl_wait, rounded, tl
from .norm_functions import rms_norm


class Norm(NamedTuple):
    """RMSNorm of the inputs; see `norm_functions.rms_norm`.

    Attributes:
        weight: (in,).
        epsilon: added to the mean square.
        zero_centered: the gain is 1 + `weight`.
    """

    weight: Tensor
    epsilon: float
    zero_centered: bool


class Tile(NamedTuple):
    """Rows of the weight and inputs of a tile, and warps.

    8 inputs per thread are 16 bytes of a row: then the inputs are loaded in the layout of the weight.
    """

    outputs: int
    inputs: int
    warps: int


# ---------------------------------------------------------------- reference


def reference_decode_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> Tensor:
    """Reference of `triton_decode_linear` in plain PyTorch, for any device and floating dtype."""
    if norm is not None:
        inputs = rms_norm(inputs, norm.weight, epsilon=norm.epsilon, zero_centered=norm.zero_centered)
    output = F.linear(inputs, weight, bias)
    if activation is not None:
        output = gated_activation(output, activation) if gated else NONLINEARITIES[activation](output)
    return output if residual is None else residual + output


# ---------------------------------------------------------------- Triton


@jit
def decode_linear_kernel(
    input_pointer, weight_pointer, gain_pointer, bias_pointer, residual_pointer, out_pointer,
    outputs, epsilon,
    INPUTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, ACCUMULATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK_N outputs.

    input, gain: (INPUTS,). weight: (outputs, INPUTS), GATED (2 outputs, INPUTS), gates first. bias: (outputs,), GATED
    (2 outputs,). residual, out: (outputs,). The first tile of the weight is loaded while the previous kernel runs.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, outputs - 1)
    ROWS: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    if GATED:  # rows of the tile: a gate and its up projection in turn
        row = tl.reshape(tl.join(row, row + outputs), (ROWS,))
    products = tl.zeros((ROWS, BLOCK_K), ACCUMULATE)
    squares = tl.zeros((1, BLOCK_K), ACCUMULATE)
    for start in tl.range(0, INPUTS, BLOCK_K, num_stages=1):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        mask = k < INPUTS
        weight = tl.load(weight_pointer + row.to(tl.int64)[:, None] * INPUTS + k, mask=mask, other=0.0)
        if start == 0:
            pdl_wait(PDL)
        x = tl.load(input_pointer + k, mask=mask, other=0.0).to(ACCUMULATE)
        if NORM:
            squares += x * x
            gain = tl.load(gain_pointer + k, mask=mask, other=0.0).to(ACCUMULATE)
            x *= gain + 1.0 if ZERO_CENTERED else gain
        products += weight.to(ACCUMULATE) * x
    result = tl.sum(products, 1)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares) / INPUTS + epsilon)
    if HAS_BIAS:
        result += tl.load(bias_pointer + row).to(ACCUMULATE)
    if GATED:
        result, up = tl.split(tl.reshape(result, (BLOCK_N, 2)))
    if ACTIVATION is not None:
        result, _ = activation_with_derivative(result, ACTIVATION)
    if GATED:
        result *= up
    if HAS_RESIDUAL:
        result += tl.load(residual_pointer + n, mask=n < outputs, other=0.0).to(ACCUMULATE)
    tl.store(out_pointer + n, rounded(result, out_pointer.dtype.element_ty), mask=n < outputs)


def triton_decode_linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    activation: str | None = None,
    gated: bool = False,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Return act(norm(inputs) @ weight^T + bias) + residual of one row, in the dtype of the weight.

    Args:
        inputs: (1, in).
        weight: (out, in), contiguous; with `gated` (2 out, in), all gates first.
        bias: (out,), with `gated` (2 out,); None for none.
        residual: (1, out), added in the end; None for none.
        norm: norm of the inputs; None for none.
        activation: a name in `activations.FUSED_ACTIVATIONS`; None for none.
        gated: multiply the activated gates by the other half of the outputs.
        tile: tile of the kernel; None for `choose_tile`.

    Returns:
        (1, out), accumulated in fp32 (fp64 for fp64) and rounded once.
    """
    width = weight.shape[1]
    outputs = len(weight) // (2 if gated else 1)
    out = weight.new_empty(1, outputs)
    tile = choose_tile(width, gated=gated) if tile is None else tile
    decode_linear_kernel[(-(-outputs // tile.outputs),)](
        input_pointer=inputs.contiguous(),
        weight_pointer=weight,
        gain_pointer=None if norm is None else norm.weight,
        bias_pointer=bias,
        residual_pointer=None if residual is None else residual.contiguous(),
        out_pointer=out,
        outputs=outputs,
        epsilon=0.0 if norm is None else norm.epsilon,
        INPUTS=width,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        NORM=norm is not None,
        ZERO_CENTERED=norm is not None and norm.zero_centered,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        ACTIVATION=activation,
        GATED=gated,
        ACCUMULATE=tl.float64 if weight.dtype == torch.float64 else tl.float32,
        num_warps=tile.warps,
        enable_fp_fusion=True,
        **pdl_options(weight.device),
    )
    return out


def choose_tile(inputs: int, *, gated: bool) -> Tile:
    """Return the tile of a product with `inputs` inputs, `gated` or not."""
    if gated:
        return Tile(4, 1024, 4)
    return Tile(8, 2048, 8) if inputs > 4096 else Tile(2, 2048, 4)
