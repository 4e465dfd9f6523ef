"""The balanced choice: golden numbers, balance, how it ends, logits that overflow."""

import math

import pytest
import torch
from routing_cases import GOLDEN, GOLDEN_EXPERTS, random_logits
from torch import Tensor

from stoker.kernels.moe import sinkhorn
from stoker.kernels.moe.routing import sinkhorn_routing, tokens_per_expert, topk_routing
from stoker.kernels.moe.sinkhorn import sinkhorn_column_factors


def test_golden_sinkhorn(monkeypatch: pytest.MonkeyPatch) -> None:
    iterations, is_known = 0, sinkhorn._has_converged_on_cpu

    def counted(columns: Tensor) -> bool:
        nonlocal iterations
        iterations += 1
        return is_known(columns)

    monkeypatch.setattr(sinkhorn, "_has_converged_on_cpu", counted)
    assert sinkhorn_routing(GOLDEN, 2, training=True).experts.tolist() == [
        [0, 1],
        [3, 2],
        [1, 3],
        [0, 2],
        [3, 2],
        [1, 0],
    ]
    assert iterations == 10
    assert sinkhorn_routing(GOLDEN, 1, training=True).experts.flatten().tolist() == [0, 3, 1, 0, 3, 1]
    scaled = GOLDEN.exp() * sinkhorn_column_factors(GOLDEN)
    scaled = scaled / scaled.sum(1, keepdim=True) / 6
    assert scaled.sum(0).tolist() == pytest.approx([0.25] * 4, abs=1e-5)


def test_golden_sinkhorn_gates() -> None:
    for training in (True, False):
        one = sinkhorn_routing(GOLDEN, 1, training=training)
        assert torch.equal(one.gates, GOLDEN.sigmoid().gather(1, one.experts))
        two = sinkhorn_routing(GOLDEN, 2, training=training)
        assert torch.equal(two.gates, GOLDEN.softmax(1).gather(1, two.experts))
    assert sinkhorn_routing(GOLDEN, 2, training=False).experts.tolist() == GOLDEN_EXPERTS


def test_sinkhorn_balances_what_the_scores_would_not() -> None:
    logits = random_logits(512, 8) + torch.linspace(0, 4, 8)
    uneven = tokens_per_expert(topk_routing(logits, 1, pre_softmax=True).experts, 8)
    even = tokens_per_expert(sinkhorn_routing(logits, 1, training=True).experts, 8)
    assert uneven.std() / uneven.mean() > 1
    assert even.std() / even.mean() < 0.2
    assert torch.equal(
        sinkhorn_routing(logits, 1, training=False).experts, topk_routing(logits, 1, pre_softmax=True).experts
    )


@pytest.mark.parametrize("scale", [1.0, 10.0, 1e4])
def test_iterating_on_after_convergence_changes_nothing(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(64, 8, scale).float()
    stopped = sinkhorn_column_factors(logits)
    monkeypatch.setattr(sinkhorn, "_has_converged_on_cpu", lambda _: False)
    assert torch.equal(sinkhorn_column_factors(logits), stopped)


def test_sinkhorn_ends_on_numbers_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, is_known = 0, sinkhorn._has_converged_on_cpu

    def counted(columns: Tensor) -> bool:
        nonlocal calls
        calls += 1
        return is_known(columns)

    monkeypatch.setattr(sinkhorn, "_has_converged_on_cpu", counted)
    for bad in (math.nan, math.inf, -math.inf):
        for row in ([bad, 0.0, 0.0, 0.0], [bad] * 4):
            calls = 0
            logits = GOLDEN.clone()
            logits[2] = torch.tensor(row)
            choice = sinkhorn_routing(logits, 2, training=True)
            ended_after = calls
            assert sinkhorn_column_factors(logits).isfinite().all()
            assert all(len({*row}) == 2 and 0 <= min(row) <= max(row) < 4 for row in choice.experts.tolist())
            if math.isnan(bad):
                assert ended_after == 1
                assert choice.experts[[0, 1, 3]].tolist() == [[0, 1], [3, 2], [0, 1]]  # by the logits alone


def test_sinkhorn_stops_after_a_hundred_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def never(_: Tensor) -> bool:
        nonlocal calls
        calls += 1
        return False

    monkeypatch.setattr(sinkhorn, "_has_converged_on_cpu", never)
    sinkhorn_column_factors(GOLDEN)
    assert calls == 100


def test_sinkhorn_balances_logits_whose_exp_overflows() -> None:
    logits = random_logits(64, 8)
    shifted = logits + torch.linspace(-2000, 2000, 64)[:, None]
    torch.testing.assert_close(sinkhorn_column_factors(shifted), sinkhorn_column_factors(logits))


def test_sinkhorn_loses_no_order_below_what_exp_can_hold() -> None:
    wanted = topk_routing(1e4 * GOLDEN[:2], 2).experts
    assert torch.equal(sinkhorn_routing(1e4 * GOLDEN[:2], 2, training=True).experts, wanted)
