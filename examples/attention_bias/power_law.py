"""A position bias on the attention scores: -softplus(a) |d|^sigmoid(p), with a and p learned for each head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stoker


@stoker.register("attention_bias", "power_law")
class PowerLaw(nn.Module):
    """Bias of a power of the distance, between that of `alibi` (power 1) and none at all (power 0).

    Args:
        num_heads: query heads H.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-1.0, -5.0, num_heads))
        self.p = nn.Parameter(torch.zeros(num_heads))

    def forward(self, distances: Tensor) -> Tensor:
        """Return terms (H, L) for distances, int64 (L,): key position minus query position, negative for the past."""
        # the gradient of 0^p is not finite
        power = distances.abs().clamp(min=1) ** torch.sigmoid(self.p)[:, None]
        return -F.softplus(self.a)[:, None] * power * (distances != 0)
