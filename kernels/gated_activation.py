"""Gated linear units, act(gate) * up of a fused projection [gate | up] (arXiv 2002.05202), one kernel per direction.

torch.compile turns the backward of the split into a concatenation that reads its inputs twice; here gate, up and the
output gradient are read once, and both halves of the input gradient are written side by side.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .activations import FUSED_ACTIVATIONS, NONLINEARITIES, activation_with_derivative, run_recomputed
from .custom_op import custom_op
from .launch import jit, tl, triton, triton_runs_on

BLOCK = 1024


# ---------------------------------------------------------------- reference


def reference_gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """Reference in plain PyTorch, any device and dtype: (..., 2 f) to (..., f)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return NONLINEARITIES[kind](gate) * up


# ---------------------------------------------------------------- Triton


@jit
def _forward_kernel(gate_up_pointer, product_pointer, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row per program. gate_up: (rows, 2 width), product: (rows, width)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_pointer + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up_pointer + row * 2 * width + width + column, mask=inside).to(tl.float32)
    value, _ = activation_with_derivative(gate, KIND)
    product = (value * up).to(product_pointer.dtype.element_ty)
    tl.store(product_pointer + row * width + column, product, mask=inside)


@jit
def _backward_kernel(
    gate_up_pointer, product_gradient_pointer, gradient_pointer, product_pointer, width,
    KIND: tl.constexpr, WITH_PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of one row per program, in both halves of gradient (rows, 2 width).

    gate_up: (rows, 2 width), product_gradient: (rows, width). WITH_PRODUCT: also product (rows, width).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up_pointer + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up_pointer + row * 2 * width + width + column, mask=inside).to(tl.float32)
    outer = tl.load(product_gradient_pointer + row * width + column, mask=inside).to(tl.float32)
    value, slope = activation_with_derivative(gate, KIND)
    element = gradient_pointer.dtype.element_ty
    tl.store(gradient_pointer + row * 2 * width + column, (outer * up * slope).to(element), mask=inside)
    tl.store(gradient_pointer + row * 2 * width + width + column, (outer * value).to(element), mask=inside)
    if WITH_PRODUCT:
        tl.store(product_pointer + row * width + column, (value * up).to(element), mask=inside)


def triton_forward(gate_up: Tensor, kind: str) -> Tensor:
    """Launch the forward kernel on a contiguous tensor."""
    width = gate_up.shape[-1] // 2
    product = gate_up.new_empty(*gate_up.shape[:-1], width)
    grid = (product.numel() // width, triton.cdiv(width, BLOCK))
    _forward_kernel[grid](gate_up, product, width, KIND=kind, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True)
    return product


def triton_backward(product_gradient: Tensor, gate_up: Tensor, kind: str, product: Tensor | None = None) -> Tensor:
    """Launch the backward kernel on contiguous tensors; also write the product to `product` if given."""
    width = gate_up.shape[-1] // 2
    gradient = torch.empty_like(gate_up)
    grid = (product_gradient.numel() // width, triton.cdiv(width, BLOCK))
    _backward_kernel[grid](
        gate_up, product_gradient, gradient, product, width,
        KIND=kind, WITH_PRODUCT=product is not None, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return gradient


# ---------------------------------------------------------------- custom operations


@custom_op("stoker::gated_activation")
def _gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    return triton_forward(gate_up.contiguous(), kind)


@torch.library.register_fake("stoker::gated_activation")
def _(gate_up: Tensor, kind: str) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@custom_op("stoker::gated_activation_backward")
def _gated_activation_backward(product_gradient: Tensor, gate_up: Tensor, kind: str) -> Tensor:
    return triton_backward(product_gradient.contiguous(), gate_up.contiguous(), kind)


@torch.library.register_fake("stoker::gated_activation_backward")
def _(product_gradient: Tensor, gate_up: Tensor, kind: str) -> Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.kind = inputs[1]


def _backward(ctx: Any, product_gradient: Tensor) -> tuple[Tensor, None]:
    return _gated_activation_backward(product_gradient, ctx.saved_tensors[0], ctx.kind), None


torch.library.register_autograd("stoker::gated_activation", _backward, setup_context=_save)


# ---------------------------------------------------------------- public function


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """Return act(gate) * up.

    Args:
        gate_up: (..., 2 f), the gate in the first half of the last dimension; computed in fp32 for 16-bit inputs on a
            GPU.
        kind: a name in `NONLINEARITIES`, such as `silu` (SwiGLU), `gelu` (GEGLU) or `relu` (ReGLU).

    Returns:
        (..., f), same dtype, differentiable once on a GPU.

    Raises:
        ValueError: the last dimension is odd, or `kind` is unknown.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"`gate_up` must end in an even dimension, but ends in {gate_up.shape[-1]}.")
    if kind not in NONLINEARITIES:
        raise ValueError(f"`kind` ({kind}) must be one of {', '.join(NONLINEARITIES)}.")
    if kind not in FUSED_ACTIVATIONS:
        return run_recomputed(partial(reference_gated_activation, kind=kind), gate_up)
    if triton_runs_on(gate_up):
        return _gated_activation(gate_up, kind)
    return reference_gated_activation(gate_up, kind)
