"""Feed-forward networks of all experts of a layer, with stacked weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ...kernels.autocast import autocast_dtype
from ...kernels.fp8.experts import fp8_experts
from ...kernels.moe.assignments import assignment_rows, sorted_assignments
from ...kernels.moe.expert_mlps import expert_mlp, runs_fused
from ...kernels.moe.reference_experts import ExpertWeights
from ..config.moe import MoESlice
from ..config.stack import StackSlice
from ..layers.dropout import ACTIVATION, LayerDropout, require_dropout
from ..layers.mlp import load_activation
from ..parallel.expert import ExpertParallel
from ..parallel.fp8 import Fp8Product, dense_weight
from ..parallel.peer_exchange import PeerExchange
from .dispatch import DISPATCHERS, Arrived, Dispatched, DispatcherName, ExpertInputs
from .overlapped_experts import overlapped_experts
from .router import Routing


class Experts(nn.Module):
    """All experts of a layer: each token's expert outputs, weighted by their gates and summed.

    Args:
        experts: number of experts.
        implementation: `auto`, or `sequential` to run the experts one after the other.
        pad_to_capacity: pad the tokens of every expert to its capacity.
        dispatcher: how tokens get to experts on other ranks.

    Other arguments as in `MLP`, for each expert; the rows of a gated `up` are [gate | up].

    Attributes:
        ranks: the expert-parallel ranks, of which this one holds its share of the experts; None: it holds all.
        fp8: how `up` and `down`, each as one matrix of all experts, are multiplied by in training; None: in the dtype
            of the tokens.
        exchange: of `ranks`, for the dispatcher `flex` in training; None: it is `alltoall`.
    """

    ranks: ExpertParallel | None = None
    fp8: tuple[Fp8Product, Fp8Product] | None = None
    exchange: PeerExchange | None = None

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
        dispatcher: DispatcherName = "alltoall",
    ) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        self.gated = gated
        self.dropout = dropout
        self.has_dropout = dropout > 0
        self.implementation: Literal["auto", "sequential"] = implementation
        self.pad_to_capacity = pad_to_capacity
        self.dispatcher: DispatcherName = dispatcher
        rows = ffn_hidden_size * (2 if gated else 1)
        self.up = nn.Parameter(torch.empty(experts, rows, hidden_size))
        self.down = nn.Parameter(torch.empty(experts, hidden_size, ffn_hidden_size))
        self.up_bias = nn.Parameter(torch.empty(experts, rows)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden_size)) if bias else None

    def forward(
        self,
        tokens: Tensor,
        routing: Routing,
        beside: Callable[[], Tensor] | None = None,
        dropout: LayerDropout | None = None,
    ) -> Tensor:
        """Map (tokens, hidden_size) to the same shape; the output of a token dropped by all experts is 0.

        Args:
            tokens: (tokens, hidden_size).
            routing: experts of each token.
            beside: returns a tensor to add to the output, shaped like it, computed while tokens are exchanged.
            dropout: dropouts of the layer in this forward; None outside training or without dropout.
        """
        if self.ranks is None:
            output = self.compute(self._own_inputs(tokens, routing, dropout))
            return output if beside is None else output + beside()
        tokens = tokens.to(autocast_dtype(tokens))
        rows = self._dropout_rows(routing, dropout)
        dispatcher = self.dispatcher
        if dispatcher == "flex" and (self.exchange is None or not self.training):  # of equal numbers of tokens only
            dispatcher = "alltoall"
        sent = DISPATCHERS[dispatcher](tokens, routing, self.ranks, len(self.up), self.pad_to_capacity, rows)
        added = None if beside is None else beside()
        output = sent.combine(self.compute_arriving(sent))
        return output if added is None else output + added

    def add_to_residual(
        self, residual: Tensor, tokens: Tensor, routing: Routing, dropout: LayerDropout | None = None
    ) -> Tensor:
        """Return the residual `residual` (tokens, hidden_size) plus the expert outputs; fused kernels include the
        add.
        """
        if self.ranks is not None:
            return residual + self(tokens, routing, dropout=dropout)
        return self.compute(self._own_inputs(tokens, routing, dropout), residual)

    def _own_inputs(self, tokens: Tensor, routing: Routing, dropout: LayerDropout | None) -> ExpertInputs:
        slots, rows = routing.slots if self.pad_to_capacity else None, self._dropout_rows(routing, dropout)
        return ExpertInputs(tokens, *routing.assignment, routing.keep_mask, slots, rows)

    def _dropout_rows(self, routing: Routing, dropout: LayerDropout | None) -> Tensor | None:
        if not self.training or not self.has_dropout:
            return None
        drawn = require_dropout(dropout)
        return assignment_rows(drawn.keys[ACTIVATION], drawn.stream_tokens, routing.assignment.experts.shape[1])

    def compute_arriving(self, sent: Dispatched | Arrived) -> Tensor:
        """Return `compute` of tokens on their way."""
        is_fused = partial(
            runs_fused,
            nonlinearity=self.nonlinearity,
            dropout=self.dropout if self.training else 0.0,
            implementation=self.implementation,
        )
        in_fp8 = self.fp8 is not None and self.training
        if isinstance(sent, Arrived):
            return self.compute(sent.receive(in_order=is_fused(sent.arrived.rows) and not in_fp8))
        tokens, gates = sent.tokens, sent.gates
        if sent.assignments is None or in_fp8 or not is_fused(tokens.arriving):
            return self.compute(sent.receive())
        dtype = tokens.arriving.dtype  # not that of the weights under autocast
        up, down, up_bias, down_bias = (
            None if each is None else each.to(dtype) for each in (*self._dense(), self.up_bias, self.down_bias)
        )
        assert up is not None
        assert down is not None
        weights = ExpertWeights(up, down, up_bias, down_bias, self.nonlinearity, self.gated)
        return overlapped_experts(tokens, gates, sent.experts, weights, sent.assignments)

    def compute(self, inputs: ExpertInputs, residual: Tensor | None = None) -> Tensor:
        """Return the weighted outputs of this rank's experts, shaped like the tokens, plus `residual`."""
        if self.fp8 is not None and self.training:
            return self._compute_in_fp8(inputs, self.fp8, residual)
        return expert_mlp(
            inputs.tokens,
            inputs.experts,
            inputs.gates,
            *self._dense(),
            nonlinearity=self.nonlinearity,
            gated=self.gated,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            kept=inputs.kept,
            capacity=inputs.capacity,
            dropout=self.dropout if self.training else 0.0,
            dropout_rows=inputs.dropout_rows,
            assignments=inputs.assignments,
            implementation=self.implementation if inputs.capacity is None else "padded",
            residual=residual,
        )

    def _dense(self) -> tuple[Tensor, Tensor]:
        """Return the weights, or the values of those that are kept in fp8."""
        up, down = self.fp8 or (None, None)
        return dense_weight(self.up, up, self.up.dtype), dense_weight(self.down, down, self.down.dtype)

    def _compute_in_fp8(
        self, inputs: ExpertInputs, fp8: tuple[Fp8Product, Fp8Product], residual: Tensor | None
    ) -> Tensor:
        up, down = fp8
        output = fp8_experts(
            inputs.tokens,
            inputs.gates,
            self.up,
            self.down,
            inputs.assignments or sorted_assignments(inputs.experts, len(self.up), inputs.kept),
            nonlinearity=self.nonlinearity,
            gated=self.gated,
            recipe=up.recipe,
            up_cast=up.cast,
            down_cast=down.cast,
            reduce=up.reduce,
            weight_reduce=up.weight_reduce,
        )
        return output if residual is None else residual + output


def build_experts(stack: StackSlice, moe: MoESlice) -> Experts:
    """Build the experts of a layer."""
    mlp = stack.mlp
    load_activation(mlp)
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
        dispatcher=moe.dispatcher,
    )
