"""Choice, capacity, both drop policies and padding against loops in numpy, property-based, full of ties."""

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from stoker.kernels.moe.expert_mlps import expert_mlp
from stoker.kernels.moe.routing import (
    RoutingResult,
    capacity_mask,
    expert_capacity,
    sinkhorn_routing,
    tokens_per_expert,
    topk_routing,
)

Array = np.ndarray[Any, np.dtype[Any]]

# few values, so that many are equal; and halves, so that sums of two of them are exact
LEVELS = st.integers(-4, 4).map(lambda level: level / 2)


@st.composite
def rows_of_logits(draw: st.DrawFn, most_tokens: int = 10, most_experts: int = 7) -> Array:
    tokens, experts = draw(st.integers(0, most_tokens)), draw(st.integers(1, most_experts))
    row = st.lists(LEVELS, min_size=experts, max_size=experts)
    return np.array(draw(st.lists(row, min_size=tokens, max_size=tokens)), np.float64).reshape(tokens, experts)


@st.composite
def choices(draw: st.DrawFn) -> tuple[Array, Array, int]:
    """Experts (T, k), gates with ties, E."""
    tokens, experts = draw(st.integers(0, 14)), draw(st.integers(1, 6))
    topk = draw(st.integers(1, experts))
    row = st.permutations(range(experts)).map(lambda order: order[:topk])
    chosen = np.array([draw(row) for _ in range(tokens)], np.int64).reshape(tokens, topk)
    gate = st.lists(st.sampled_from([0.0, 0.125, 0.5, 0.5, 2.0]), min_size=topk, max_size=topk)
    gates = np.array([draw(gate) for _ in range(tokens)], np.float64).reshape(tokens, topk)
    return chosen, gates, experts


# ---------------------------------------------------------------- references


def best(scores: Array, number: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:number]


def reference_choice(
    logits: Array,
    topk: int,
    score: str,
    pre_softmax: bool,
    bias: Array | None,
    scaling: float | None,
    groups: tuple[int, int] | None,
) -> tuple[list[list[int]], list[list[float]]]:
    experts, gates = [], []
    for row in logits:
        shares = np.exp(row) / np.exp(row).sum()
        scores = 1 / (1 + np.exp(-row)) if score == "sigmoid" else shares if pre_softmax else row
        ranked = scores if bias is None else scores + bias
        if groups is not None:
            number, allowed = groups
            parts = ranked.reshape(number, -1)
            worth = np.array([sum(sorted(part)[::-1][: max(1, topk // allowed)]) for part in parts])
            ranked = np.where(np.isin(np.arange(number), best(worth, allowed))[:, None], parts, -math.inf).ravel()
        chosen = best(ranked, topk)
        weights = scores[chosen]
        if score == "sigmoid":
            weights = weights / weights.sum() if topk > 1 else weights
        elif not pre_softmax:
            weights = np.exp(weights) / np.exp(weights).sum()
        experts.append(chosen)
        gates.append(list(weights * (1.0 if scaling is None else scaling)))
    return experts, gates


def reference_kept(
    experts: Array, gates: Array, number: int, capacity: int, policy: str, real: Array | None = None
) -> Array:
    """Every expert goes through the tokens that chose it, in the order of the policy, and takes `capacity` of them."""
    kept = np.zeros(experts.shape, bool)
    for expert in range(number):
        asking = [
            (token, slot)
            for token, row in enumerate(experts)
            for slot, chosen in enumerate(row)
            if chosen == expert and (real is None or real[token])
        ]
        if policy == "probs":
            asking.sort(key=lambda place: (-gates[place], place[0]))
        for place in asking[:capacity]:
            kept[place] = True
    return kept


def reference_sinkhorn(logits: Array) -> Array:
    matrix = np.exp(logits)
    columns = np.ones(logits.shape[1])
    for _ in range(100):
        rows = 1 / (len(matrix) * (matrix @ columns + 1e-8))
        before, columns = columns, 1 / (len(columns) * (rows @ matrix + 1e-8))
        if np.abs(columns - before).mean() <= 1e-4:
            break
    return matrix * columns


# ---------------------------------------------------------------- properties


@given(st.data())
def test_the_choice_is_that_of_a_loop(data: st.DataObject) -> None:
    logits = data.draw(rows_of_logits())
    experts = logits.shape[1]
    topk = data.draw(st.integers(1, experts))
    score: Any = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    pre_softmax = data.draw(st.booleans())
    exact = score == "softmax" and not pre_softmax  # elsewhere equal sums of scores may differ in the last bit
    bias = data.draw(st.none() | st.lists(LEVELS, min_size=experts, max_size=experts).map(np.array)) if exact else None
    scaling = data.draw(st.none() | st.just(2.5))
    pairs = [(n, g) for n in range(1, experts + 1) if experts % n == 0 for g in range(1, n + 1)]
    fitting = [pair for pair in pairs if topk <= pair[1] * experts // pair[0]]
    groups = data.draw(st.none() | st.sampled_from(fitting)) if exact else None
    ours = topk_routing(
        torch.from_numpy(logits),
        topk,
        score=score,
        pre_softmax=pre_softmax,
        selection_bias=None if bias is None else torch.from_numpy(bias),
        scaling_factor=scaling,
        num_groups=groups and groups[0],
        group_topk=groups and groups[1],
    )
    chosen, gates = reference_choice(logits, topk, score, pre_softmax, bias, scaling, groups)
    assert ours.experts.tolist() == chosen
    np.testing.assert_allclose(ours.gates.numpy(), np.array(gates).reshape(-1, topk), rtol=1e-12)


@given(st.data())
def test_biased_sigmoid_scores_in_groups_are_those_of_a_loop(data: st.DataObject) -> None:
    groups = data.draw(st.sampled_from([(2, 1), (2, 2), (4, 2), (4, 3)]))
    topk = data.draw(st.integers(1, groups[1] * 8 // groups[0]))
    generator = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    logits, bias = generator.normal(size=(5, 8)), generator.normal(size=8)
    ours = topk_routing(
        torch.from_numpy(logits),
        topk,
        score="sigmoid",
        selection_bias=torch.from_numpy(bias),
        num_groups=groups[0],
        group_topk=groups[1],
    )
    chosen, gates = reference_choice(logits, topk, "sigmoid", False, bias, None, groups)
    assert ours.experts.tolist() == chosen
    np.testing.assert_allclose(ours.gates.numpy(), gates, rtol=1e-12)


@examples(300)
@given(choices(), st.integers(0, 17), st.sampled_from(["probs", "position"]), st.none() | st.integers(0, 2**14 - 1))
def test_what_is_kept_is_what_a_loop_keeps(
    choice: tuple[Array, Array, int], capacity: int, policy: Any, mask: int | None
) -> None:
    experts, gates, number = choice
    real = None if mask is None else np.array([bool(mask >> token & 1) for token in range(len(experts))], bool)
    ours = capacity_mask(
        RoutingResult(torch.from_numpy(experts), torch.from_numpy(gates)),
        number,
        capacity,
        policy,
        token_mask=None if real is None else torch.from_numpy(real),
    )
    assert ours.dtype == torch.bool
    assert ours.tolist() == reference_kept(experts, gates, number, capacity, policy, real).tolist()
    counted = real if real is None else torch.from_numpy(real)
    counts = tokens_per_expert(torch.from_numpy(experts), number, token_mask=counted)
    demand = [(experts == e if real is None else (experts == e) & real[:, None]).sum() for e in range(number)]
    assert counts.tolist() == demand
    taken = tokens_per_expert(torch.from_numpy(experts)[:, :0], number)
    for slot in range(experts.shape[1]):
        taken = taken + tokens_per_expert(
            torch.from_numpy(experts[:, slot : slot + 1]), number, token_mask=ours[:, slot]
        )
    assert taken.tolist() == [min(capacity, int(asked)) for asked in demand]


@given(st.integers(0, 300), st.integers(1, 64), st.integers(1, 64), st.sampled_from([0.25, 0.5, 1.0, 1.25, 2.0, 8.0]))
def test_capacity_is_the_share_rounded_up(tokens: int, experts: int, topk: int, factor: float) -> None:
    topk = min(topk, experts)
    capacity = expert_capacity(tokens, experts, topk, factor)
    share = tokens * topk * factor / experts
    assert share - 1e-9 <= capacity < share + 1 + 1e-9
    assert capacity >= (tokens > 0)


@examples(25)
@given(st.data())
def test_padded_experts_give_what_a_loop_gives(data: st.DataObject) -> None:
    """From logits to the layer's output, dropped assignments and empty rows included."""
    tokens, experts = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    topk = data.draw(st.integers(1, experts))
    policy: Any = data.draw(st.sampled_from(["probs", "position"]))
    capacity = expert_capacity(tokens, experts, topk, data.draw(st.sampled_from([0.3, 0.7, 1.0, 2.0, 9.0])))
    generator = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    hidden, up, down = (generator.normal(size=shape) for shape in ((tokens, 3), (experts, 5, 3), (experts, 3, 5)))
    logits = generator.normal(size=(tokens, experts)).round(1)
    chosen, gates = reference_choice(logits, topk, "softmax", True, None, None, None)
    kept = reference_kept(np.array(chosen), np.array(gates), experts, capacity, policy)
    wanted = np.zeros_like(hidden)
    for token, slot in zip(*np.nonzero(kept), strict=True):
        expert = chosen[token][slot]
        wanted[token] += gates[token][slot] * (down[expert] @ np.maximum(up[expert] @ hidden[token], 0))
    ours = topk_routing(torch.from_numpy(logits), topk, pre_softmax=True)
    keep = capacity_mask(ours, experts, capacity, policy)
    inputs = [torch.from_numpy(array) for array in (hidden, up, down)]
    kinds: list[dict[str, Any]] = [
        {"implementation": "sequential"},
        {"implementation": "padded", "capacity": capacity},
    ]
    for options in kinds:
        output = expert_mlp(
            inputs[0], *ours, inputs[1], inputs[2], nonlinearity="relu", gated=False, kept=keep, **options
        )
        np.testing.assert_allclose(output.numpy(), wanted, rtol=1e-10, atol=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 6), st.sampled_from([0.3, 1.0, 4.0]))
def test_sinkhorn_is_that_of_a_loop(seed: int, tokens: int, experts: int, scale: float) -> None:
    logits = scale * np.random.default_rng(seed).normal(size=(tokens, experts))
    topk = 1 + seed % experts
    choice = sinkhorn_routing(torch.from_numpy(logits), topk, training=True)
    assert choice.experts.tolist() == [best(row, topk) for row in reference_sinkhorn(logits)]


@given(rows_of_logits(), st.sampled_from([1.0, 50.0, 1e4, 1e30]), st.booleans())
def test_sinkhorn_always_gives_experts(logits: Array, scale: float, training: bool) -> None:
    topk = 1 + logits.size % logits.shape[1]
    choice = sinkhorn_routing((scale * torch.from_numpy(logits)).float(), topk, training=training)
    assert choice.experts.shape == choice.gates.shape == (len(logits), topk)
    assert choice.gates.isfinite().all()
    for row in choice.experts.tolist():
        assert len(set(row)) == topk
        assert 0 <= min(row) <= max(row) < logits.shape[1]
