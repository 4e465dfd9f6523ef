"""Activation functions of MLPs; the gated ones (GLU variants) are in `gated_activation.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


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
