"""Fused frozen gated MLP with LoRA (arXiv 2106.09685) on both projections.

    y = p (D + s B_d A_d)^T,  p = act(g) * u,  [g | u] = x (U + s B_u A_u)^T

A separate LoRA update of [g | u] would cost more passes over it than the activation. Here the activation kernels add
the update to each tile they load, forward and backward, and compute p A_d^T and the gradient of A_d from the same
tiles. Neither p nor the updated [g | u] is saved: the backward kernel recomputes them without extra memory traffic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activations import FUSED_ACTIVATIONS, activation_with_derivative
from ..autocast import autocast
from ..custom_op import custom_op
from ..gated_activation import reference_gated_activation
from ..launch import jit, rounded, tl, triton, triton_runs_on
from ..norm_functions import NormFactors
from .lora_grad import Tile, scaled_sum
from .lora_linear import (
    compute_lora_a_gradient,
    flatten_norm_factors,
    linear_with_update,
    lora_gradients,
    reference_lora_linear,
)

MAX_RANK = 32
"""Largest rank for which no kernel spills registers."""


def forward_tile(rank: int) -> Tile:
    """Return the tile of `forward_kernel`."""
    return Tile(64, 64, 4 if rank <= 16 else 8, 3)


def backward_tile(capability: tuple[int, int]) -> Tile:
    """Return the tile of `backward_kernel` on a GPU.

    Larger on sm_90 and sm_100, whose matrix instructions read operands from shared memory and leave more registers.
    """
    wide = capability[0] in (9, 10)
    return Tile(32, 128 if wide else 64, 8, 3 if wide else 2, programs=528)


# ---------------------------------------------------------------- reference


def reference_lora_gated_mlp(
    inputs: Tensor, up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor,
    *, scale: float, kind: str,
) -> Tensor:  # fmt: skip
    """Reference composed of differentiable operations; arguments as in `lora_gated_mlp`."""
    parts = len(up_a) // up_b.shape[1]
    gate_up = reference_lora_linear(inputs, up, None, up_a, up_b, scale=scale, parts=[len(up) // parts] * parts)
    product = reference_gated_activation(gate_up, kind)
    return reference_lora_linear(product, down, None, down_a, down_b, scale=scale, parts=[len(down)])


# ---------------------------------------------------------------- Triton


@jit
def _load_updated(tile_pointer, low, lora_b, scale, mask):
    """Load a tile of g or u and add its LoRA update, in fp32. low = x A^T (rows, rank), lora_b (columns, rank)."""
    base = tl.load(tile_pointer, mask=mask, other=0.0).to(tl.float32)
    return base + scale * tl.dot(low, tl.trans(lora_b), input_precision="ieee")


@jit
def forward_kernel(
    gate_up_pointer, up_low_pointer, up_b_pointer, down_a_pointer, product_pointer, down_low_pointer,
    rows, width, scale,
    KIND: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows per program of product (rows, width) and of down_low = product A_d^T (rows, RANK).

    gate_up (rows, 2 width) without update, up_low = x A_u^T (rows, PARTS RANK), up_b (2 width, RANK), down_a (RANK,
    width). PARTS: 1 if gate and up share A_u, else 2.
    """
    element = product_pointer.dtype.element_ty
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rank = tl.arange(0, BLOCK_R)
    exists, in_rank = row < rows, rank < RANK
    row = row.to(tl.int64)
    narrow = exists[:, None] & in_rank[None, :]
    low = up_low_pointer + row[:, None] * (PARTS * RANK) + rank[None, :]
    gate_low = tl.load(low, mask=narrow, other=0.0)
    value_low = tl.load(low + (PARTS - 1) * RANK, mask=narrow, other=0.0)
    down_low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, width, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        inside = column < width
        matrix = inside[:, None] & in_rank[None, :]
        up_b = up_b_pointer + column[:, None] * RANK + rank[None, :]
        gate_b = tl.load(up_b, mask=matrix, other=0.0)
        value_b = tl.load(up_b + width * RANK, mask=matrix, other=0.0)
        down_a = tl.load(
            down_a_pointer + rank[:, None] * width + column[None, :], mask=in_rank[:, None] & inside[None, :], other=0.0
        )
        tile = exists[:, None] & inside[None, :]
        gate_up = gate_up_pointer + row[:, None] * (2 * width) + column[None, :]
        gate = _load_updated(gate_up, gate_low, gate_b, scale, tile)
        value = _load_updated(gate_up + width, value_low, value_b, scale, tile)
        active, _ = activation_with_derivative(gate, KIND)
        product = rounded(active * value, element)
        tl.store(product_pointer + row[:, None] * width + column[None, :], product, mask=tile)
        down_low = tl.dot(product, tl.trans(down_a), down_low, input_precision="ieee")
    tl.store(down_low_pointer + row[:, None] * RANK + rank[None, :], rounded(down_low, element), mask=narrow)


@jit
def backward_kernel(
    gate_up_pointer, up_low_pointer, up_b_pointer, product_gradient_pointer, down_low_gradient_pointer,
    gate_up_gradient_pointer, down_a_gradient_pointer,
    rows, width, chunk_rows, scale,
    KIND: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Process BLOCK_N columns of gate and of up in a chunk of rows per program.

    product_gradient (rows, width), down_low_gradient (rows, RANK), the other inputs as in the forward kernel. Written:
    gate_up_gradient (rows, 2 width), and down_a_gradient, fp32 partial sums of the transposed gradient of A_d (chunks,
    width, RANK).
    """
    element = gate_up_gradient_pointer.dtype.element_ty
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, BLOCK_R)
    inside, in_rank = column < width, rank < RANK
    matrix = inside[:, None] & in_rank[None, :]
    place = column[:, None] * RANK + rank[None, :]
    gate_b = tl.load(up_b_pointer + place, mask=matrix, other=0.0)
    value_b = tl.load(up_b_pointer + width * RANK + place, mask=matrix, other=0.0)
    down_a_gradient = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    chunk = tl.program_id(1)
    first = chunk * chunk_rows
    for start in range(first, min(first + chunk_rows, rows), BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        exists = row < rows
        row = row.to(tl.int64)
        narrow, tile = exists[:, None] & in_rank[None, :], exists[:, None] & inside[None, :]
        low = up_low_pointer + row[:, None] * (PARTS * RANK) + rank[None, :]
        gate_low = tl.load(low, mask=narrow, other=0.0)
        value_low = tl.load(low + (PARTS - 1) * RANK, mask=narrow, other=0.0)
        down_low_place = row[:, None] * RANK + rank[None, :]
        down_low_gradient = tl.load(down_low_gradient_pointer + down_low_place, mask=narrow, other=0.0)
        wide = row[:, None] * (2 * width) + column[None, :]
        gate = _load_updated(gate_up_pointer + wide, gate_low, gate_b, scale, tile)
        value = _load_updated(gate_up_pointer + wide + width, value_low, value_b, scale, tile)
        active, slope = activation_with_derivative(gate, KIND)
        product = rounded(active * value, element)
        down_a_gradient = tl.dot(tl.trans(product), down_low_gradient, down_a_gradient, input_precision="ieee")
        product_place = row[:, None] * width + column[None, :]
        product_gradient = tl.load(product_gradient_pointer + product_place, mask=tile, other=0.0).to(tl.float32)
        tl.store(gate_up_gradient_pointer + wide, rounded(product_gradient * value * slope, element), mask=tile)
        tl.store(gate_up_gradient_pointer + wide + width, rounded(product_gradient * active, element), mask=tile)
    tl.store(down_a_gradient_pointer + chunk * width * RANK + place, down_a_gradient, mask=matrix)


def triton_forward(
    gate_up: Tensor, up_low: Tensor, up_b: Tensor, down_a: Tensor, scale: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel on contiguous tensors and return p (n, f) and p A_d^T (n, r)."""
    (rows, double), rank = gate_up.shape, up_b.shape[1]
    product, down_low = gate_up.new_empty(rows, double // 2), gate_up.new_empty(rows, rank)
    tile = forward_tile(rank)
    forward_kernel[(triton.cdiv(rows, tile.rows),)](
        gate_up, up_low, up_b, down_a, product, down_low, rows, double // 2, scale,
        KIND=kind, PARTS=up_low.shape[1] // rank, **tile.launch_options(rank),
    )  # fmt: skip
    return product, down_low


def triton_backward(
    gate_up: Tensor,
    up_low: Tensor,
    up_b: Tensor,
    product_gradient: Tensor,
    down_low_gradient: Tensor,
    scale: float,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernels on contiguous tensors and return gradients of the updated gate_up and of A_d."""
    (rows, double), rank = gate_up.shape, up_b.shape[1]
    width = double // 2
    tile = backward_tile(torch.cuda.get_device_capability(gate_up.device) if gate_up.is_cuda else (0, 0))
    blocks = triton.cdiv(width, tile.columns)
    chunks, chunk_rows = tile.row_chunks(rows, blocks)
    gate_up_gradient = torch.empty_like(gate_up)
    down_a_gradient = gate_up.new_empty(chunks, width, rank, dtype=torch.float32)
    backward_kernel[(blocks, chunks)](
        gate_up, up_low, up_b, product_gradient, down_low_gradient, gate_up_gradient, down_a_gradient,
        rows, width, chunk_rows, scale,
        KIND=kind, PARTS=up_low.shape[1] // rank, **tile.launch_options(rank),
    )  # fmt: skip
    return gate_up_gradient, scaled_sum(down_a_gradient, 1.0, gate_up.dtype).t()


# ---------------------------------------------------------------- custom operations


@custom_op("stoker::lora_gated_mlp")
def _lora_gated_mlp(
    inputs: Tensor, source: Tensor | None, factors: Tensor | None, gain: Tensor | None, start: Tensor | None,
    up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor, scale: float, kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output (n, out) and what is saved: gate_up without update, up_low and down_low.

    `source`, `factors` and `gain` are saved in place of `inputs` if these are a norm; see `NormFactors`.
    """
    gate_up, up_low = inputs @ up.t(), inputs @ up_a.t()
    product, down_low = triton_forward(gate_up, up_low, up_b, down_a, scale, kind)
    output = linear_with_update(product, down, start, down_low, down_b, scale, [len(down)])
    return output, gate_up, up_low, down_low


@torch.library.register_fake("stoker::lora_gated_mlp")
def _(
    inputs: Tensor, source: Tensor | None, factors: Tensor | None, gain: Tensor | None, start: Tensor | None,
    up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor, scale: float, kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    widths = (len(down), len(up), len(up_a), len(down_a))
    output, gate_up, up_low, down_low = (inputs.new_empty(len(inputs), width) for width in widths)
    return output, gate_up, up_low, down_low


@custom_op("stoker::lora_gated_mlp_backward")
def _lora_gated_mlp_backward(
    gradient: Tensor, inputs: Tensor, factors: Tensor | None, gain: Tensor | None,
    up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor,
    gate_up: Tensor, up_low: Tensor, down_low: Tensor, scale: float, kind: str, with_input_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of the inputs (empty unless `with_input_gradient`), `up_a`, `up_b`, `down_a` and `down_b`.

    For `inputs` see `compute_lora_a_gradient`.
    """
    down_low_gradient, down_b_gradient, _ = lora_gradients(gradient, down_b, down_low, scale, [len(down)])
    product_gradient = (down_low_gradient @ down_a).addmm_(gradient, down)
    gate_up_gradient, down_a_gradient = triton_backward(
        gate_up, up_low, up_b, product_gradient, down_low_gradient, scale, kind
    )
    parts = len(up_a) // up_b.shape[1]
    up_low_gradient, up_b_gradient, scaled = lora_gradients(
        gate_up_gradient, up_b, up_low, scale, [len(up) // parts] * parts, factors
    )
    input_gradient = (
        (up_low_gradient @ up_a).addmm_(gate_up_gradient, up) if with_input_gradient else gradient.new_empty(0)
    )
    return (
        input_gradient,
        compute_lora_a_gradient(scaled, inputs, gain),
        up_b_gradient,
        down_a_gradient.contiguous(),
        down_b_gradient,
    )


@torch.library.register_fake("stoker::lora_gated_mlp_backward")
def _(
    gradient: Tensor, inputs: Tensor, factors: Tensor | None, gain: Tensor | None,
    up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor,
    gate_up: Tensor, up_low: Tensor, down_low: Tensor, scale: float, kind: str, with_input_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    input_gradient = gradient.new_empty(inputs.shape) if with_input_gradient else gradient.new_empty(0)
    gradients = torch.empty_like(up_a), torch.empty_like(up_b), torch.empty_like(down_a), torch.empty_like(down_b)
    return input_gradient, *gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, source, factors, gain, _, *matrices, scale, kind = inputs
    ctx.save_for_backward(hidden if source is None else source, factors, gain, *matrices, *output[1:])
    ctx.scale, ctx.kind = scale, kind
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    with_input_gradient, residual_gradient = ctx.needs_input_grad[0], gradient if ctx.needs_input_grad[4] else None
    input_gradient, up_a_gradient, up_b_gradient, down_a_gradient, down_b_gradient = _lora_gated_mlp_backward(
        gradient.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.kind, with_input_gradient
    )
    matrix_gradients = None, up_a_gradient, up_b_gradient, None, down_a_gradient, down_b_gradient
    return (
        input_gradient if with_input_gradient else None,
        None,
        None,
        None,
        residual_gradient,
        *matrix_gradients,
        None,
        None,
    )


torch.library.register_autograd("stoker::lora_gated_mlp", _backward, setup_context=_save)


# ---------------------------------------------------------------- public functions


def lora_gated_mlp_runs_on(inputs: Tensor, rank: int) -> bool:
    """Return True if the kernels support these inputs: on a GPU, not fp64, of a rank that fits in registers."""
    return triton_runs_on(inputs) and rank <= MAX_RANK


def lora_gated_mlp(
    inputs: Tensor, up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor,
    *, scale: float, kind: str, norm: NormFactors | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `lora_linear` of a gated activation of `lora_linear`; requires `lora_gated_mlp_runs_on`.

    Args:
        inputs: (..., in); under autocast, cast to its dtype with the weights.
        up: gate and up projection, (2 f, in), the gate's rows first; frozen (no gradient).
        up_a: LoRA's A, (2 r, in), first that of the gate; (r, in) if gate and up share one.
        up_b: LoRA's B, (2 f, r).
        down: down projection, (out, f), frozen.
        down_a: (r, f).
        down_b: (out, r).
        scale: alpha / r.
        kind: a name in `FUSED_ACTIVATIONS`.
        norm: as in `lora_linear`.
        residual: residual that the result is added to, (..., out), or None.

    Returns:
        (..., out), differentiable once with respect to `inputs`, `residual` and LoRA's matrices. Saved for the
        backward: `inputs` or the input of their norm, the projection (..., 2 f), and tensors of width r or 2 r.

    Raises:
        ValueError: shapes do not match, or `kind` is unknown.
    """
    rank, width = up_b.shape[1], len(up) // 2
    shapes = {
        "up_a": (up_a, {(rank, up.shape[1]), (2 * rank, up.shape[1])}),
        "up_b": (up_b, {(2 * width, rank)}),
        "down": (down, {(len(down), width)}),
        "down_a": (down_a, {(rank, width)}),
        "down_b": (down_b, {(len(down), rank)}),
    }
    for name, (matrix, valid) in shapes.items():
        if tuple(matrix.shape) not in valid:
            raise ValueError(f"`{name}` {tuple(matrix.shape)} must be {' or '.join(map(str, sorted(valid)))}.")
    if kind not in FUSED_ACTIVATIONS:
        raise ValueError(f"`kind` ({kind}) must be one of {', '.join(sorted(FUSED_ACTIVATIONS))}.")
    inputs, *tensors = autocast(inputs, up, up_a, up_b, down, down_a, down_b)
    rows, start = inputs.flatten(0, -2).contiguous(), None
    if residual is not None and residual.dtype == inputs.dtype:
        start, residual = residual.flatten(0, -2), None
    output, *_ = _lora_gated_mlp(rows, *flatten_norm_factors(norm), start, *tensors, scale, kind)
    output = output.unflatten(0, inputs.shape[:-1])
    return output if residual is None else residual + output
