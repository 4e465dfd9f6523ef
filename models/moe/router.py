"""MoE router: top-k expert selection, gates, expert capacity, and auxiliary losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.launch import supports_fp32_output
from ...kernels.moe.router_logits import router_logits
from ...kernels.moe.routing import (
    DropPolicy,
    RoutingResult,
    Score,
    attach_auxiliary_loss,
    capacity_mask,
    expert_capacity,
    load_balancing_loss,
    router_entropy,
    router_probabilities,
    sinkhorn_routing,
    tokens_per_expert,
    topk_routing,
    z_loss,
)
from ..config.moe import MoESlice
from ..layers.cost import StackInputs
from ..layers.dropout import DropoutMask, require_dropout
from ..parallel.collectives import TensorParallel, unshard_tokens
from ..parallel.context import SequenceShard, unshard_sequences

STATISTIC_NAMES = ("load_balancing_loss", "z_loss", "entropy", "dropped", "assignments", "calls")
"""Names of the entries of `Routing.statistics` after the tokens per expert."""


class Routing(NamedTuple):
    """Expert assignments of the tokens of one call.

    Attributes:
        assignment: expert indices (tokens, topk) and their gates.
        keep_mask: bool (tokens, topk), False for assignments dropped at capacity or of padding; None keeps all.
        capacity: maximal tokens per expert, None for no limit; of the whole micro batch, like the statistics, where
            ranks share its tokens.
        statistics: fp32 (experts + 6): tokens assigned to each expert, then the entries named by `STATISTIC_NAMES`.
    """

    assignment: RoutingResult
    keep_mask: Tensor | None
    capacity: int | None
    statistics: Tensor

    @property
    def slots(self) -> int | None:
        """Rows of an expert that these tokens fill at most; None without a limit."""
        return None if self.capacity is None else min(self.capacity, len(self.assignment.experts))


class Router(nn.Module):
    """Top-k router: a linear layer over the experts, and the choice of `topk` of them for each token.

    Logits, probabilities and losses are computed in `dtype` whatever the dtype of the model.

    Args:
        hidden_size: width of the residual stream.
        moe: slice of the experts; `balancing` of `aux_loss` and `none` chooses by score, `sinkhorn` by a balanced
            assignment.

    Attributes:
        dtype: dtype of the computation, at least that of the input; the others are those of `MoESlice`.
        tensor_parallel: the tensor-parallel ranks; None for one.
        shard: the context-parallel ranks; None for one.

    Where ranks share the tokens of a micro batch, each computes the logits of its own, and all the same routing of the
    whole, in the order of the tokens, from the logits of all.
    """

    tensor_parallel: TensorParallel | None = None
    shard: SequenceShard | None = None

    def __init__(self, hidden_size: int, moe: MoESlice) -> None:
        super().__init__()
        self.topk = moe.topk
        self.balancing = moe.balancing
        self.score: Score = moe.score
        self.pre_softmax = moe.pre_softmax
        self.topk_scaling = moe.topk_scaling
        self.num_groups = moe.num_groups
        self.group_topk = moe.group_topk
        self.aux_loss = moe.aux_loss
        self.z_loss = moe.z_loss
        self.jitter = moe.jitter
        self.force_load_balancing = moe.force_load_balancing
        self.has_dropout = moe.jitter is not None or moe.force_load_balancing
        self.capacity_factor = moe.capacity_factor
        self.drop_policy: DropPolicy = moe.drop_policy
        self.dtype = {"fp32": torch.float32, "fp64": torch.float64}[moe.router_dtype]
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden_size))

    def forward(
        self,
        tokens: Tensor,
        expert_bias: Tensor | None,
        loss_share: Tensor,
        real: Tensor | None = None,
        *,
        batch: int = 1,
        noise: DropoutMask | None = None,
        use_capacity: bool = True,
    ) -> Routing:
        """Route tokens to experts.

        Args:
            tokens: (tokens, hidden_size), of this rank.
            expert_bias: fp32 (experts,), added to the scores for selection only; None for none.
            loss_share: scalar, factor of the gradients of both auxiliary losses.
            real: bool (tokens of all ranks,), False for padding, which is not routed nor counted; None: all are real.
            batch: samples of the tokens.
            noise: key and places of the jitter and of forced load balancing; None outside training or without both.
            use_capacity: apply the capacity factor, if there is one.
        """
        number = len(self.weight)
        with torch.autocast(tokens.device.type, enabled=False):
            dtype = torch.promote_types(self.dtype, tokens.dtype)
            inputs = tokens
            if self.training and self.jitter is not None:
                inputs = inputs.to(dtype)
                inputs = inputs * (1.0 + self.jitter * require_dropout(noise).noise(inputs.shape[1], dtype))
            logits = router_logits(inputs, self.weight, dtype)
            if self.training and self.force_load_balancing:  # straight-through, like Megatron's `RandomSTE`
                logits = require_dropout(noise).noise(number, dtype) + (logits - logits.detach())
            logits = self._of_all_ranks(logits, batch)
            logits_loss = z_loss(logits, token_mask=real)
            if self.training and self.z_loss:
                logits = attach_auxiliary_loss(logits, self.z_loss * logits_loss, loss_share)
            choice = self._choose(logits, expert_bias, real)
            probabilities = router_probabilities(logits, self.score)
            counts = tokens_per_expert(choice.experts, number, token_mask=real)
            balance = load_balancing_loss(probabilities, counts, self.topk, token_mask=real)
            if self.training and self.aux_loss:
                choice = RoutingResult(
                    choice.experts, attach_auxiliary_loss(choice.gates, self.aux_loss * balance, loss_share)
                )
            capacity, kept = None, None if real is None else real[:, None].expand_as(choice.experts)
            if self.capacity_factor is not None and use_capacity:
                capacity = expert_capacity(len(logits), number, self.topk, self.capacity_factor)
                kept = capacity_mask(choice, number, capacity, self.drop_policy, token_mask=real)
            with torch.no_grad():
                entropy = router_entropy(probabilities, token_mask=real)
                assignments = counts.sum()
                dropped = assignments - kept.sum() if kept is not None else torch.zeros_like(assignments)
                values = (balance, logits_loss, entropy, dropped, assignments, torch.ones_like(assignments))
                sums = torch.cat([counts, torch.stack([value.float() for value in values])])
        choice = RoutingResult(self._of_this_rank(choice.experts, batch), self._of_this_rank(choice.gates, batch))
        return Routing(choice, None if kept is None else self._of_this_rank(kept, batch), capacity, sums)

    def _of_all_ranks(self, rows: Tensor, batch: int) -> Tensor:
        """Return the rows (tokens of the micro batch, ...) from those of this rank's tokens."""
        ranks = self.tensor_parallel
        if ranks is not None and ranks.shards_tokens:
            rows = unshard_tokens(rows[None], ranks, 1)[0]
        return (
            rows if self.shard is None else unshard_sequences(rows.unflatten(0, (batch, -1)), self.shard).flatten(0, 1)
        )

    def _of_this_rank(self, rows: Tensor, batch: int) -> Tensor:
        """Return the rows of this rank's tokens, the inverse of `_of_all_ranks`."""
        ranks = self.tensor_parallel
        if self.shard is not None:
            rows = self.shard.local(rows.unflatten(0, (batch, -1))).flatten(0, 1)
        return rows.tensor_split(ranks.size)[ranks.rank] if ranks is not None and ranks.shards_tokens else rows

    def _choose(self, logits: Tensor, expert_bias: Tensor | None, real: Tensor | None) -> RoutingResult:
        if self.balancing == "sinkhorn":
            return sinkhorn_routing(logits, self.topk, training=self.training, token_mask=real)
        return topk_routing(
            logits,
            self.topk,
            score=self.score,
            pre_softmax=self.pre_softmax,
            selection_bias=expert_bias,
            scaling_factor=self.topk_scaling,
            num_groups=self.num_groups,
            group_topk=self.group_topk,
        )


# ---------------------------------------------------------------- cost


def router_saved_bytes(inputs: StackInputs, moe: MoESlice) -> int:
    """Return the bytes a router saves: its input in its own dtype, scores of all experts, and the top-k of each token.

    Under autocast also the norm's output in fp32, of which the experts read a low-precision copy.
    """
    itemsize = 8 if moe.router_dtype == "fp64" else 4
    saved = inputs.residual_elements * itemsize * (1 + bool(moe.jitter)) if _copies_input(inputs, moe) else 0
    saved += inputs.routed_tokens * (3 * moe.experts * itemsize + moe.topk * 28)
    return saved + (inputs.residual_elements * 4 if inputs.widths.casts_weights else 0)


def _copies_input(inputs: StackInputs, moe: MoESlice) -> bool:
    """Return True if the router saves a copy of its input in its own dtype; see `kernels.moe.router_logits`."""
    if not inputs.trains_router and not moe.jitter:  # a frozen weight needs no saved input
        return False
    if moe.jitter or moe.router_dtype == "fp64":
        return True
    if inputs.widths.weights >= 4:
        return False
    aligned = supports_fp32_output(moe.experts, inputs.stack.hidden_size)
    return not (inputs.attention.call.device == "cuda" and aligned)
