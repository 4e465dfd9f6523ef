"""Activation functions of MLPs, plain or as the gate of a GLU variant: in PyTorch, in Triton, and what they save.

Activations of users' own are added by name (`add_activation`), run in PyTorch, and save their input alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import jit, tl


def gelu(inputs: Tensor) -> Tensor:
    """Exact (erf) GELU, x * Phi(x) (arXiv 1606.08415)."""
    return F.gelu(inputs)


def gelu_tanh(inputs: Tensor) -> Tensor:
    """Tanh approximation of GELU, 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as in GPT-2."""
    return F.gelu(inputs, approximate="tanh")


def gelu_sigmoid(inputs: Tensor) -> Tensor:
    """Sigmoid approximation of GELU, x * sigmoid(1.702 x)."""
    return inputs * torch.sigmoid(1.702 * inputs)


def relu_squared(inputs: Tensor) -> Tensor:
    """Squared ReLU, max(x, 0)^2 (Primer, arXiv 2109.08668)."""
    return F.relu(inputs).square()


NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_sigmoid": gelu_sigmoid,
    "relu": F.relu,
    "relu_squared": relu_squared,
    "silu": F.silu,
}
FUSED_ACTIVATIONS = frozenset(NONLINEARITIES)
"""Activations that the Triton kernels know."""
SAVES_ONLY_OUTPUT = frozenset({"relu"})
"""Activations whose backward needs their output instead of their input."""
SAVES_INTERMEDIATE = frozenset({"gelu_sigmoid"})
"""Activations whose eager backward needs a further tensor of the size of their input."""


# ---------------------------------------------------------------- users' own


def add_activation(name: str, function: Callable[[Tensor], Tensor]) -> None:
    """Add an elementwise function to `NONLINEARITIES`, or replace it.

    It runs in the dtype of its input, without autocast, and its backward recomputes it, so that only the input is
    saved. Compiled, the compiler decides what to save, as for other activations.

    Args:
        name: not one of `FUSED_ACTIVATIONS`.
        function: from (...) to the same shape and dtype, of differentiable PyTorch operations, without parameters.
    """
    assert name not in FUSED_ACTIVATIONS

    NONLINEARITIES[name] = partial(run_recomputed, partial(_without_autocast, function))


def run_recomputed(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Return `function(inputs)`, saving only the input; compiled, what the compiler chooses."""
    if torch.compiler.is_compiling():
        return function(inputs)
    output = _Recomputed.apply(inputs, function)
    assert isinstance(output, Tensor)
    return output


class _Recomputed(torch.autograd.Function):
    """A function without parameters that saves its input and recomputes everything else."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        inputs, ctx.function = arguments
        ctx.save_for_backward(inputs)
        return ctx.function(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        with torch.enable_grad():
            inputs = ctx.saved_tensors[0].detach().requires_grad_()
            output = ctx.function(inputs)
        return torch.autograd.grad(output, inputs, gradients[0])[0], None


def _without_autocast(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    if not torch.is_autocast_enabled(inputs.device.type):
        return function(inputs)
    with torch.autocast(inputs.device.type, enabled=False):
        return function(inputs)


# ---------------------------------------------------------------- Triton


@jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) without overflow: the exponent is never positive."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@jit
def activation_with_derivative(x, KIND: tl.constexpr):
    """Return act(x) and its derivative in fp32, for every name in `FUSED_ACTIVATIONS`."""
    if KIND == "silu":
        sigmoid = _sigmoid(x)
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif KIND == "relu":
        value = tl.where(x > 0.0, x, 0.0)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    elif KIND == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "gelu_sigmoid":
        sigmoid = _sigmoid(1.702 * x)
        value = x * sigmoid
        slope = sigmoid + 1.702 * x * sigmoid * (1.0 - sigmoid)
    elif KIND == "relu_squared":
        positive = tl.where(x > 0.0, x, 0.0)
        value = positive * positive
        slope = 2.0 * positive
    else:
        tl.static_assert(KIND == "gelu_tanh", "unsupported activation")
        tanh = 2.0 * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x)) - 1.0
        value = 0.5 * x * (1.0 + tanh)
        inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
    return value, slope
