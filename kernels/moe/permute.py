"""Permute tokens to rows (gather), combine rows to tokens (weighted sum), and the backward of the activation in rows.

Without atomics: each token reads its k rows, so the order of summation is fixed. Falls back to plain PyTorch without
Triton. T tokens with up to k rows each; `order` and `places` as in `assignments.Assignments`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activations import activation_with_derivative
from ..custom_op import custom_op
from ..launch import INTERPRETED, jit, next_power_of_2, rounded, tl, triton, triton_runs_on

_LARGEST_BLOCK = 2048
_LAUNCH: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}


# ---------------------------------------------------------------- reference


def reference_gather(hidden: Tensor, order: Tensor, topk: int) -> Tensor:
    """Return the token of each row, (T, h) to (rows, h); 0 in empty rows."""
    tokens = order.clamp(min=0) // topk
    return torch.where(order[:, None] >= 0, hidden[tokens], 0)


def reference_combine(rows: Tensor, gates: Tensor | None, places: Tensor) -> Tensor:
    """Return the sum of each token's rows times their gates, (rows, h) to (T, h), accumulated in fp32 (fp64)."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    total = torch.zeros(len(places), rows.shape[1], dtype=wide, device=rows.device)
    for slot in range(places.shape[1] if len(rows) else 0):
        place = places[:, slot]
        row = torch.where(place[:, None] >= 0, rows[place.clamp(min=0)], 0).to(wide)
        if gates is not None:  # also 0 if the gate of a dropped assignment is NaN
            row = row * torch.where(place >= 0, gates[:, slot], 0)[:, None].to(wide)
        total = total + row
    return total.to(rows.dtype)


# ---------------------------------------------------------------- Triton


@jit
def gather_kernel(
    hidden_pointer, gates_pointer, order_pointer, rows_pointer, topk, width, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the token of one row per program from hidden (T, width), WEIGHTED times its gate; 0 in an empty row."""
    row = tl.program_id(0).to(tl.int64)
    assignment = tl.load(order_pointer + row)
    used = assignment >= 0
    token = tl.where(used, assignment // topk, 0).to(tl.int64)
    gate = 1.0
    if WEIGHTED:
        gate = tl.load(gates_pointer + assignment, mask=used, other=0.0).to(tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        value = (
            tl.load(hidden_pointer + token * width + column, mask=column < tl.where(used, width, 0), other=0.0).to(
                tl.float32
            )
            * gate
        )
        tl.store(rows_pointer + row * width + column, rounded(value, rows_pointer.dtype.element_ty), mask=inside)


@jit
def combine_kernel(
    rows_pointer, gates_pointer, places_pointer, residual_pointer, out_pointer, width, WEIGHTED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the rows of one token times their gates, BLOCK columns of out (T, width) per program.

    With HAS_RESIDUAL added to residual (T, width).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_pointer + token * width + column, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(TOPK):
        place = tl.load(places_pointer + token * TOPK + slot).to(tl.int64)
        value = tl.load(
            rows_pointer + place * width + column, mask=column < tl.where(place >= 0, width, 0), other=0.0
        ).to(tl.float32)
        if WEIGHTED:
            # masked: the gate of a dropped assignment may be NaN
            gate = tl.load(gates_pointer + token * TOPK + slot, mask=place >= 0, other=0.0)
            value = value * gate.to(tl.float32)
        total += value
    tl.store(out_pointer + token * width + column, rounded(total, out_pointer.dtype.element_ty), mask=inside)


@jit
def gate_gradient_kernel(
    rows_pointer, gradient_pointer, places_pointer, gate_gradient_pointer, width, TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the dot product of one assignment's row with the gradient of its token per program; 0 if dropped."""
    assignment = tl.program_id(0).to(tl.int64)
    token = assignment // TOPK
    place = tl.load(places_pointer + assignment).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < tl.where(place >= 0, width, 0)
        row = tl.load(rows_pointer + place * width + column, mask=inside, other=0.0).to(tl.float32)
        total += row * tl.load(gradient_pointer + token * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(gate_gradient_pointer + assignment, tl.sum(total))


@jit
def activation_backward_kernel(
    projected_pointer, inner_gradient_pointer, order_pointer, gates_pointer, projected_gradient_pointer,
    weighted_pointer, gate_gradient_pointer, width, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the backward of the activation for one row per program, recomputing the activation; 0 in empty rows.

    projected_pointer: (rows, width), GATED (rows, 2 width); projected_gradient_pointer likewise, written.
    inner_gradient_pointer: (rows, width), gradient of the second projection's input, before the factor of the gate.
    weighted_pointer: (rows, width), written: input of the second projection times the gate.
    gates_pointer, gate_gradient_pointer: (T k,); the latter is written, except for dropped assignments.
    """
    row = tl.program_id(0).to(tl.int64)
    assignment = tl.load(order_pointer + row)
    if assignment >= 0:
        gate = tl.load(gates_pointer + assignment).to(tl.float32)
        stride = 2 * width if GATED else width
        element = weighted_pointer.dtype.element_ty
        products = tl.zeros((BLOCK,), tl.float32)
        for begin in range(0, width, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < width
            x = tl.load(projected_pointer + row * stride + column, mask=inside, other=0.0).to(tl.float32)
            outer = tl.load(inner_gradient_pointer + row * width + column, mask=inside, other=0.0).to(tl.float32)
            value, slope = activation_with_derivative(x, ACTIVATION)
            if GATED:
                up = tl.load(projected_pointer + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
                up_gradient = rounded(gate * outer * value, element)
                tl.store(projected_gradient_pointer + row * stride + width + column, up_gradient, mask=inside)
                value = value * up
                slope = slope * up
            # rounded to the value that the second projection read
            value = rounded(value, element).to(tl.float32)
            products += tl.where(inside, outer * value, 0.0)
            gradient = rounded(gate * outer * slope, element)
            tl.store(projected_gradient_pointer + row * stride + column, gradient, mask=inside)
            tl.store(weighted_pointer + row * width + column, rounded(gate * value, element), mask=inside)
        tl.store(gate_gradient_pointer + assignment, tl.sum(products))
    else:
        zero = tl.zeros((BLOCK,), weighted_pointer.dtype.element_ty)
        for begin in range(0, width, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            tl.store(weighted_pointer + row * width + column, zero, mask=column < width)
        for begin in range(0, 2 * width if GATED else width, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            stored = column < (2 * width if GATED else width)
            place = row * (2 * width if GATED else width) + column
            tl.store(projected_gradient_pointer + place, zero, mask=stored)


def _block(width: int) -> int:
    return min(_LARGEST_BLOCK, next_power_of_2(width))


def triton_gather(hidden: Tensor, order: Tensor, topk: int, gates: Tensor | None = None) -> Tensor:
    """`reference_gather` by Triton; with `gates` (T, k) each row is multiplied by its gate."""
    hidden = hidden.contiguous()
    width = hidden.shape[1]
    rows = hidden.new_empty(len(order), width)
    gates = None if gates is None else gates.contiguous()
    if rows.numel():
        constants = {"WEIGHTED": gates is not None, "BLOCK": _block(width)}
        gather_kernel[(len(order),)](hidden, gates, order, rows, topk, width, **constants, **_LAUNCH)
    return rows


def triton_combine(rows: Tensor, gates: Tensor | None, places: Tensor, residual: Tensor | None = None) -> Tensor:
    """`reference_combine` by Triton; with a residual `residual` (T, h) added before rounding, in the dtype of
    `residual`.
    """
    rows, places = rows.contiguous(), places.contiguous()
    gates = None if gates is None else gates.contiguous()
    residual = None if residual is None else residual.contiguous()
    tokens, topk = places.shape
    width = rows.shape[1]
    total = (rows if residual is None else residual).new_empty(tokens, width)
    if total.numel():
        block = _block(width)
        constants = {"WEIGHTED": gates is not None, "HAS_RESIDUAL": residual is not None, "TOPK": topk, "BLOCK": block}
        grid = (tokens, triton.cdiv(width, block))
        combine_kernel[grid](rows, gates, places, residual, total, width, **constants, **_LAUNCH)
    return total


def _triton_gate_gradient(rows: Tensor, gradient: Tensor, places: Tensor) -> Tensor:
    """Return the dot product of each assignment's row with the gradient of its token, (T, k) fp32."""
    rows, gradient, places = rows.contiguous(), gradient.contiguous(), places.contiguous()
    result = torch.empty(places.shape, dtype=torch.float32, device=rows.device)
    if result.numel():
        width = rows.shape[1]
        gate_gradient_kernel[(result.numel(),)](
            rows, gradient, places, result, width, TOPK=places.shape[1], BLOCK=_block(width), **_LAUNCH
        )
    return result


def activation_backward(
    projected: Tensor, inner_gradient: Tensor, order: Tensor, gates: Tensor, *, gated: bool, nonlinearity: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the backward of activation and gates; 0 in empty rows.

    Args:
        projected: result of the first projection, (rows, f), gated (rows, 2 f).
        inner_gradient: gradient of the token's output times the second matrix, without the gate, (rows, f).
        order: assignment of each row, (rows,).
        gates: (T, k).
        gated: as in `expert_mlp`.
        nonlinearity: as in `expert_mlp`.

    Returns:
        Gradient of `projected`; input of the second projection times the gate, (rows, f); gradient of `gates` in fp32,
        without the contribution of a bias.
    """
    gates = gates.contiguous()
    projected_gradient = torch.empty_like(projected)
    weighted = torch.empty_like(inner_gradient)
    gate_gradient = torch.zeros(gates.shape, dtype=torch.float32, device=gates.device)
    if inner_gradient.numel():
        width = inner_gradient.shape[1]
        activation_backward_kernel[(len(order),)](
            projected,
            inner_gradient,
            order,
            gates,
            projected_gradient,
            weighted,
            gate_gradient,
            width,
            GATED=gated,
            ACTIVATION=nonlinearity,
            BLOCK=min(1024, _block(width)),
            **_LAUNCH,
        )
    return projected_gradient, weighted, gate_gradient


# ---------------------------------------------------------------- custom operations


def use_triton(tensor: Tensor) -> bool:
    """Return True if the kernels of this file support a tensor: on CUDA, or fp32 in the interpreter."""
    return triton_runs_on(tensor) or (INTERPRETED and tensor.is_cpu and tensor.dtype == torch.float32)


@custom_op("stoker::moe_gather")
def _gather(hidden: Tensor, order: Tensor, places: Tensor) -> Tensor:
    topk = places.shape[1]
    return triton_gather(hidden, order, topk) if use_triton(hidden) else reference_gather(hidden, order, topk)


@torch.library.register_fake("stoker::moe_gather")
def _(hidden: Tensor, order: Tensor, places: Tensor) -> Tensor:
    return hidden.new_empty(order.shape[0], hidden.shape[1])


@custom_op("stoker::moe_combine")
def _combine(rows: Tensor, gates: Tensor | None, places: Tensor, order: Tensor) -> Tensor:
    return triton_combine(rows, gates, places) if use_triton(rows) else reference_combine(rows, gates, places)


@torch.library.register_fake("stoker::moe_combine")
def _(rows: Tensor, gates: Tensor | None, places: Tensor, order: Tensor) -> Tensor:
    return rows.new_empty(places.shape[0], rows.shape[1])


@custom_op("stoker::moe_combine_backward")
def _combine_backward(
    gradient: Tensor, rows: Tensor, gates: Tensor, places: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    topk = places.shape[1]
    if use_triton(rows):
        gate_gradient = _triton_gate_gradient(rows, gradient, places).to(gates.dtype)
        return triton_gather(gradient, order, topk, gates), gate_gradient
    row_gradient = reference_gather(gradient, order, topk).to(gates.dtype)
    assignment = order.clamp(min=0)
    products = torch.where(order >= 0, (row_gradient * rows.to(gates.dtype)).sum(1), 0)
    row_gradient = row_gradient * torch.where(order >= 0, gates.reshape(-1)[assignment], 0)[:, None]
    gate_gradient = torch.where(places >= 0, products[places.clamp(min=0)], 0) if len(rows) else torch.zeros_like(gates)
    return row_gradient.to(rows.dtype), gate_gradient


@torch.library.register_fake("stoker::moe_combine_backward")
def _(gradient: Tensor, rows: Tensor, gates: Tensor, places: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return torch.empty_like(rows, memory_format=contiguous), torch.empty_like(gates, memory_format=contiguous)


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    order, places = ctx.saved_tensors
    return _combine(gradient, None, places, order), None, None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, gates, places, order = inputs
    ctx.weighted = gates is not None
    ctx.save_for_backward(*((rows, gates) if ctx.weighted else ()), places, order)


def _combine_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    *weighted, places, order = ctx.saved_tensors
    if not ctx.weighted:
        return _gather(gradient, order, places), None, None, None
    rows, gates = weighted
    return *_combine_backward(gradient, rows, gates, places, order), None, None


torch.library.register_autograd("stoker::moe_gather", _gather_backward, setup_context=_save_gather)
torch.library.register_autograd("stoker::moe_combine", _combine_gradients, setup_context=_save_combine)


# ---------------------------------------------------------------- public functions


def gather_rows(hidden: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return the token of each row, (T, h) to (rows, h), 0 in empty rows; differentiable once in `hidden`."""
    return _gather(hidden, order, places)


def combine_rows(rows: Tensor, gates: Tensor | None, places: Tensor, order: Tensor) -> Tensor:
    """Return the sum of each token's rows times their gates, (rows, h) to (T, h); None for gates of 1.

    Accumulated in fp32 (fp64 for fp64); empty rows and the gates of dropped assignments are not read. Differentiable
    once in `rows` and `gates`.
    """
    return _combine(rows, gates, places, order)
