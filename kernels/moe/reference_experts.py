"""Expert MLPs by a loop over the experts in plain PyTorch: the reference of the other implementations."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import NONLINEARITIES
from ..gated_activation import gated_activation


class ExpertWeights(NamedTuple):
    """Weights and activation of the MLPs of all experts, as in `expert_mlp`."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    nonlinearity: str
    gated: bool


def apply_activation(projected: Tensor, nonlinearity: str, gated: bool, dropout_mask: Tensor | None) -> Tensor:
    """Return the input of the second projection: activation, times the up half if gated, times the dropout mask."""
    inner = gated_activation(projected, nonlinearity) if gated else NONLINEARITIES[nonlinearity](projected)
    return inner if dropout_mask is None else inner * dropout_mask


def sequential_experts(
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
    weights: ExpertWeights,
    *,
    kept: Tensor | None,
    dropout_mask: Tensor | None,
) -> Tensor:
    """`expert_mlp` by a loop over the experts, which reads counts on the host.

    `dropout_mask`: scaled dropout mask, (T, k, f).
    """
    up, down, up_bias, down_bias, nonlinearity, gated = weights
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    total = torch.zeros_like(hidden, dtype=wide)
    no_biases = (None,) * len(up)
    per_expert = zip(
        up.unbind(),
        down.unbind(),
        no_biases if up_bias is None else up_bias.unbind(),
        no_biases if down_bias is None else down_bias.unbind(),
        strict=True,
    )
    for number, (up_weight, down_weight, up_row, down_row) in enumerate(per_expert):
        chosen = experts == number
        if kept is not None:
            chosen = chosen & kept
        tokens, slots = chosen.nonzero(as_tuple=True)
        projected = F.linear(hidden[tokens], up_weight, up_row)
        inner = apply_activation(
            projected, nonlinearity, gated, None if dropout_mask is None else dropout_mask[tokens, slots]
        )
        result = F.linear(inner, down_weight, down_row)
        # deterministic: a token has each expert at most once, so no index is added twice
        total = total.index_add(0, tokens, result.to(wide) * gates[tokens, slots, None].to(wide))
    return total.to(hidden.dtype)
