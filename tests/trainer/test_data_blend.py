"""Blends: how closely the order of the sets follows the weights, and that a position alone says what a sample is."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples, full_only

from stoker.trainer.data.datasets.blend import MAX_PERIOD, BlendedSamples, BlendSchedule
from stoker.trainer.data.datasets.samples import EvaluationWindows, MockSamples

WEIGHTS = st.lists(st.integers(1, 60) | st.sampled_from([0.1, 0.3, 0.7, 0.25, 1.5]), min_size=1, max_size=9)


@examples(60)
@given(weights=WEIGHTS)
def test_every_set_is_within_one_sample_of_its_weight_at_every_position(weights: list[float]) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    interleave = BlendSchedule(weights)
    assert list(interleave.shares) == [weight / sum(exact) for weight in exact]
    seen = interleave.period + 40
    sets, _ = interleave.lookup(0, seen)
    for number, share in enumerate(interleave.shares):
        behind = np.cumsum(sets == number) * share.denominator - np.arange(1, seen + 1) * share.numerator
        assert np.abs(behind).max() < share.denominator


@examples(40)
@given(weights=WEIGHTS, first=st.integers(0, 500), count=st.integers(1, 200))
def test_each_set_is_taken_in_its_own_order_without_gaps(weights: list[float], first: int, count: int) -> None:
    interleave = BlendSchedule(weights)
    sets, positions = interleave.lookup(0, first + count)
    for number in range(len(weights)):
        assert positions[sets == number].tolist() == list(range(int((sets == number).sum())))
    later = interleave.lookup(first, count)
    assert np.array_equal(later[0], sets[first:])
    assert np.array_equal(later[1], positions[first:])


def test_far_positions_are_as_quick_and_as_exact() -> None:
    interleave = BlendSchedule([0.3, 0.7])
    far = 1 << 60
    sets, positions = interleave.lookup(far - far % 10, 10)
    assert positions[sets == 1].tolist() == [far // 10 * 7 + k for k in range(7)]


@full_only
def test_weights_without_a_short_period_are_kept_to_a_millionth() -> None:
    weights = [1 / 3, 2**-0.5, 1e-9, 5.0]
    interleave = BlendSchedule(weights)
    assert interleave.period == MAX_PERIOD
    sets, _ = interleave.lookup(0, MAX_PERIOD)
    counts = np.bincount(sets)
    assert counts[2] == 1  # a set is never lost
    np.testing.assert_allclose(counts / MAX_PERIOD, np.array(weights) / sum(weights), atol=2e-6)
    for number, share in enumerate(interleave.shares):
        behind = np.cumsum(sets == number) - np.arange(1, MAX_PERIOD + 1) * float(share)
        assert np.abs(behind).max() < 1


@full_only
def test_many_rare_sets_leave_the_period_what_it_is() -> None:
    interleave = BlendSchedule([*(1e-12 * (k + 1) for k in range(300)), 1.0])
    sets, _ = interleave.lookup(0, MAX_PERIOD)
    assert np.bincount(sets).tolist() == [1] * 300 + [MAX_PERIOD - 300]


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="`weights`"):
        BlendSchedule(weights)


def _blended() -> BlendedSamples:
    parts = [MockSamples(1000, 6, seed=seed, samples=1 << 40) for seed in (1, 2, 3)]
    return BlendedSamples(parts, [0.5, 0.2, 0.3])


def test_a_batch_holds_the_samples_of_its_sets() -> None:
    blended = _blended()
    batch = blended.batch(3, 40)
    for row, (number, position) in enumerate(zip(*blended.schedule.lookup(3, 40), strict=True)):
        alone = blended.datasets[number].batch(int(position), 1)
        assert torch.equal(batch.tokens[row], alone.tokens[0])
        assert torch.equal(batch.labels[row], alone.labels[0])


def test_access_in_any_order_gives_the_same_samples_in_a_copy_too() -> None:
    blended = _blended()
    whole = blended.batch(0, 60)
    copy = pickle.loads(pickle.dumps(blended))  # what a loader process gets
    for first, last in [(50, 60), (7, 9), (0, 31), (59, 60)]:
        part = copy.batch(first, last - first)
        assert torch.equal(part.tokens, whole.tokens[first:last])
        assert torch.equal(part.labels, whole.labels[first:last])


def test_parts_and_weights_must_fit() -> None:
    part = MockSamples(10, 4, seed=0, samples=8)
    with pytest.raises(ValueError, match="as many"):
        BlendedSamples([part], [1, 2])
    with pytest.raises(ValueError, match="one sequence length"):
        BlendedSamples([part, EvaluationWindows(np.arange(9), 3)], [1, 2])
