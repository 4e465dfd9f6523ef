"""Routing: golden numbers, ties, capacity, padding, refusals; compiled, and without reading the device."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cuda_sync import forbid_device_sync
from routing_cases import GOLDEN, GOLDEN_EXPERTS, random_logits
from tiers import full_only, looped
from torch import Tensor

from stoker.kernels.moe.routing import (
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
from stoker.kernels.moe.sinkhorn import sinkhorn_column_factors


def tokens_kept(choice: RoutingResult, kept: Tensor, experts: int) -> list[list[int]]:
    return [((choice.experts == expert) & kept).any(1).nonzero().flatten().tolist() for expert in range(experts)]


# ---------------------------------------------------------------- golden numbers


def test_golden_choice_and_losses() -> None:
    post = topk_routing(GOLDEN, 2)
    assert post.experts.tolist() == GOLDEN_EXPERTS
    assert post.gates[:, 0].tolist() == pytest.approx(
        [0.731059, 0.731059, 0.549834, 0.952574, 0.731059, 0.524979], abs=1e-6
    )
    assert post.gates.sum(1).tolist() == pytest.approx([1.0] * 6)
    pre = topk_routing(GOLDEN, 2, pre_softmax=True)
    assert pre.experts.tolist() == GOLDEN_EXPERTS
    assert pre.gates.tolist() == [
        pytest.approx(row, abs=1e-6)
        for row in (
            [0.643914, 0.236883],
            [0.579259, 0.213097],
            [0.448284, 0.367024],
            [0.870049, 0.043317],
            [0.643914, 0.236883],
            [0.46517, 0.420904],
        )
    ]
    counts = tokens_per_expert(post.experts, 4)
    assert counts.tolist() == [4, 4, 2, 2]
    assert counts.dtype == torch.float32
    assert load_balancing_loss(router_probabilities(GOLDEN, "softmax"), counts, 2).item() == pytest.approx(
        1.091377, abs=1e-6
    )
    assert z_loss(GOLDEN).item() == pytest.approx(7.724292, abs=1e-6)


def test_golden_capacity() -> None:
    assert [expert_capacity(6, 4, 2, factor) for factor in (1.0, 1.25, 0.5)] == [3, 4, 2]
    choice = topk_routing(GOLDEN, 2)
    assert tokens_kept(choice, capacity_mask(choice, 4, 2, "probs"), 4) == [[0, 3], [2, 5], [1, 4], [1, 4]]
    assert tokens_kept(choice, capacity_mask(choice, 4, 2, "position"), 4) == [[0, 2], [0, 2], [1, 4], [1, 4]]


# ---------------------------------------------------------------- choice


@pytest.mark.parametrize("experts", [4, 40, 300])
def test_equal_scores_go_to_the_lower_index(experts: int) -> None:
    logits = torch.zeros(5, experts)
    logits[1, experts // 2 :] = 1.0
    wanted = [[0, 1, 2], [experts // 2, experts // 2 + 1, (experts // 2 + 2) % experts]]
    if experts == 4:
        wanted[1] = [2, 3, 0]
    scores: tuple[Score, ...] = ("softmax", "sigmoid")
    for score in scores:
        for pre_softmax in (False, True):
            choice = topk_routing(logits, 3, score=score, pre_softmax=pre_softmax)
            assert choice.experts[:2].tolist() == wanted
    assert sinkhorn_routing(torch.zeros(5, experts), 3, training=True).experts.tolist() == [[0, 1, 2]] * 5
    assert topk_routing(logits, 2, num_groups=2, group_topk=1).experts[0].tolist() == [0, 1]


def test_sigmoid_scores_sum_to_the_scaling_factor() -> None:
    logits = random_logits(20, 8)
    several = topk_routing(logits, 3, score="sigmoid", scaling_factor=2.5)
    scores = logits.sigmoid().gather(1, several.experts)
    torch.testing.assert_close(several.gates, 2.5 * scores / scores.sum(1, keepdim=True))
    one = topk_routing(logits, 1, score="sigmoid", scaling_factor=2.5)
    torch.testing.assert_close(one.gates, 2.5 * logits.sigmoid().amax(1, keepdim=True))


def test_selection_bias_acts_on_the_choice_only() -> None:
    logits = random_logits(50, 6)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 9.0])
    kinds: tuple[tuple[Score, bool], ...] = (("sigmoid", False), ("softmax", True), ("softmax", False))
    for score, pre_softmax in kinds:
        choice = topk_routing(logits, 2, score=score, pre_softmax=pre_softmax, selection_bias=bias)
        assert (choice.experts == 5).any(1).all()
        scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(1)
        gates = scores.gather(1, choice.experts)
        if not pre_softmax:
            logit = logits.gather(1, choice.experts)
            gates = logit.softmax(1) if score == "softmax" else gates / gates.sum(1, keepdim=True)
        torch.testing.assert_close(choice.gates, gates)
    plain = topk_routing(logits, 2, score="sigmoid")
    unbiased = topk_routing(logits, 2, score="sigmoid", selection_bias=torch.full((6,), 0.7))
    assert torch.equal(plain.experts, unbiased.experts)
    assert torch.equal(plain.gates, unbiased.gates)


def test_groups_are_ranked_by_the_sum_of_their_best() -> None:
    logits = torch.tensor([[4.0, 0.0, 3.0, 2.0, 1.0, 1.0]])
    # of two experts from one group, groups count by two each: 4, 5, 2
    assert topk_routing(logits, 2, num_groups=3, group_topk=1).experts.tolist() == [[2, 3]]
    # one expert, or two from two groups, and groups count by their best: 4, 3, 1
    assert topk_routing(logits, 1, num_groups=3, group_topk=1, pre_softmax=True).experts.tolist() == [[0]]
    assert topk_routing(logits, 2, num_groups=3, group_topk=2).experts.tolist() == [[0, 2]]
    assert topk_routing(logits, 1, num_groups=3, group_topk=2, pre_softmax=True).experts.tolist() == [[0]]
    # scores below 0, as a bias makes them, are not beaten by what is outside the groups
    bias = torch.tensor([-9.0, -9.0, -9.0, -9.0, -9.5, -9.5])
    biased = topk_routing(logits, 2, score="sigmoid", selection_bias=bias, num_groups=3, group_topk=1)
    assert biased.experts.tolist() == [[2, 3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_arithmetic_is_fp32_or_wider(dtype: torch.dtype) -> None:
    logits = random_logits(9, 5).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    choices = [
        topk_routing(logits, 2),
        topk_routing(logits, 2, pre_softmax=True),
        topk_routing(logits, 2, score="sigmoid", selection_bias=torch.zeros(5)),
        sinkhorn_routing(logits, 2, training=True),
    ]
    for choice in choices:
        assert (choice.experts.dtype, choice.gates.dtype) == (torch.int64, wide)
    counts = tokens_per_expert(choices[0].experts, 5)
    for score in ("softmax", "sigmoid"):
        probabilities = router_probabilities(logits, score)
        assert probabilities.dtype == wide
        assert load_balancing_loss(probabilities, counts, 2).dtype == wide
    assert z_loss(logits).dtype == wide
    torch.testing.assert_close(choices[0].gates, topk_routing(logits.to(wide), 2).gates, rtol=0, atol=0)


def test_gradients_of_the_gates() -> None:
    logits = random_logits(4, 5).requires_grad_()
    settings: list[dict[str, Any]] = [
        {},
        {"pre_softmax": True},
        {"score": "sigmoid", "scaling_factor": 1.5},
        {"score": "sigmoid", "selection_bias": torch.tensor([0.3, 0.0, -0.3, 0.0, 0.1])},
    ]
    for kind in settings:
        assert torch.autograd.gradcheck(lambda x, kind=kind: topk_routing(x, 2, **kind).gates, logits)
    for topk in (1, 2):
        assert torch.autograd.gradcheck(lambda x, k=topk: sinkhorn_routing(x, k, training=True).gates, logits)
    assert torch.autograd.gradcheck(lambda x: topk_routing(x, 1, pre_softmax=True).gates, logits)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
def test_large_logits_give_finite_gates_and_gradients(scale: float) -> None:
    logits = (scale * random_logits(16, 6)).float().requires_grad_()
    choices = [
        topk_routing(logits, 2),
        topk_routing(logits, 2, pre_softmax=True),
        topk_routing(logits, 2, score="sigmoid"),
        sinkhorn_routing(logits, 2, training=True),
        sinkhorn_routing(logits, 1, training=True),
    ]
    for choice in choices:
        assert choice.gates.isfinite().all()
        (gradient,) = torch.autograd.grad(choice.gates.square().sum(), logits)
        assert gradient.isfinite().all()
        assert all(len(set(row)) == len(row) for row in choice.experts.tolist())
    for score in ("softmax", "sigmoid"):
        probabilities = router_probabilities(logits, score)
        loss = load_balancing_loss(probabilities, tokens_per_expert(choices[0].experts, 6), 2)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert gradient.isfinite().all()
        assert router_entropy(probabilities).isfinite()


# ---------------------------------------------------------------- capacity


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_more_capacity_than_tokens_keeps_all(policy: Any) -> None:
    choice = topk_routing(GOLDEN, 2)
    assert capacity_mask(choice, 4, 7, policy).all()
    assert not capacity_mask(choice, 4, 0, policy).any()


def test_of_equal_gates_the_first_token_is_kept() -> None:
    choice = RoutingResult(torch.zeros(300, 1, dtype=torch.int64), torch.ones(300, 1))
    for policy in ("probs", "position"):
        assert capacity_mask(choice, 2, 7, policy).flatten().tolist() == [True] * 7 + [False] * 293


# ---------------------------------------------------------------- padding


def test_padding_counts_in_nothing() -> None:
    real = torch.tensor([True, False, True, True, False, True, True, False])
    logits = random_logits(8, 4)
    logits[~real] *= 50.0  # would be felt
    alone = logits[real]
    whole, part = topk_routing(logits, 2), topk_routing(alone, 2)
    counts = tokens_per_expert(whole.experts, 4, token_mask=real)
    assert torch.equal(counts, tokens_per_expert(part.experts, 4))
    for score in ("softmax", "sigmoid"):
        chances, wanted = router_probabilities(logits, score), router_probabilities(alone, score)
        torch.testing.assert_close(
            load_balancing_loss(chances, counts, 2, token_mask=real), load_balancing_loss(wanted, counts, 2)
        )
        torch.testing.assert_close(router_entropy(chances, token_mask=real), router_entropy(wanted))
    torch.testing.assert_close(z_loss(logits, token_mask=real), z_loss(alone))
    for policy in ("probs", "position"):
        kept = capacity_mask(whole, 4, 2, policy, token_mask=real)
        assert torch.equal(kept[real], capacity_mask(part, 4, 2, policy))
        assert not kept[~real].any()
    balanced = sinkhorn_routing(logits, 2, training=True, token_mask=real)
    assert torch.equal(balanced.experts[real], sinkhorn_routing(alone, 2, training=True).experts)
    torch.testing.assert_close(sinkhorn_column_factors(logits, real), sinkhorn_column_factors(alone))


def test_nothing_but_padding_is_no_division_by_zero() -> None:
    nobody = torch.zeros(6, dtype=torch.bool)
    chances = router_probabilities(GOLDEN, "softmax")
    assert load_balancing_loss(chances, torch.zeros(4), 2, token_mask=nobody).item() == 0
    assert z_loss(GOLDEN, token_mask=nobody).item() == 0
    assert router_entropy(chances, token_mask=nobody).item() == 0
    assert sinkhorn_column_factors(GOLDEN, nobody).isfinite().all()


# ---------------------------------------------------------------- compiled, without host reads


def a_router(logits: Tensor, bias: Tensor, share: Tensor) -> tuple[Tensor, ...]:
    """Everything that one call of a layer may do."""
    real = logits[:, 0] > -1.0
    choice = topk_routing(
        logits, 2, score="sigmoid", selection_bias=bias, scaling_factor=2.5, num_groups=4, group_topk=2
    )
    other = sinkhorn_routing(logits, 2, training=True, token_mask=real)
    counts = tokens_per_expert(choice.experts, logits.shape[1], token_mask=real)
    probabilities = router_probabilities(logits, "softmax")
    loss = load_balancing_loss(probabilities, counts, 2, token_mask=real) + z_loss(logits, token_mask=real)
    gates = attach_auxiliary_loss(choice.gates, loss, share)
    capacity = expert_capacity(len(logits), logits.shape[1], 2, 0.6)
    kept = [
        capacity_mask(choice, logits.shape[1], capacity, policy, token_mask=real) for policy in ("probs", "position")
    ]
    output = sum((gates * keep).sum() for keep in kept) + other.gates.sum()
    assert isinstance(output, Tensor)
    return output, choice.experts, other.experts, *kept, counts, router_entropy(probabilities, token_mask=real)


@full_only
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_compiled_router_is_the_same(backend: str) -> None:
    share, bias = torch.tensor(0.5), random_logits(1, 8, seed=3)[0].float()
    results = []
    for run in (a_router, torch.compile(a_router, fullgraph=True, backend=backend)):
        logits = random_logits(48, 8).float().requires_grad_()
        output, *others = run(logits, bias, share)
        output.backward()
        results.append([output.detach(), logits.grad, *others])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_nothing_is_read_from_the_device() -> None:
    """On the meta device there are no numbers: whatever would read one raises."""
    logits = torch.empty(16, 8, device="meta", requires_grad=True)
    output, *others = a_router(logits, torch.empty(8, device="meta"), torch.empty((), device="meta"))
    output.backward()
    assert [tuple(tensor.shape) for tensor in others] == [(16, 2), (16, 2), (16, 2), (16, 2), (8,), ()]
    assert sinkhorn_column_factors(logits.detach()).is_meta


@pytest.mark.gpu
def test_a_device_gives_what_the_cpu_gives_and_is_not_waited_for() -> None:
    share, bias = torch.tensor(0.5), random_logits(1, 8, seed=3)[0].float()
    results = []
    for device in ("cpu", "cuda"):
        logits = (2 * random_logits(4096, 8)).round().div(2).float().to(device).requires_grad_()  # full of ties
        inputs = [tensor.to(device) for tensor in (bias.round(), share)]
        if device == "cuda":
            a_router(logits, *inputs)[0].backward()
            logits.grad = None
            torch.cuda.synchronize()
        with forbid_device_sync() if device == "cuda" else nullcontext():
            with torch.autocast("cuda", torch.bfloat16):  # which routing must not feel
                output, *others = a_router(logits, *inputs)
            output.backward()
        results.append([output.detach(), logits.grad, *others])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs.cpu())


def test_autocast_does_not_reach_the_routing() -> None:
    logits, share, bias = random_logits(48, 8).float(), torch.tensor(0.5), random_logits(1, 8, seed=3)[0].float()
    plain = a_router(logits, bias, share)
    with torch.autocast("cpu", torch.bfloat16):
        for wanted, under in zip(plain, a_router(logits, bias, share), strict=True):
            assert torch.equal(wanted, under)


# ---------------------------------------------------------------- refusals


def refusals() -> list[tuple[str, Callable[[], object]]]:
    choice = RoutingResult(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    bad: Any = "best"
    return [
        (
            "`logits` must be (tokens, experts), but has the shape (2, 3, 4).",
            lambda: topk_routing(torch.ones(2, 3, 4), 1),
        ),
        ("`topk` must be from 1 to the 4 experts, but is 5.", lambda: topk_routing(GOLDEN, 5)),
        ("`topk` must be from 1 to the 4 experts, but is 0.", lambda: sinkhorn_routing(GOLDEN, 0, training=True)),
        ("`score` must be softmax or sigmoid, but is 'best'.", lambda: topk_routing(GOLDEN, 1, score=bad)),
        ("`score` must be softmax or sigmoid, but is 'best'.", lambda: router_probabilities(GOLDEN, bad)),
        ("`scaling_factor` must be a number above 0, but is 0.", lambda: topk_routing(GOLDEN, 1, scaling_factor=0)),
        (
            "`scaling_factor` must be a number above 0, but is nan.",
            lambda: topk_routing(GOLDEN, 1, scaling_factor=math.nan),
        ),
        (
            "`selection_bias` must have one number for each of the 4 experts, but has the shape (3,).",
            lambda: topk_routing(GOLDEN, 1, selection_bias=torch.ones(3)),
        ),
        (
            "`num_groups` (2) and `group_topk` (None) must be given together, or neither.",
            lambda: topk_routing(GOLDEN, 1, num_groups=2),
        ),
        (
            "`num_groups` must divide the 4 experts, but is 3.",
            lambda: topk_routing(GOLDEN, 1, num_groups=3, group_topk=1),
        ),
        (
            "`group_topk` must be from 1 to `num_groups` (2), but is 3.",
            lambda: topk_routing(GOLDEN, 1, num_groups=2, group_topk=3),
        ),
        (
            "`topk` must be at most the 2 experts of 1 groups of 2, but is 3.",
            lambda: topk_routing(GOLDEN, 3, num_groups=2, group_topk=1),
        ),
        ("`tokens` must be at least 0, but is -1.", lambda: expert_capacity(-1, 4, 2, 1.0)),
        ("`experts` must be at least 1, but is 0.", lambda: expert_capacity(6, 0, 1, 1.0)),
        ("`topk` must be from 1 to the 4 experts, but is 5.", lambda: expert_capacity(6, 4, 5, 1.0)),
        ("`factor` must be a number above 0, but is 0.0.", lambda: expert_capacity(6, 4, 2, 0.0)),
        ("`factor` must be a number above 0, but is inf.", lambda: expert_capacity(6, 4, 2, math.inf)),
        ("`policy` must be probs or position, but is 'best'.", lambda: capacity_mask(choice, 2, 1, bad)),
        ("`capacity` must be at least 0, but is -1.", lambda: capacity_mask(choice, 2, -1, "probs")),
        (
            "`loss` must be a scalar, but has the shape (1,).",
            lambda: attach_auxiliary_loss(torch.ones(2), torch.ones(1), torch.ones(())),
        ),
        (
            "`scale` must be a scalar, but has the shape (1,).",
            lambda: attach_auxiliary_loss(torch.ones(2), torch.ones(()), torch.ones(1)),
        ),
    ]


@looped(("message", "call"), refusals())
def test_what_breaks_a_rule_is_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError) as refused:
        call()
    assert str(refused.value) == message
