"""The two norms as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..kernels.norms import layer_norm, rms_norm


class LayerNorm(nn.Module):
    """Layer normalisation of the last dimension.

    Args:
        hidden_size: length of the last dimension.
        epsilon: added to the variance under the root.
        zero_centered: store the gain minus one.
    """

    def __init__(self, hidden_size: int, epsilon: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.full((hidden_size,), 0.0 if zero_centered else 1.0))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., hidden_size) to the same shape and dtype."""
        return layer_norm(inputs, self.weight, self.bias, epsilon=self.epsilon, zero_centered=self.zero_centered)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation of the last dimension; arguments as in `LayerNorm`, no bias."""

    def __init__(self, hidden_size: int, epsilon: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.full((hidden_size,), 0.0 if zero_centered else 1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., hidden_size) to the same shape and dtype."""
        return rms_norm(
            inputs, self.weight, epsilon=self.epsilon, zero_centered=self.zero_centered, training=self.training
        )


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
