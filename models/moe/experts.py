"""Feed-forward networks of all experts of a layer, with stacked weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ...kernels.moe.expert_mlps import expert_mlp
from ..config.moe import MoESlice
from ..config.stack import StackSlice
from .router import Routing


class Experts(nn.Module):
    """All experts of a layer: each token's expert outputs, weighted by their gates and summed.

    Every process holds all experts. Expert parallelism would add an all-to-all before and after `expert_mlp`.

    Args:
        experts: number of experts.
        implementation: `auto`, or `sequential` to run the experts one after the other.
        pad_to_capacity: pad the tokens of every expert to its capacity.

    Other arguments as in `MLP`, for each expert; the rows of a gated `up` are [gate | up].
    """

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        nonlinearity: str,
        gated: bool,
        bias: bool,
        dropout: float,
        implementation: Literal["auto", "sequential"],
        pad_to_capacity: bool,
    ) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        self.gated = gated
        self.dropout = dropout
        self.uses_rng = dropout > 0
        self.implementation: Literal["auto", "sequential"] = implementation
        self.pad_to_capacity = pad_to_capacity
        rows = ffn_hidden_size * (2 if gated else 1)
        self.up = nn.Parameter(torch.empty(experts, rows, hidden_size))
        self.down = nn.Parameter(torch.empty(experts, hidden_size, ffn_hidden_size))
        self.up_bias = nn.Parameter(torch.empty(experts, rows)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden_size)) if bias else None

    def forward(self, tokens: Tensor, routed: Routing) -> Tensor:
        """Map (tokens, hidden_size) to the same shape; the output of a token dropped by all experts is 0."""
        return self._mlp(tokens, routed, None)

    def add_to_residual(self, residual: Tensor, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the residual `residual` (tokens, hidden_size) plus the expert outputs; fused kernels include the
        add.
        """
        if type(self) is not Experts:  # a subclass with its own forward
            return residual + self(tokens, routing)
        return self._mlp(tokens, routing, residual)

    def _mlp(self, tokens: Tensor, routed: Routing, residual: Tensor | None) -> Tensor:
        weights = (self.up, self.down, self.up_bias, self.down_bias)
        if torch.is_autocast_enabled(tokens.device.type):
            dtype = torch.get_autocast_dtype(tokens.device.type)
            tokens = tokens.to(dtype)
            weights = tuple(None if weight is None else weight.to(dtype) for weight in weights)
        up, down, up_bias, down_bias = weights
        assert up is not None
        assert down is not None
        return expert_mlp(
            tokens,
            routed.assignment.experts,
            routed.assignment.gates,
            up,
            down,
            nonlinearity=self.nonlinearity,
            gated=self.gated,
            up_bias=up_bias,
            down_bias=down_bias,
            kept=routed.keep_mask,
            capacity=routed.capacity if self.pad_to_capacity else None,
            dropout=self.dropout if self.training else 0.0,
            implementation="padded" if self.pad_to_capacity and routed.capacity is not None else self.implementation,
            residual=residual,
        )


def build_experts(stack: StackSlice, moe: MoESlice) -> Experts:
    """Build the experts of a layer."""
    mlp = stack.mlp
    return Experts(
        moe.experts,
        stack.hidden_size,
        moe.ffn_hidden_size,
        nonlinearity=mlp.nonlinearity,
        gated=mlp.gated,
        bias=mlp.bias,
        dropout=moe.dropout,
        implementation="auto" if moe.implementation == "grouped" else "sequential",
        pad_to_capacity=moe.pad_to_capacity,
    )
