"""Experts of tokens that arrive from other ranks, whose backward sends gradients back beside its last matmul.

Autograd would return the gradients of tokens and weights together, and only then start to send those of the tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...kernels.moe.assignments import Assignments
from ...kernels.moe.fused_experts import SavedExperts, fused_experts_and_saved
from ...kernels.moe.reference_experts import ExpertWeights
from ..parallel.expert import Exchange, InFlight, begin, wait


class _OverlappedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        gates: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        arriving_tokens: Tensor,
        arriving_gates: Tensor,
        experts: Tensor,
        order: Tensor,
        ends: Tensor,
        places: Tensor,
        nonlinearity: str,
        gated: bool,
        exchange: Exchange,
    ) -> Tensor:
        hidden, weights = wait(arriving_tokens), ExpertWeights(up, down, up_bias, down_bias, nonlinearity, gated)
        row_gates, assignments = wait(arriving_gates), Assignments(order, ends, places)
        output, projected = fused_experts_and_saved(hidden, experts, row_gates, weights, assignments, backend="auto")
        ctx.save_for_backward(projected, hidden, row_gates, *weights[:4], experts, *assignments)
        ctx.nonlinearity, ctx.gated, ctx.exchange = nonlinearity, gated, exchange
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        needed, back = ctx.needs_input_grad, ctx.exchange.transposed()

        def send(*gradients: Tensor) -> tuple[Tensor | None, ...]:
            return tuple(begin(each, back) if need else None for each, need in zip(gradients, needed[:2], strict=True))

        saved = SavedExperts(ctx.saved_tensors, ctx.nonlinearity, ctx.gated, "auto", not any(needed[2:6]))
        return *saved.gradients(gradient, send), *(None,) * 9


def overlapped_experts(
    tokens: InFlight, gates: InFlight, experts: Tensor, weights: ExpertWeights, assignments: Assignments
) -> Tensor:
    """Return `expert_mlp` of tokens in flight, where it is fused (`runs_fused`).

    Args:
        tokens: (rows, h).
        gates: in the same exchange.
        experts: experts of each row that arrives; these and the assignments are as in `ExpertInputs`.
        weights: of this rank's experts, in the dtype of the tokens.
        assignments: `sorted_assignments` of the experts.
    """
    *matrices, nonlinearity, gated = weights
    output = _OverlappedExperts.apply(
        tokens.rows, gates.rows, *matrices, tokens.arriving, gates.arriving, experts, *assignments,
        nonlinearity, gated, tokens.exchange,
    )  # fmt: skip
    return cast("Tensor", output)
