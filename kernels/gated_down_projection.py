"""Linear layer on act(gate) * up that saves [gate | up] for the backward pass and recomputes the product.

The gradient of the weight needs the product. The kernel that computes the gradient of [gate | up] writes it too, from
values it has loaded anyway: a third of the memory traffic of running the activation a second time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import FUSED_ACTIVATIONS, NONLINEARITIES
from .autocast import autocast
from .custom_op import custom_op
from .gated_activation import gated_activation, reference_gated_activation, triton_backward
from .launch import triton_runs_on

# ---------------------------------------------------------------- reference


def reference_gated_projection(gate_up: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Reference in plain PyTorch, any device and dtype: (..., 2 f) to (..., n) by a weight (n, f)."""
    return F.linear(reference_gated_activation(gate_up, kind), weight, bias)


# ---------------------------------------------------------------- Triton


def triton_backward_with_product(product_gradient: Tensor, gate_up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Launch the kernel on contiguous tensors and return the gradient of `gate_up` and the product."""
    product = torch.empty_like(product_gradient)
    return triton_backward(product_gradient, gate_up, kind, product), product


# ---------------------------------------------------------------- custom operation


@custom_op("stoker::gated_activation_backward_with_product")
def _backward_with_product(product_gradient: Tensor, gate_up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return triton_backward_with_product(product_gradient.contiguous(), gate_up.contiguous(), kind)


@torch.library.register_fake("stoker::gated_activation_backward_with_product")
def _(product_gradient: Tensor, gate_up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    contiguous = torch.contiguous_format
    return (
        torch.empty_like(gate_up, memory_format=contiguous),
        torch.empty_like(product_gradient, memory_format=contiguous),
    )


class _GatedProjection(torch.autograd.Function):
    """Save `gate_up` and `weight` only."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.kind = kind
        return F.linear(gated_activation(gate_up, kind), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        gate_up, weight = ctx.saved_tensors
        gate_up_gradient, product = _backward_with_product(gradient @ weight, gate_up, ctx.kind)
        rows = gradient.flatten(0, -2)
        weight_gradient = rows.t() @ product.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return gate_up_gradient, weight_gradient, rows.sum(0) if ctx.needs_input_grad[2] else None, None


# ---------------------------------------------------------------- public function


def gated_projection(gate_up: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Return `F.linear(gated_activation(gate_up, kind), weight, bias)`; on a GPU only `gate_up` is saved.

    Args:
        gate_up: (..., 2 f), the gate in the first half of the last dimension; under autocast, cast to its dtype.
        weight: (n, f), likewise.
        bias: (n,), likewise, or None.
        kind: a name in `NONLINEARITIES`, as in `gated_activation`.

    Returns:
        (..., n), differentiable once on a GPU.

    Raises:
        ValueError: shapes do not match, or `kind` is unknown.
    """
    if kind not in NONLINEARITIES:
        raise ValueError(f"`kind` ({kind}) must be one of {', '.join(NONLINEARITIES)}.")
    if gate_up.shape[-1] != 2 * weight.shape[-1]:
        raise ValueError(
            f"`gate_up` must end in twice the width of `weight` ({weight.shape[-1]}), but ends in {gate_up.shape[-1]}."
        )
    if kind not in FUSED_ACTIVATIONS or not triton_runs_on(gate_up):
        return reference_gated_projection(gate_up, weight, bias, kind)
    gate_up, weight, bias = autocast(gate_up, weight, bias)
    output = _GatedProjection.apply(gate_up, weight, bias, kind)
    assert isinstance(output, Tensor)
    return output
