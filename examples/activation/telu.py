"""TeLU, x tanh(exp(x)) (arXiv 2412.20269), as an activation of stoker's MLPs and experts."""

import torch
from torch import Tensor

import stoker


@stoker.register("activation", "telu")
def telu(inputs: Tensor) -> Tensor:
    """Return x tanh(exp(x)): elementwise, of the same shape and dtype, made of differentiable operations."""
    return inputs * torch.tanh(torch.exp(inputs))
