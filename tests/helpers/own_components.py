"""Components of a user's own that are written as built-in ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stoker
from stoker.models.config.extensions import Kind
from stoker.models.layers.attention_bias import alibi_slopes, inverse_softplus


def own_gelu(inputs: Tensor) -> Tensor:
    """As `gelu`."""
    return F.gelu(inputs)


def own_silu(inputs: Tensor) -> Tensor:
    """As the gate of `swiglu`."""
    return F.silu(inputs)


def own_mish(inputs: Tensor) -> Tensor:
    """Of several operations, whose results autograd would keep."""
    return inputs * torch.tanh(torch.log1p(torch.exp(inputs)))


class OwnALiBi(nn.Module):
    """As `alibi`."""

    slopes: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor(alibi_slopes(num_heads), dtype=torch.float64), persistent=False)

    def forward(self, distances: Tensor) -> Tensor:
        """Return (H, L) for distances (L,)."""
        return -self.slopes[:, None] * distances.abs()


class OwnKerple(nn.Module):
    """As `kerple`."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.zeros(num_heads))
        self.raw_p = nn.Parameter(torch.full((num_heads,), inverse_softplus(1.0)))
        self.raw_b = nn.Parameter(torch.tensor([inverse_softplus(slope) for slope in alibi_slopes(num_heads)]))

    def forward(self, distances: Tensor) -> Tensor:
        """Return (H, L) for distances (L,)."""
        far = distances.abs().clamp(min=1).to(self.log_a.dtype)
        p, b = F.softplus(self.raw_p)[:, None], F.softplus(self.raw_b)[:, None]
        return -b * F.softplus(self.log_a[:, None] + p * far.log()) * (distances != 0)


class OwnPreLN(stoker.Block):
    """As `pre_ln`."""

    has_cross_attention = True

    def run(self, hidden: Tensor, branches: stoker.Branches) -> Tensor:
        """Return the new residual stream."""
        hidden = branches.attention(self.attention_norm(hidden), hidden)
        if self.cross_attention_norm is not None:
            hidden = branches.cross_attention(self.cross_attention_norm(hidden), hidden)
        return branches.mlp(self.mlp_norm(hidden), hidden)


COMPONENTS: dict[Kind, dict[str, Any]] = {
    "activation": {"own_gelu": own_gelu, "own_silu": own_silu, "own_mish": own_mish},
    "attention_bias": {"own_alibi": OwnALiBi, "own_kerple": OwnKerple},
    "block": {"own_pre_ln": OwnPreLN},
}


def register_all() -> None:
    """Register them, in this process; again has no effect."""
    for kind, components in COMPONENTS.items():
        for name, component in components.items():
            stoker.register(kind, name)(component)
