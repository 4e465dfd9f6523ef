"""The losses that keep experts evenly loaded, their gradients, and the gradient injected where they are not summed."""

import math
from typing import Any

import pytest
import torch
from routing_cases import random_logits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stoker.kernels.moe.routing import (
    attach_auxiliary_loss,
    load_balancing_loss,
    router_entropy,
    router_probabilities,
    tokens_per_expert,
    topk_routing,
    z_loss,
)


class Operations(TorchDispatchMode):
    """Lists the operations within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- losses


def written_out_balance(probabilities: Tensor, experts: Tensor) -> Tensor:
    """coefficient-free loss of one process: E / (k T^2) * sum_e (sum_t P[t, e]) n_e."""
    tokens, number = probabilities.shape
    topk = experts.shape[1]
    total = probabilities.new_zeros(())
    for expert in range(number):
        count = sum(int(row.count(expert)) for row in experts.tolist())
        for token in range(tokens):
            total = total + probabilities[token, expert] * count
    return number / (topk * tokens**2) * total


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("topk", [1, 3])
def test_load_balancing_loss_and_its_gradient(score: Any, topk: int) -> None:
    logits = random_logits(7, 5).requires_grad_()
    experts = topk_routing(logits, topk, score=score, pre_softmax=True).experts
    loss = load_balancing_loss(router_probabilities(logits, score), tokens_per_expert(experts, 5), topk)
    scores = logits.exp() if score == "softmax" else 1 / (1 + (-logits).exp())
    wanted = written_out_balance(scores / scores.sum(1, keepdim=True), experts)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, wanted)))
    if score == "softmax":  # by hand: E / (k T^2) P (n - sum_e P n)
        chances, counts = logits.detach().softmax(1), tokens_per_expert(experts, 5).double()
        by_hand = 5 / (topk * 49) * chances * (counts - (chances * counts).sum(1, keepdim=True))
        (gradient,) = torch.autograd.grad(
            load_balancing_loss(router_probabilities(logits, score), counts, topk), logits
        )
        torch.testing.assert_close(gradient, by_hand)


def test_an_even_load_costs_one_and_one_expert_costs_most() -> None:
    even = torch.arange(8).remainder(4)[:, None]
    uniform = torch.full((8, 4), 0.25)
    assert load_balancing_loss(uniform, tokens_per_expert(even, 4), 1).item() == 1.0
    sure = torch.eye(4)[[2] * 8]
    assert load_balancing_loss(sure, tokens_per_expert(torch.full((8, 1), 2), 4), 1).item() == 4.0


def test_processes_losses_add_up_to_the_loss_of_all() -> None:
    logits = random_logits(12, 4)
    experts = topk_routing(logits, 2).experts
    probabilities, counts = router_probabilities(logits, "softmax"), tokens_per_expert(experts, 4)
    whole = load_balancing_loss(probabilities, counts, 2)
    for tokens in (12, torch.tensor(12)):
        parts = [load_balancing_loss(part, counts, 2, tokens=tokens) for part in probabilities.split([5, 7])]
        torch.testing.assert_close(parts[0] + parts[1], whole)


def test_z_loss_gradient() -> None:
    logits = random_logits(7, 5, scale=3).requires_grad_()
    logsum = logits.exp().sum(1).log()
    wanted = (logsum**2).sum() / 7
    torch.testing.assert_close(z_loss(logits), wanted)
    (gradient,) = torch.autograd.grad(z_loss(logits), logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, logits)[0])
    by_hand = 2 / 7 * logits.logsumexp(1, keepdim=True) * logits.softmax(1)
    torch.testing.assert_close(gradient, by_hand.detach())


def test_entropy_is_in_nats_and_carries_no_gradient() -> None:
    assert router_entropy(torch.full((3, 8), 0.125)).item() == pytest.approx(math.log(8))
    assert router_entropy(torch.eye(4)).item() == 0.0
    halves = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], requires_grad=True)
    assert router_entropy(halves).item() == pytest.approx(math.log(2) / 2)
    assert not router_entropy(halves).requires_grad


def test_counts_are_exact_where_half_precision_would_not_be() -> None:
    assert tokens_per_expert(torch.ones(70_001, 1, dtype=torch.int64), 3).tolist() == [0, 70_001, 0]


def test_counts_need_no_atomics() -> None:
    """All of a scatter's go to as many addresses as there are experts."""
    experts = torch.tensor([[0, 2], [2, 1], [3, 0]])
    with Operations() as made:
        counts = tokens_per_expert(experts, 5, token_mask=torch.tensor([True, True, False]))
    assert counts.tolist() == [1, 1, 2, 0, 0]
    assert counts.dtype == torch.float32
    assert not [name for name in made.names if "scatter" in name or "put" in name or "bincount" in name]


# ---------------------------------------------------------------- injected gradient


def a_layer(weight: Tensor, x: Tensor, share: Tensor, coefficient: float = 0.3) -> tuple[Tensor, Tensor]:
    """A router in small: gates that carry a loss of the same weight."""
    logits = x @ weight
    gates = topk_routing(logits, 2).gates
    loss = coefficient * z_loss(logits)
    return attach_auxiliary_loss(gates, loss, share), loss


def test_injection_is_the_gradient_of_the_sum() -> None:
    x, share = random_logits(6, 3), torch.tensor(0.25, dtype=torch.float64)
    weight = random_logits(3, 4, seed=1).requires_grad_()
    gates, loss = a_layer(weight, x, share)
    assert torch.equal(gates, topk_routing(x @ weight, 2).gates)
    target = random_logits(6, 2, seed=2)
    # used twice, and injected once all the same
    (injected,) = torch.autograd.grad((gates * target).sum() + gates.square().sum(), weight)
    plain = topk_routing(x @ weight, 2).gates
    loss = 0.3 * z_loss(x @ weight)
    (summed,) = torch.autograd.grad((plain * target).sum() + plain.square().sum() + share * loss, weight)
    torch.testing.assert_close(injected, summed, rtol=1e-12, atol=1e-12)


def test_injection_adds_up_over_micro_batches_whatever_the_model_loss_is_scaled_with() -> None:
    xs = random_logits(6, 3).split([2, 4])
    weight = random_logits(3, 4, seed=1).requires_grad_()
    scaler = 1024.0
    for x in xs:
        gates, _ = a_layer(weight, x, torch.tensor(scaler * len(x) / 6, dtype=torch.float64))
        (scaler * gates.square().sum()).backward()
    accumulated = weight.grad
    assert accumulated is not None
    totals = [topk_routing(x @ weight, 2).gates.square().sum() + len(x) / 6 * 0.3 * z_loss(x @ weight) for x in xs]
    (wanted,) = torch.autograd.grad(totals[0] + totals[1], weight)
    torch.testing.assert_close(accumulated / scaler, wanted, rtol=1e-12, atol=1e-12)


def test_a_recomputed_part_injects_once() -> None:
    x, share = random_logits(6, 3), torch.ones((), dtype=torch.float64)
    weight = random_logits(3, 4, seed=1).requires_grad_()
    gradients = []
    for recompute in (False, True):
        run = a_layer if not recompute else lambda *a: checkpoint(a_layer, *a, use_reentrant=False)
        gates, _ = run(weight, x, share)
        gradients.append(torch.autograd.grad(gates.square().sum(), weight)[0])
    assert torch.equal(*gradients)


def test_injection_reaches_a_loss_whose_tensor_needs_no_gradient() -> None:
    leaf = torch.tensor(2.0, requires_grad=True)
    scale = torch.tensor(0.5)
    for turn in (1, 2):
        attach_auxiliary_loss(torch.ones(3), leaf, scale).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.item() == 0.5 * turn
    assert scale.item() == 0.5
    with torch.no_grad():
        assert not attach_auxiliary_loss(torch.ones(3), leaf, scale).requires_grad
