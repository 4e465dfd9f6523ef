"""A frozen gated MLP whose projections have low-rank updates (LoRA, arXiv 2106.09685) as one operation.

    y = p (D + s B_d A_d)^T,  p = act(g) * u,  [g | u] = x (U + s B_u A_u)^T

The update of a projection as wide as [g | u] costs more passes over it than the activation. Here the activation adds
it to what it reads, forward and backward, and sums p A_d^T and the gradient of A_d from the tiles it has at hand.
Neither p nor the updated [g | u] is kept for the backward, which makes them again for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gated_activation import GATES, _gate_and_slope, reference_gated_activation
from ..interpreter_rounding import rounded
from ..launch import jit, tl, triton, triton_runs_on
from ..norm_functions import NormParts
from .lora_grad import Tile, scaled_sum
from .lora_linear import gradient_of_down, narrow_gradients, reference_lora_linear, rows_of, updated_product

WIDEST_RANK = 32
"""The largest rank with which nothing spills."""


def forward_tile(rank: int) -> Tile:
    """Of `forward_kernel`."""
    return Tile(64, 64, 4 if rank <= 16 else 8, 3)


def backward_tile(capability: tuple[int, int]) -> Tile:
    """Of a GPU; those whose matrix products read from shared memory, sm_90 and sm_100, have registers for more."""
    wide = capability[0] in (9, 10)
    return Tile(32, 128 if wide else 64, 8, 3 if wide else 2, programs=528)


# ---------------------------------------------------------------- reference


def reference_lora_gated_mlp(
    inputs: Tensor, up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor,
    *, scale: float, kind: str,
) -> Tensor:  # fmt: skip
    """The operation from parts that autograd sees; arguments as in `lora_gated_mlp`."""
    parts = len(up_a) // up_b.shape[1]
    gate_up = reference_lora_linear(inputs, up, None, up_a, up_b, scale=scale, parts=[len(up) // parts] * parts)
    product = reference_gated_activation(gate_up, kind)
    return reference_lora_linear(product, down, None, down_a, down_b, scale=scale, parts=[len(down)])


# ---------------------------------------------------------------- Triton


@jit
def _updated(numbers_pointer, low, matrix, scale, mask):
    """A tile of g or u in fp32, with its update. low (rows, rank), matrix (columns, rank)."""
    numbers = tl.load(numbers_pointer, mask=mask, other=0.0).to(tl.float32)
    return numbers + scale * tl.dot(low, tl.trans(matrix), input_precision="ieee")


@jit
def forward_kernel(
    gate_up_pointer, up_low_pointer, up_b_pointer, down_a_pointer, product_pointer, down_low_pointer,
    rows, width, scale,
    KIND: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of product, (rows, width), and of down_low = product A_d^T, (rows, RANK).

    gate_up (rows, 2 width) without update, up_low (rows, PARTS RANK), up_b (2 width, RANK), down_a (RANK, width).
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
        gate = _updated(gate_up, gate_low, gate_b, scale, tile)
        value = _updated(gate_up + width, value_low, value_b, scale, tile)
        active, _ = _gate_and_slope(gate, KIND)
        product = rounded(active * value, element)
        tl.store(product_pointer + row[:, None] * width + column[None, :], product, mask=tile)
        down_low = tl.dot(product, tl.trans(down_a), down_low, input_precision="ieee")
    tl.store(down_low_pointer + row[:, None] * RANK + rank[None, :], rounded(down_low, element), mask=narrow)


@jit
def backward_kernel(
    gate_up_pointer, up_low_pointer, up_b_pointer, of_product_pointer, of_down_low_pointer,
    of_gate_up_pointer, of_down_a_pointer,
    rows, width, piece, scale,
    KIND: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of gate and of value, in a piece of the rows.

    of_product (rows, width), of_down_low (rows, RANK), the others as in the forward. It writes of_gate_up
    (rows, 2 width), and of_down_a, partial sums in fp32 of the transposed gradient of A_d, (pieces, width, RANK).
    """
    element = of_gate_up_pointer.dtype.element_ty
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, BLOCK_R)
    inside, in_rank = column < width, rank < RANK
    matrix = inside[:, None] & in_rank[None, :]
    place = column[:, None] * RANK + rank[None, :]
    gate_b = tl.load(up_b_pointer + place, mask=matrix, other=0.0)
    value_b = tl.load(up_b_pointer + width * RANK + place, mask=matrix, other=0.0)
    of_down_a = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    number = tl.program_id(1)
    first = number * piece
    for start in range(first, min(first + piece, rows), BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        exists = row < rows
        row = row.to(tl.int64)
        narrow, tile = exists[:, None] & in_rank[None, :], exists[:, None] & inside[None, :]
        low = up_low_pointer + row[:, None] * (PARTS * RANK) + rank[None, :]
        gate_low = tl.load(low, mask=narrow, other=0.0)
        value_low = tl.load(low + (PARTS - 1) * RANK, mask=narrow, other=0.0)
        of_down_low = tl.load(of_down_low_pointer + row[:, None] * RANK + rank[None, :], mask=narrow, other=0.0)
        wide = row[:, None] * (2 * width) + column[None, :]
        gate = _updated(gate_up_pointer + wide, gate_low, gate_b, scale, tile)
        value = _updated(gate_up_pointer + wide + width, value_low, value_b, scale, tile)
        active, slope = _gate_and_slope(gate, KIND)
        product = rounded(active * value, element)
        of_down_a = tl.dot(tl.trans(product), of_down_low, of_down_a, input_precision="ieee")
        of_product = tl.load(of_product_pointer + row[:, None] * width + column[None, :], mask=tile, other=0.0)
        of_product = of_product.to(tl.float32)
        tl.store(of_gate_up_pointer + wide, rounded(of_product * value * slope, element), mask=tile)
        tl.store(of_gate_up_pointer + wide + width, rounded(of_product * active, element), mask=tile)
    tl.store(of_down_a_pointer + number * width * RANK + place, of_down_a, mask=matrix)


def triton_forward(
    gate_up: Tensor, up_low: Tensor, up_b: Tensor, down_a: Tensor, scale: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel on contiguous tensors: the product (n, f) and that with A_d, (n, r)."""
    (rows, double), rank = gate_up.shape, up_b.shape[1]
    product, down_low = gate_up.new_empty(rows, double // 2), gate_up.new_empty(rows, rank)
    tile = forward_tile(rank)
    forward_kernel[(triton.cdiv(rows, tile.rows),)](
        gate_up, up_low, up_b, down_a, product, down_low, rows, double // 2, scale,
        KIND=kind, PARTS=up_low.shape[1] // rank, **tile.options(rank),
    )  # fmt: skip
    return product, down_low


def triton_backward(
    gate_up: Tensor, up_low: Tensor, up_b: Tensor, of_product: Tensor, of_down_low: Tensor, scale: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernels on contiguous tensors: gradients of gate_up with its update, and of A_d."""
    (rows, double), rank = gate_up.shape, up_b.shape[1]
    width = double // 2
    tile = backward_tile(torch.cuda.get_device_capability(gate_up.device) if gate_up.is_cuda else (0, 0))
    blocks = triton.cdiv(width, tile.columns)
    pieces, size = tile.pieces(rows, blocks)
    of_gate_up = torch.empty_like(gate_up)
    of_down_a = gate_up.new_empty(pieces, width, rank, dtype=torch.float32)
    backward_kernel[(blocks, pieces)](
        gate_up, up_low, up_b, of_product, of_down_low, of_gate_up, of_down_a, rows, width, size, scale,
        KIND=kind, PARTS=up_low.shape[1] // rank, **tile.options(rank),
    )  # fmt: skip
    return of_gate_up, scaled_sum(of_down_a, 1.0, gate_up.dtype).t()


# ---------------------------------------------------------------- custom operations


@torch.library.custom_op("stoker::lora_gated_mlp", mutates_args=())
def _lora_gated_mlp(
    inputs: Tensor, source: Tensor | None, factors: Tensor | None, gain: Tensor | None, onto: Tensor | None,
    up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor, scale: float, kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output (n, out), and what is kept: gate_up without update, up_low and down_low."""
    gate_up, up_low = inputs @ up.t(), inputs @ up_a.t()
    product, down_low = triton_forward(gate_up, up_low, up_b, down_a, scale, kind)
    return updated_product(product, down, onto, down_low, down_b, scale, [len(down)]), gate_up, up_low, down_low


@_lora_gated_mlp.register_fake
def _(
    inputs: Tensor, source: Tensor | None, factors: Tensor | None, gain: Tensor | None, onto: Tensor | None,
    up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor, scale: float, kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    widths = (len(down), len(up), len(up_a), len(down_a))
    output, gate_up, up_low, down_low = (inputs.new_empty(len(inputs), width) for width in widths)
    return output, gate_up, up_low, down_low


@torch.library.custom_op("stoker::lora_gated_mlp_backward", mutates_args=())
def _lora_gated_mlp_backward(
    gradient: Tensor, inputs: Tensor, factors: Tensor | None, gain: Tensor | None,
    up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor,
    gate_up: Tensor, up_low: Tensor, down_low: Tensor, scale: float, kind: str, of_inputs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the inputs (empty unless `of_inputs`), `up_a`, `up_b`, `down_a` and `down_b`.

    For `inputs` see `gradient_of_down`.
    """
    of_down_low, of_down_b, _ = narrow_gradients(gradient, down_b, down_low, scale, [len(down)])
    of_product = (of_down_low @ down_a).addmm_(gradient, down)
    of_gate_up, of_down_a = triton_backward(gate_up, up_low, up_b, of_product, of_down_low, scale, kind)
    parts = len(up_a) // up_b.shape[1]
    of_up_low, of_up_b, scaled = narrow_gradients(of_gate_up, up_b, up_low, scale, [len(up) // parts] * parts, factors)
    of = (of_up_low @ up_a).addmm_(of_gate_up, up) if of_inputs else gradient.new_empty(0)
    return of, gradient_of_down(scaled, inputs, gain), of_up_b, of_down_a.contiguous(), of_down_b


@_lora_gated_mlp_backward.register_fake
def _(
    gradient: Tensor, inputs: Tensor, factors: Tensor | None, gain: Tensor | None,
    up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor,
    gate_up: Tensor, up_low: Tensor, down_low: Tensor, scale: float, kind: str, of_inputs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    of = gradient.new_empty(inputs.shape) if of_inputs else gradient.new_empty(0)
    return of, torch.empty_like(up_a), torch.empty_like(up_b), torch.empty_like(down_a), torch.empty_like(down_b)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, source, factors, gain, _, *matrices, scale, kind = inputs
    ctx.save_for_backward(hidden if source is None else source, factors, gain, *matrices, *output[1:])
    ctx.scale, ctx.kind = scale, kind
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    of_inputs, of_onto = ctx.needs_input_grad[0], gradient if ctx.needs_input_grad[4] else None
    of, of_up_a, of_up_b, of_down_a, of_down_b = _lora_gated_mlp_backward(
        gradient.contiguous(), *ctx.saved_tensors, ctx.scale, ctx.kind, of_inputs
    )
    learnt = None, of_up_a, of_up_b, None, of_down_a, of_down_b
    return of if of_inputs else None, None, None, None, of_onto, *learnt, None, None


_lora_gated_mlp.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------- public functions


def lora_gated_mlp_runs_on(inputs: Tensor, rank: int) -> bool:
    """Whether the kernels serve these inputs: on a GPU, not in fp64, of a rank that fits in registers."""
    return triton_runs_on(inputs) and rank <= WIDEST_RANK


def lora_gated_mlp(
    inputs: Tensor, up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor, down_a: Tensor, down_b: Tensor,
    *, scale: float, kind: str, norm: NormParts | None = None, onto: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`lora_linear`, gated activation and `lora_linear`, where `lora_gated_mlp_runs_on`.

    Args:
        inputs: (..., in); under autocast, cast to its dtype with the weights.
        up: (2 f, in), the gate's rows first; frozen: it gets no gradient.
        up_a: (2 r, in), LoRA's A of the gate, then that of the other half; (r, in) where both have the same.
        up_b: (2 f, r), LoRA's B.
        down: (out, f), frozen.
        down_a: (r, f).
        down_b: (out, r).
        scale: alpha / r.
        kind: one of `GATES`.
        norm: as in `lora_linear`.
        onto: (..., out), what the result is added to; None for nothing.

    Returns:
        (..., out), differentiable once in `inputs`, `onto` and LoRA's matrices. For the backward are kept `inputs` or
        the source of their norm, (..., 2 f) and what is as narrow as r.

    Raises:
        ValueError: the shapes do not fit, or `kind` is unknown.
    """
    rank, width = up_b.shape[1], len(up) // 2
    shapes = {
        "up_a": (up_a, {(rank, up.shape[1]), (2 * rank, up.shape[1])}),
        "up_b": (up_b, {(2 * width, rank)}),
        "down": (down, {(len(down), width)}),
        "down_a": (down_a, {(rank, width)}),
        "down_b": (down_b, {(len(down), rank)}),
    }
    for name, (matrix, fitting) in shapes.items():
        if tuple(matrix.shape) not in fitting:
            raise ValueError(f"`{name}` {tuple(matrix.shape)} must be {' or '.join(map(str, sorted(fitting)))}.")
    if kind not in GATES:
        raise ValueError(f"`kind` ({kind}) must be one of {', '.join(GATES)}.")
    tensors = (up, up_a, up_b, down, down_a, down_b)
    device = inputs.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        inputs, *tensors = inputs.to(dtype), *(tensor.to(dtype) for tensor in tensors)
    rows, start = inputs.flatten(0, -2).contiguous(), None
    if onto is not None and onto.dtype == inputs.dtype:
        start, onto = onto.flatten(0, -2), None
    output, *_ = _lora_gated_mlp(rows, *rows_of(norm), start, *tensors, scale, kind)
    output = output.unflatten(0, inputs.shape[:-1])
    return output if onto is None else onto + output
