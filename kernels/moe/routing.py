"""Which experts each token goes to, with which weight, and the losses that keep the load even.

Plain torch without state. Everything is computed in fp32, or fp64 where the logits are; gradients flow through gates
and losses, never through a choice. Nothing here reads the device from the host, so that it runs inside compiled layers
and CUDA graphs, and equal scores go to the lower index on every device.

T tokens, E experts, k experts of a token. Where a function takes `real`, a bool (T,) that is False for padding,
padding counts in nothing that is shared between tokens.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .sinkhorn import column_factors

Score = Literal["softmax", "sigmoid"]
DropPolicy = Literal["probs", "position"]

NORMALISER_FLOOR = 1e-20  # added to the sum that sigmoid scores are divided by, as in Megatron


class Choice(NamedTuple):
    """The experts of each token.

    Attributes:
        experts: int64 (T, k), the best first, none twice in a row.
        gates: (T, k), what each expert's output is multiplied with, fp32 or fp64.
    """

    experts: Tensor
    gates: Tensor


# ---------------------------------------------------------------- choice


def choose_experts(
    logits: Tensor,
    topk: int,
    *,
    score: Score = "softmax",
    pre_softmax: bool = False,
    selection_bias: Tensor | None = None,
    scaling_factor: float | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
) -> Choice:
    """The `topk` experts of highest score for each token.

    | score   | pre_softmax | chosen by       | gates                                       |
    |---------|-------------|-----------------|---------------------------------------------|
    | softmax | False       | logits          | softmax over the chosen logits; they sum to 1 |
    | softmax | True        | softmax over E  | the chosen probabilities, not renormalised   |
    | sigmoid | either      | sigmoid of each | the chosen over their sum; for k = 1 as it is |

    With groups (DeepSeek-V3, arXiv 2412.19437) a token chooses among the experts of its best `group_topk` groups of
    neighbouring experts. A group counts as much as its best max(1, topk // group_topk) experts together.

    Args:
        logits: (T, E), any floating dtype.
        topk: experts of a token, 1 to E. With one expert the softmax over the chosen is the constant 1, and the router
            has no gradient; the caller asks for `pre_softmax`.
        score: `softmax` or `sigmoid`.
        pre_softmax: see the table.
        selection_bias: (E,), added to what is chosen by, not to the gates (arXiv 2408.15664).
        scaling_factor: factor of the gates, above 0.
        num_groups: groups, a divisor of E; None without groups.
        group_topk: groups of a token.

    Raises:
        ValueError: an argument breaks its rule.
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
        gates = gates / (gates.sum(dim=-1, keepdim=True) + NORMALISER_FLOOR)
    return Choice(experts, gates if scaling_factor is None else gates * scaling_factor)


def _check_choice(logits: Tensor, topk: int) -> None:
    if logits.ndim != 2:
        raise ValueError(f"`logits` must be (tokens, experts), but has the shape {tuple(logits.shape)}.")
    if not 1 <= topk <= logits.shape[1]:
        raise ValueError(f"`topk` must be from 1 to the {logits.shape[1]} experts, but is {topk}.")


def _wide(tensor: Tensor) -> Tensor:
    """In fp32, or fp64 if it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _best(scores: Tensor, number: int) -> Tensor:
    """Indices of the largest scores of each row, the largest first, of equals the lower; `torch.topk` takes any."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :number]
    return best.contiguous()  # else what is saved for backward is the order of all


def _within_best_groups(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> Tensor:
    """The scores, -inf outside each token's best groups."""
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
    worth = grouped.topk(max(1, topk // group_topk), dim=-1).values.sum(dim=-1)
    allowed = torch.zeros_like(worth, dtype=torch.bool).scatter(1, _best(worth, group_topk), value=True)
    return grouped.masked_fill(~allowed[..., None], -math.inf).view(tokens, experts)


def sinkhorn_choice(logits: Tensor, topk: int, *, training: bool, real: Tensor | None = None) -> Choice:
    """In training a choice that loads the experts evenly, otherwise the `topk` largest logits.

    In training the matrix exp(logits) is scaled by a factor of each row and each column until all rows and all columns
    have the same sum, and a token takes its largest entries (S-BASE, arXiv 2202.01169), which are found as logits plus
    the logarithms of the column factors. No gradient flows through the scaling. Gates are the sigmoid of the chosen
    logit for k = 1, else the chosen part of a softmax over E, not renormalised.

    Args:
        logits: (T, E), any floating dtype.
        topk: experts of a token, 1 to E.
        training: balance the load.
        real: bool (T,); padding takes part in no balance. None where all tokens are real.

    Raises:
        ValueError: an argument breaks its rule.
    """
    _check_choice(logits, topk)
    logits = _wide(logits)
    ranked = logits.detach()
    if training:
        ranked = ranked + column_factors(ranked, real).log()
    experts = _best(ranked, topk)
    scores = logits.sigmoid() if topk == 1 else logits.softmax(dim=-1)
    return Choice(experts, scores.gather(1, experts))


# ---------------------------------------------------------------- capacity


def capacity_of(tokens: int, experts: int, topk: int, factor: float) -> int:
    """Tokens that an expert takes: ceil(tokens * topk / experts * factor).

    Raises:
        ValueError: an argument breaks its rule.
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


def within_capacity(
    choice: Choice, experts: int, capacity: int, policy: DropPolicy, *, real: Tensor | None = None
) -> Tensor:
    """Which assignments the experts have room for, bool (T, k).

    An expert keeps `capacity` of the tokens that chose it: by `position` the first of them, by `probs` those of the
    largest gates, of equal gates the first.

    Args:
        choice: of T tokens.
        experts: E.
        capacity: tokens of an expert, at least 0, more than T as well.
        policy: `probs` or `position`.
        real: bool (T,); padding takes no room and is never kept. None where all tokens are real.

    Raises:
        ValueError: an argument breaks its rule.
    """
    if policy not in ("probs", "position"):
        raise ValueError(f"`policy` must be probs or position, but is {policy!r}.")
    if capacity < 0:
        raise ValueError(f"`capacity` must be at least 0, but is {capacity}.")
    return _room(choice.experts, choice.gates.detach(), experts, capacity, policy, real)


@torch.library.custom_op("stoker::moe_within_capacity", mutates_args=())
def _room(chosen: Tensor, gates: Tensor, experts: int, capacity: int, policy: str, real: Tensor | None) -> Tensor:
    """`within_capacity` as an operation that the compiler does not look into.

    It would sort up to 512 assignments within a kernel of its own making, which takes Triton minutes to compile.
    """
    if real is not None:
        chosen = chosen.masked_fill(~real[:, None], experts)  # an expert of its own, of which nothing is kept
    chosen = chosen.flatten()
    # the assignments, those of one expert together, each expert's in the order in which it takes them
    if policy == "probs":
        by_gate = gates.flatten().sort(descending=True, stable=True).indices
        order = by_gate[chosen[by_gate].sort(stable=True).indices]
    else:
        order = chosen.sort(stable=True).indices
    grouped = chosen[order]
    place = torch.arange(len(grouped), device=grouped.device) - torch.searchsorted(grouped, grouped)
    kept = (place < capacity) & (grouped < experts)
    return torch.zeros_like(kept).scatter(0, order, kept).view(gates.shape)


@_room.register_fake
def _(chosen: Tensor, gates: Tensor, experts: int, capacity: int, policy: str, real: Tensor | None) -> Tensor:
    return torch.empty_like(chosen, dtype=torch.bool)


# ---------------------------------------------------------------- load, losses, statistics


def tokens_per_expert(experts: Tensor, number: int, *, real: Tensor | None = None) -> Tensor:
    """How many tokens chose each expert, fp32 (E,): exact to 2**24.

    Comparisons are summed: atomics, as a scatter has them, would all wait for the same few numbers.

    Args:
        experts: int64 (T, k).
        number: E.
        real: bool (T,); padding is not counted. None where all tokens are real.
    """
    chosen = experts[:, :, None] == torch.arange(number, device=experts.device)
    if real is not None:
        chosen = chosen & real[:, None, None]
    return chosen.sum(dim=(0, 1)).float()


def router_probabilities(logits: Tensor, score: Score) -> Tensor:
    """Scores over all experts that sum to 1, (T, E): softmax, or sigmoids over their sum."""
    logits = _wide(logits)
    if score == "softmax":
        return logits.softmax(dim=-1)
    if score == "sigmoid":
        scores = logits.sigmoid()
        return scores / (scores.sum(dim=-1, keepdim=True) + NORMALISER_FLOOR)
    raise ValueError(f"`score` must be softmax or sigmoid, but is {score!r}.")


def load_balancing_loss(
    probabilities: Tensor,
    counts: Tensor,
    topk: int,
    *,
    tokens: int | Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """E * sum over experts of (mean probability) * (share of the assignments), a scalar (arXiv 2101.03961).

    1 where either is even. Its gradient flows through the probabilities alone. With counts and `tokens` of several
    processes and the probabilities of one, the losses of the processes add up to the loss of all.

    Args:
        probabilities: (T, E), of `router_probabilities`.
        counts: (E,), tokens that chose each expert, before any was dropped.
        topk: experts of a token.
        tokens: that `counts` are of; None for the (real) ones of `probabilities`.
        real: bool (T,); padding is not counted. None where all tokens are real.
    """
    if real is not None:
        probabilities = probabilities * real[:, None]
    if tokens is None:
        tokens = len(probabilities) if real is None else real.sum().clamp(min=1)
    shares = counts.detach().to(probabilities.dtype) / (topk * tokens)
    return counts.numel() * (probabilities.sum(dim=0) / tokens * shares).sum()


def z_loss(logits: Tensor, *, real: Tensor | None = None) -> Tensor:
    """The mean over tokens of the squared log-sum-exp of the logits, a scalar (ST-MoE, arXiv 2202.08906).

    Args:
        logits: (T, E), any floating dtype.
        real: bool (T,); padding is not counted. None where all tokens are real.
    """
    return _mean(_wide(logits).logsumexp(dim=-1).square(), real)


def router_entropy(probabilities: Tensor, *, real: Tensor | None = None) -> Tensor:
    """The mean over tokens of the entropy of their probabilities in nats, a scalar without gradient: 0 to ln E.

    Args:
        probabilities: (T, E).
        real: bool (T,); padding is not counted. None where all tokens are real.
    """
    return _mean(torch.special.entr(probabilities.detach()).sum(dim=-1), real)


def _mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Over the real tokens of (T,); 0 where there are none."""
    if real is None:
        return values.mean()
    return values.masked_fill(~real, 0.0).sum() / real.sum().clamp(min=1)


class _WithLossGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale.to(loss.dtype))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradients[0], scale, None


def with_loss_gradient(tensor: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """`tensor` itself; when its gradient arrives, `loss` gets the gradient `scale`.

    As if scale * loss were added to the loss that is differentiated, once per backward pass through `tensor`,
    which needs not be known here. Recomputed parts have one backward pass and so inject once.

    Args:
        tensor: of any shape, used for the loss that will be differentiated.
        loss: scalar, a function of parameters.
        scale: scalar on the device of `loss`: of a micro batch its share of the global batch, times a loss scaler's
            factor.

    Raises:
        ValueError: `loss` or `scale` is no scalar.
    """
    for name, value in (("loss", loss), ("scale", scale)):
        if value.ndim:
            raise ValueError(f"`{name}` must be a scalar, but has the shape {tuple(value.shape)}.")
    return _WithLossGradient.apply(tensor, loss, scale)  # type: ignore[no-any-return]
