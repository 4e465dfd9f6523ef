"""The two norms as modules."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.norm_functions import NormParts, layer_norm, rms_norm, rms_norm_parts
from ...kernels.rms_norm_residual import forked_norm_projection, forked_rms_norm, forks


class Read(NamedTuple):
    """A stream before a part of a layer.

    Attributes:
        stream: what the part adds to.
        normed: what it reads, not yet normed if there is a `norm`.
        again: the same for a second reader, whose gradient comes apart; None for one.
        norm: what the part does itself, so that nothing of it is kept; None without.
    """

    stream: Tensor
    normed: Tensor
    again: Tensor | None = None
    norm: LayerNorm | RMSNorm | None = None


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

    def forked(self, stream: Tensor, twice: bool) -> Read:
        """The norm of a stream that goes on, for one reader or two, all of which use what they get."""
        if not forks(stream, self.weight):
            return Read(stream, self(stream))
        epsilon, centred = self.epsilon, self.zero_centered
        return Read(*forked_rms_norm(stream, self.weight, epsilon=epsilon, zero_centered=centred, twice=twice))

    def forks_projection(self, stream: Tensor) -> bool:
        """Whether `forked_projection` serves; under autocast the stream, a wide sum, would not be kept anyway."""
        return forks(stream, self.weight) and not torch.is_autocast_enabled(stream.device.type)

    def forked_projection(self, stream: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream that goes on, and a projection of its norm, which is made again in the backward; use both."""
        return forked_norm_projection(
            stream, self.weight, weight, bias, epsilon=self.epsilon, zero_centered=self.zero_centered
        )

    def parts(self, inputs: Tensor) -> NormParts:
        """What the norm of these inputs is a product of."""
        return rms_norm_parts(inputs, self.weight, epsilon=self.epsilon, zero_centered=self.zero_centered)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}
