"""The feed-forward part of a layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.activations import NONLINEARITIES
from ..kernels.gated_activation import gated_activation
from .norms import LayerNorm, RMSNorm


class MLP(nn.Module):
    """Project up, apply the nonlinearity, project down. Gated: the rows of `up` are [gate | up], one matrix.

    Args:
        hidden_size: width of the residual stream.
        ffn_hidden_size: width between the two projections.
        nonlinearity: a name in `kernels.activations.NONLINEARITIES`.
        gated: multiply the activated gate with the up projection.
        bias: bias on both projections.
        dropout: dropout after the nonlinearity, in training.
        inner_norm: norm before the second projection (NormFormer, arXiv 2110.09456); None without.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        nonlinearity: str,
        gated: bool,
        bias: bool,
        dropout: float,
        inner_norm: LayerNorm | RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        self.gated = gated
        self.dropout = dropout
        self.up = nn.Linear(hidden_size, ffn_hidden_size * (2 if gated else 1), bias=bias)
        self.inner_norm = inner_norm
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, tokens, hidden_size) to the same shape."""
        projected = self.up(hidden)
        if self.gated:
            inner = gated_activation(projected, self.nonlinearity)
        else:
            inner = NONLINEARITIES[self.nonlinearity](projected)
        if self.inner_norm is not None:
            inner = self.inner_norm(inner)
        if self.training and self.dropout:
            inner = F.dropout(inner, self.dropout)
        return self.down(inner)
