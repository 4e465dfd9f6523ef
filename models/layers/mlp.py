"""Feed-forward network of a layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.activations import NONLINEARITIES
from ...kernels.gated_activation import gated_activation
from ...kernels.gated_down_projection import gated_projection
from ...kernels.launch import triton_runs_on
from ..memory.recompute import RecomputableModule, run_with_recomputed_input
from .fused_linear import linear_add_residual, norm_linear
from .norm import LayerNorm, RMSNorm


class MLP(RecomputableModule):
    """Up projection, nonlinearity, down projection. Gated: the rows of `up` are [gate | up], one matrix.

    Recomputed: everything between the projections.

    Args:
        hidden_size: width of the residual stream.
        ffn_hidden_size: width between the two projections.
        nonlinearity: a name in `kernels.activations.NONLINEARITIES`.
        gated: multiply the activated gate with the up projection.
        bias: bias on both projections.
        dropout: dropout after the nonlinearity, in training.
        inner_norm: norm before the down projection (NormFormer, arXiv 2110.09456); None without.
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
        self.uses_rng = dropout > 0
        self.up = nn.Linear(hidden_size, ffn_hidden_size * (2 if gated else 1), bias=bias)
        self.inner_norm = inner_norm
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=bias)

    def forward(
        self, hidden: Tensor, norm: LayerNorm | RMSNorm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Map (batch, tokens, hidden_size) to the same shape.

        Args:
            hidden: already normed unless `norm` is given.
            norm: norm to apply to `hidden` without saving its output; None if it has been applied.
            residual: residual stream to add the output to, shaped like `hidden`; None without.
        """
        if norm is None:
            projected = self.up(hidden)
        else:
            projected, residual = norm_linear(norm, self.up, hidden, residual)
        if not self.is_recomputed:
            return linear_add_residual(residual, self.down, self._inner(projected))
        fusable = self.inner_norm is None and not self.dropout and type(self.down) is nn.Linear
        if self.gated and fusable and triton_runs_on(projected):
            output = gated_projection(projected, self.down.weight, self.down.bias, self.nonlinearity)
        else:
            output = run_with_recomputed_input(self._inner, self.down, self.dropout > 0, projected)
        return output if residual is None else residual + output

    def _inner(self, projected: Tensor) -> Tensor:
        """Apply everything between the projections: nonlinearity, norm, dropout."""
        if self.gated:
            inner = gated_activation(projected, self.nonlinearity)
        else:
            inner = NONLINEARITIES[self.nonlinearity](projected)
        if self.inner_norm is not None:
            inner = self.inner_norm(inner)
        if self.training and self.dropout:
            inner = F.dropout(inner, self.dropout)
        return inner
