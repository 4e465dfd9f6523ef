"""Which experts a token goes to, how much it takes of each, and the losses that keep the experts evenly loaded."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.moe.router_logits import router_logits
from ...kernels.moe.routing import (
    Choice,
    DropPolicy,
    Score,
    capacity_of,
    choose_experts,
    load_balancing_loss,
    router_entropy,
    router_probabilities,
    sinkhorn_choice,
    tokens_per_expert,
    with_loss_gradient,
    within_capacity,
    z_loss,
)

Balancing = Literal["aux_loss", "sinkhorn", "none"]

SUMS = ("load_balancing_loss", "z_loss", "entropy", "dropped", "assignments", "calls")
"""What `Routed.sums` holds behind the tokens of each expert."""


class Routed(NamedTuple):
    """Where the tokens of a call go.

    Attributes:
        choice: experts (tokens, topk) and their gates.
        kept: bool like the experts, False for what is above an expert's capacity; None keeps all.
        capacity: tokens an expert takes, None for any number.
        sums: fp32 (experts + 6): the tokens that chose each expert, then `SUMS`.
    """

    choice: Choice
    kept: Tensor | None
    capacity: int | None
    sums: Tensor


class Router(nn.Module):
    """A linear layer over the experts, and the choice of `topk` of them for each token.

    Logits, probabilities and losses are in `dtype` whatever the model is in.

    Args:
        hidden_size: width of the residual stream.
        experts: to choose from.
        topk: experts of a token.
        balancing: `aux_loss` and `none` choose by score, `sinkhorn` by a balanced assignment.
        score: `softmax` over the experts, or `sigmoid` of each.
        pre_softmax: gates are the scores over all experts, not a softmax over the chosen.
        topk_scaling: factor of the gates, None for none.
        num_groups: groups of experts, of which a token may only use `group_topk`; None for no groups.
        group_topk: groups of a token.
        aux_loss: coefficient of the load-balancing loss (Switch Transformer, arXiv 2101.03961), 0 for none.
        z_loss: coefficient of the mean squared log-sum-exp of the logits (ST-MoE, arXiv 2202.08906), 0 for none.
        jitter: in training the router sees each number times a random one in [1 - jitter, 1 + jitter]; None for none.
        capacity_factor: an expert takes at most ceil(tokens * topk / experts * factor) tokens; None takes all.
        drop_policy: which tokens are above that: those of the smallest gates (`probs`), or the last (`position`).
        dtype: of the arithmetic.
    """

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        *,
        topk: int,
        balancing: Balancing,
        score: Score,
        pre_softmax: bool,
        topk_scaling: float | None,
        num_groups: int | None,
        group_topk: int | None,
        aux_loss: float,
        z_loss: float,
        jitter: float | None,
        capacity_factor: float | None,
        drop_policy: DropPolicy,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.topk = topk
        self.balancing: Balancing = balancing
        self.score: Score = score
        self.pre_softmax = pre_softmax
        self.topk_scaling = topk_scaling
        self.num_groups = num_groups
        self.group_topk = group_topk
        self.aux_loss = aux_loss
        self.z_loss = z_loss
        self.jitter = jitter
        self.draws = jitter is not None
        self.capacity_factor = capacity_factor
        self.drop_policy: DropPolicy = drop_policy
        self.dtype = dtype
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))

    def forward(
        self,
        tokens: Tensor,
        expert_bias: Tensor | None,
        loss_share: Tensor,
        real: Tensor | None = None,
        *,
        limited: bool = True,
    ) -> Routed:
        """Route (tokens, hidden_size).

        Args:
            tokens: of a call.
            expert_bias: fp32 (experts,), added to the scores for the choice alone; None for none.
            loss_share: scalar, factor of the gradients of both losses.
            real: bool (tokens,), False for padding, which no expert takes and which counts nowhere; None where all are.
            limited: an expert takes no more tokens than its capacity, where it has one.
        """
        number = len(self.weight)
        with torch.autocast(tokens.device.type, enabled=False):
            dtype = torch.promote_types(self.dtype, tokens.dtype)
            seen = tokens
            if self.training and self.jitter is not None:
                seen = seen.to(dtype)
                seen = seen * (1.0 + self.jitter * (2.0 * torch.rand_like(seen) - 1.0))
            logits = router_logits(seen, self.weight, dtype)
            squares = z_loss(logits, real=real)
            if self.training and self.z_loss:
                logits = with_loss_gradient(logits, self.z_loss * squares, loss_share)
            choice = self._choose(logits, expert_bias, real)
            probabilities = router_probabilities(logits, self.score)
            counts = tokens_per_expert(choice.experts, number, real=real)
            uneven = load_balancing_loss(probabilities, counts, self.topk, real=real)
            if self.training and self.aux_loss:
                choice = Choice(choice.experts, with_loss_gradient(choice.gates, self.aux_loss * uneven, loss_share))
            capacity, kept = None, None if real is None else real[:, None].expand_as(choice.experts)
            if self.capacity_factor is not None and limited:
                capacity = capacity_of(len(tokens), number, self.topk, self.capacity_factor)
                kept = within_capacity(choice, number, capacity, self.drop_policy, real=real)
            with torch.no_grad():
                entropy = router_entropy(probabilities, real=real)
                assignments = counts.sum()
                dropped = assignments - kept.sum() if kept is not None else torch.zeros_like(assignments)
                numbers = (uneven, squares, entropy, dropped, assignments, torch.ones_like(assignments))
                sums = torch.cat([counts, torch.stack([value.float() for value in numbers])])
        return Routed(choice, kept, capacity, sums)

    def _choose(self, logits: Tensor, expert_bias: Tensor | None, real: Tensor | None) -> Choice:
        if self.balancing == "sinkhorn":
            return sinkhorn_choice(logits, self.topk, training=self.training, real=real)
        return choose_experts(
            logits,
            self.topk,
            score=self.score,
            pre_softmax=self.pre_softmax,
            selection_bias=expert_bias,
            scaling_factor=self.topk_scaling,
            num_groups=self.num_groups,
            group_topk=self.group_topk,
        )
