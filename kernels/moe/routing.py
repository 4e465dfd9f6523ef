"""Top-k and Sinkhorn routing, expert capacity, load-balancing losses and router statistics.

Stateless plain PyTorch. Everything is computed in fp32, or fp64 for fp64 logits; gradients flow through gates and
losses, not through the selection of experts. There are no host syncs, so it runs inside compiled layers and CUDA
graphs, and ties go to the lower index on every device.

T tokens, E experts, k experts per token. `real` is a bool (T,) mask, False for padding, which is then excluded from
everything that is shared between tokens.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..custom_op import custom_op
from .sinkhorn import column_factors

Score = Literal["softmax", "sigmoid"]
DropPolicy = Literal["probs", "position"]

NORMALIZER_EPSILON = 1e-20  # added to the sum that normalizes sigmoid scores, as in Megatron


class RoutingResult(NamedTuple):
    """Selected experts and gates of each token.

    Attributes:
        experts: (T, k) int64, in descending order of score, without duplicates in a row.
        gates: weights of the experts' outputs, (T, k), fp32 or fp64.
    """

    experts: Tensor
    gates: Tensor


# ---------------------------------------------------------------- choice


def topk_routing(
    logits: Tensor,
    topk: int,
    *,
    score: Score = "softmax",
    pre_softmax: bool = False,
    selection_bias: Tensor | None = None,
    scaling_factor: float | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
) -> RoutingResult:
    """Select the `topk` experts with the highest scores for each token.

    | score   | pre_softmax | selected by     | gates                                                    |
    |---------|-------------|-----------------|----------------------------------------------------------|
    | softmax | False       | logits          | softmax over the selected logits, which sums to 1        |
    | softmax | True        | softmax over E  | selected probabilities, not renormalized                 |
    | sigmoid | either      | sigmoid         | selected sigmoids over their sum; unnormalized for k = 1 |

    With groups (DeepSeek-V3, arXiv 2412.19437) a token selects among the experts of its best `group_topk` groups of
    adjacent experts. The score of a group is the sum of its best max(1, topk // group_topk) expert scores.

    Args:
        logits: (T, E), any floating dtype.
        topk: experts per token, 1 to E. For 1 the softmax over the selected logits is the constant 1 and the router
            gets no gradient, so callers should set `pre_softmax`.
        score: `softmax` or `sigmoid`.
        pre_softmax: see the table.
        selection_bias: (E,), added to the scores for selection, not to the gates (arXiv 2408.15664).
        scaling_factor: factor of the gates, above 0.
        num_groups: number of groups, a divisor of E; None without groups.
        group_topk: groups per token.

    Raises:
        ValueError: an argument is invalid.
    """
    _check_choice(logits, topk)
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"`score` must be softmax or sigmoid, but is {score!r}.")
    if scaling_factor is not None and not 0 < scaling_factor < math.inf:
        raise ValueError(f"`scaling_factor` must be a number above 0, but is {scaling_factor}.")
    logits = _wide(logits)
    scores = logits
    if score == "sigmoid":
        scores = logits.sigmoid()
    elif pre_softmax:
        scores = logits.softmax(dim=-1)
    ranked = scores.detach()
    if selection_bias is not None:
        if selection_bias.shape != logits.shape[1:]:
            raise ValueError(
                f"`selection_bias` must have one number for each of the {logits.shape[1]} experts, but has the shape "
                f"{tuple(selection_bias.shape)}."
            )
        ranked = ranked + selection_bias.detach()
    if num_groups is not None or group_topk is not None:
        ranked = _within_best_groups(ranked, topk, num_groups, group_topk)
    experts = _best(ranked, topk)
    gates = scores.gather(1, experts)
    if score == "softmax" and not pre_softmax:
        gates = gates.softmax(dim=-1)
    elif score == "sigmoid" and topk > 1:
        gates = gates / (gates.sum(dim=-1, keepdim=True) + NORMALIZER_EPSILON)
    return RoutingResult(experts, gates if scaling_factor is None else gates * scaling_factor)


def _check_choice(logits: Tensor, topk: int) -> None:
    if logits.ndim != 2:
        raise ValueError(f"`logits` must be (tokens, experts), but has the shape {tuple(logits.shape)}.")
    if not 1 <= topk <= logits.shape[1]:
        raise ValueError(f"`topk` must be from 1 to the {logits.shape[1]} experts, but is {topk}.")


def _wide(tensor: Tensor) -> Tensor:
    """Cast to fp32, or keep fp64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _best(scores: Tensor, number: int) -> Tensor:
    """Return the indices of the largest scores of each row, descending; ties go to the lower, unlike `torch.topk`."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :number]
    return best.contiguous()  # a view would keep the indices of all experts for the backward


def _within_best_groups(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> Tensor:
    """Return the scores, -inf outside each token's best groups."""
    tokens, experts = scores.shape
    if num_groups is None or group_topk is None:
        raise ValueError(
            f"`num_groups` ({num_groups}) and `group_topk` ({group_topk}) must be given together, or neither."
        )
    if num_groups < 1 or experts % num_groups:
        raise ValueError(f"`num_groups` must divide the {experts} experts, but is {num_groups}.")
    if not 1 <= group_topk <= num_groups:
        raise ValueError(f"`group_topk` must be from 1 to `num_groups` ({num_groups}), but is {group_topk}.")
    size = experts // num_groups
    if topk > group_topk * size:
        raise ValueError(
            f"`topk` must be at most the {group_topk * size} experts of {group_topk} groups of {size}, but is {topk}."
        )
    grouped = scores.view(tokens, num_groups, size)
    group_scores = grouped.topk(max(1, topk // group_topk), dim=-1).values.sum(dim=-1)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, _best(group_scores, group_topk), value=True)
    return grouped.masked_fill(~allowed[..., None], -math.inf).view(tokens, experts)


def sinkhorn_routing(logits: Tensor, topk: int, *, training: bool, token_mask: Tensor | None = None) -> RoutingResult:
    """Select experts by Sinkhorn balancing in training, otherwise by the `topk` largest logits.

    In training the matrix exp(logits) is scaled by row and column factors until all rows and all columns have the same
    sum, and each token selects its largest entries (S-BASE, arXiv 2202.01169), found as logits plus the logarithms of
    the column factors. No gradient flows through the scaling. Gates are the sigmoid of the selected logit for k = 1,
    else the selected entries of a softmax over E, not renormalized.

    Args:
        logits: (T, E), any floating dtype.
        topk: experts per token, 1 to E.
        training: balance the load.
        token_mask: (T,) bool, False for padding, which is not balanced; None without padding.

    Raises:
        ValueError: an argument is invalid.
    """
    _check_choice(logits, topk)
    logits = _wide(logits)
    ranked = logits.detach()
    if training:
        ranked = ranked + column_factors(ranked, token_mask).log()
    experts = _best(ranked, topk)
    scores = logits.sigmoid() if topk == 1 else logits.softmax(dim=-1)
    return RoutingResult(experts, scores.gather(1, experts))


# ---------------------------------------------------------------- capacity


def expert_capacity(tokens: int, experts: int, topk: int, factor: float) -> int:
    """Return the capacity of an expert in tokens, ceil(tokens * topk / experts * factor).

    Raises:
        ValueError: an argument is invalid.
    """
    if tokens < 0:
        raise ValueError(f"`tokens` must be at least 0, but is {tokens}.")
    if experts < 1:
        raise ValueError(f"`experts` must be at least 1, but is {experts}.")
    if not 1 <= topk <= experts:
        raise ValueError(f"`topk` must be from 1 to the {experts} experts, but is {topk}.")
    if not 0 < factor < math.inf:
        raise ValueError(f"`factor` must be a number above 0, but is {factor}.")
    return math.ceil(tokens * topk / experts * factor)


def capacity_mask(
    routing: RoutingResult, experts: int, capacity: int, policy: DropPolicy, *, token_mask: Tensor | None = None
) -> Tensor:
    """Return the mask of the assignments within the capacity of their experts, bool (T, k).

    An expert keeps `capacity` of the tokens routed to it: the first ones (`position`), or those with the largest gates
    (`probs`), the first ones among equal gates.

    Args:
        routing: routing of T tokens.
        experts: E.
        capacity: tokens per expert, at least 0; may exceed T.
        policy: `probs` or `position`.
        token_mask: (T,) bool, False for padding, which is never kept and takes no capacity; None without padding.

    Raises:
        ValueError: an argument is invalid.
    """
    if policy not in ("probs", "position"):
        raise ValueError(f"`policy` must be probs or position, but is {policy!r}.")
    if capacity < 0:
        raise ValueError(f"`capacity` must be at least 0, but is {capacity}.")
    return _capacity_mask(routing.experts, routing.gates.detach(), experts, capacity, policy, token_mask)


@custom_op("stoker::moe_within_capacity")
def _capacity_mask(
    chosen: Tensor, gates: Tensor, experts: int, capacity: int, policy: str, token_mask: Tensor | None
) -> Tensor:
    """`capacity_mask` as a custom op, opaque to torch.compile.

    Inductor would sort up to 512 assignments in a fused kernel, which takes Triton minutes to compile.
    """
    if token_mask is not None:
        chosen = chosen.masked_fill(~token_mask[:, None], experts)  # an extra expert of which nothing is kept
    chosen = chosen.flatten()
    # assignments grouped by expert, within an expert in order of priority
    if policy == "probs":
        by_gate = gates.flatten().sort(descending=True, stable=True).indices
        order = by_gate[chosen[by_gate].sort(stable=True).indices]
    else:
        order = chosen.sort(stable=True).indices
    grouped = chosen[order]
    rank = torch.arange(len(grouped), device=grouped.device) - torch.searchsorted(grouped, grouped)
    kept = (rank < capacity) & (grouped < experts)
    return torch.zeros_like(kept).scatter(0, order, kept).view(gates.shape)


@torch.library.register_fake("stoker::moe_within_capacity")
def _(chosen: Tensor, gates: Tensor, experts: int, capacity: int, policy: str, real: Tensor | None) -> Tensor:
    return torch.empty_like(chosen, dtype=torch.bool)


# ---------------------------------------------------------------- load, losses, statistics


def tokens_per_expert(experts: Tensor, num_experts: int, *, token_mask: Tensor | None = None) -> Tensor:
    """Return the number of tokens routed to each expert, fp32 (E,), exact up to 2**24.

    A sum of comparisons, since the atomics of a scatter would contend for few addresses.

    Args:
        experts: (T, k) int64.
        num_experts: E.
        token_mask: (T,) bool, False for padding, which is not counted; None without padding.
    """
    chosen = experts[:, :, None] == torch.arange(num_experts, device=experts.device)
    if token_mask is not None:
        chosen = chosen & token_mask[:, None, None]
    return chosen.sum(dim=(0, 1)).float()


def router_probabilities(logits: Tensor, score: Score) -> Tensor:
    """Return scores over all experts that sum to 1, (T, E): softmax, or sigmoids over their sum."""
    logits = _wide(logits)
    if score == "softmax":
        return logits.softmax(dim=-1)
    if score == "sigmoid":
        scores = logits.sigmoid()
        return scores / (scores.sum(dim=-1, keepdim=True) + NORMALIZER_EPSILON)
    raise ValueError(f"`score` must be softmax or sigmoid, but is {score!r}.")


def load_balancing_loss(
    probabilities: Tensor,
    counts: Tensor,
    topk: int,
    *,
    tokens: int | Tensor | None = None,
    token_mask: Tensor | None = None,
) -> Tensor:
    """Return E * sum over experts of (mean probability) * (fraction of assignments), a scalar (arXiv 2101.03961).

    It is 1 if either is uniform. The gradient flows through the probabilities only. With counts and `tokens` summed
    over ranks and the local probabilities, the losses of the ranks add up to the global loss.

    Args:
        probabilities: (T, E), from `router_probabilities`.
        counts: tokens routed to each expert before dropping, (E,).
        topk: experts per token.
        tokens: number of tokens in `counts`; None for those of `probabilities` without padding.
        token_mask: (T,) bool, False for padding, which is not counted; None without padding.
    """
    if token_mask is not None:
        probabilities = probabilities * token_mask[:, None]
    if tokens is None:
        tokens = len(probabilities) if token_mask is None else token_mask.sum().clamp(min=1)
    shares = counts.detach().to(probabilities.dtype) / (topk * tokens)
    return counts.numel() * (probabilities.sum(dim=0) / tokens * shares).sum()


def z_loss(logits: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of the squared log-sum-exp of the logits, a scalar (ST-MoE, arXiv 2202.08906).

    Args:
        logits: (T, E), any floating dtype.
        token_mask: (T,) bool, False for padding, which is not counted; None without padding.
    """
    return _mean(_wide(logits).logsumexp(dim=-1).square(), token_mask)


def router_entropy(probabilities: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Return the mean entropy of the tokens' probabilities in nats, 0 to ln E, a scalar without gradient.

    Args:
        probabilities: (T, E).
        token_mask: (T,) bool, False for padding, which is not counted; None without padding.
    """
    return _mean(torch.special.entr(probabilities.detach()).sum(dim=-1), token_mask)


def _mean(values: Tensor, token_mask: Tensor | None) -> Tensor:
    """Return the mean of (T,) over the tokens that are not padding; 0 if there are none."""
    if token_mask is None:
        return values.mean()
    return values.masked_fill(~token_mask, 0.0).sum() / token_mask.sum().clamp(min=1)


class _WithLossGradient(torch.autograd.Function):
    """Identity of `tensor` whose backward injects the gradient `scale` into `loss`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale.to(loss.dtype))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradients[0], scale, None


def attach_auxiliary_loss(tensor: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """Attach an auxiliary loss to `tensor`: return `tensor`, whose backward gives `loss` the gradient `scale`.

    This is equivalent to adding scale * loss to the training loss, which need not be known here (as Megatron's
    MoEAuxLossAutoScaler). It acts once per backward pass through `tensor`, also with activation checkpointing.

    Args:
        tensor: any tensor that the training loss depends on.
        loss: scalar auxiliary loss.
        scale: scalar on the device of `loss`: the micro batch's share of the global batch, times the loss scale of
            mixed precision.

    Raises:
        ValueError: `loss` or `scale` is not a scalar.
    """
    for name, value in (("loss", loss), ("scale", scale)):
        if value.ndim:
            raise ValueError(f"`{name}` must be a scalar, but has the shape {tuple(value.shape)}.")
    return _WithLossGradient.apply(tensor, loss, scale)
