import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples, looped

from stoker.trainer.data.datasets.samples import IGNORE_INDEX, EvaluationWindows, MockSamples, Samples, TrainingWindows

STREAM = np.arange(1000, 2103, dtype=np.uint16)
"""Every token says where it stands."""


def _makers() -> dict[str, Samples]:
    return {
        "train": TrainingWindows(STREAM, 10, seed=7),
        "evaluation": EvaluationWindows(STREAM, 10),
        "mock": MockSamples(5000, 10, seed=7, samples=64),
    }


@pytest.mark.parametrize("kind", ["train", "evaluation", "mock"])
@given(order=st.permutations(range(8)), cuts=st.sets(st.integers(1, 239), max_size=6))
@examples(25)
def test_a_sample_depends_on_its_position_alone(kind: str, order: list[int], cuts: set[int]) -> None:
    """Whatever is asked for, in whatever order and chunks, over two epochs, by one object or a fresh one."""
    whole = _makers()[kind].batch(0, 240)
    other = _makers()[kind]
    bounds = [0, *sorted(cuts), 240]
    chunks = list(itertools.pairwise(bounds))
    for index in [i for i in order if i < len(chunks)]:
        first, last = chunks[index]
        batch = other.batch(first, last - first)
        assert torch.equal(batch.tokens, whole.tokens[first:last])
        assert torch.equal(batch.labels, whole.labels[first:last])


@pytest.mark.parametrize("kind", ["train", "evaluation", "mock"])
def test_shapes_and_types(kind: str) -> None:
    tokens, labels, *optional = _makers()[kind].batch(3, 4)
    assert optional == [None, None]
    for tensor in (tokens, labels):
        assert tensor.shape == (4, 10)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


@looped("kind", ["train", "evaluation", "mock"])
@looped(("first", "count"), [(-1, 1), (0, 0), (0, -2)])
def test_impossible_positions_are_refused(kind: str, first: int, count: int) -> None:
    with pytest.raises(ValueError, match="`first`"):
        _makers()[kind].batch(first, count)


@given(tokens=st.integers(2, 400), length=st.integers(1, 50), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**9))
def test_training_windows_of_an_epoch_do_not_overlap_and_fill_the_stream(
    tokens: int, length: int, seed: int, epoch: int
) -> None:
    length = min(length, tokens - 1)
    stream = np.arange(tokens)
    samples = TrainingWindows(stream, length, seed)
    batch = samples.batch(epoch * samples.samples, samples.samples)
    assert torch.equal(batch.labels, batch.tokens + 1)
    seen = batch.tokens.flatten().tolist()
    assert len(set(seen)) == len(seen), "a token was an input twice in one epoch"
    assert max(seen) - min(seen) + 1 == len(seen), "windows leave gaps"
    assert len(stream) - len(seen) < 2 * length + 1, "more was left out than the random offset needs"


def test_every_label_is_trained_on_over_the_epochs() -> None:
    stream = np.arange(37)
    samples = TrainingWindows(stream, 5, seed=1)
    labels = samples.batch(0, samples.samples * 60).labels
    assert set(labels.flatten().tolist()) == set(range(1, 37))


def test_epochs_differ_in_offset_and_order() -> None:
    samples = TrainingWindows(STREAM, 10, seed=7)
    starts = [samples.starts(epoch) for epoch in range(8)]
    offsets = {int(order.min()) for order in starts}
    assert len(offsets) > 3
    orders = {tuple((order - order.min()).tolist()) for order in starts}
    assert len(orders) == 8
    assert tuple(sorted(starts[0])) != tuple(starts[0])


def test_seeds_differ() -> None:
    batches = [TrainingWindows(STREAM, 10, seed=seed).batch(0, 8).tokens for seed in (0, 1, 2)]
    assert not torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[1], batches[2])


def test_order_is_uniform() -> None:
    """Each window comes first about equally often: chi-square over 4 windows, 3 degrees of freedom."""
    counts = np.zeros(4)
    for seed in range(2000):
        samples = TrainingWindows(np.arange(50), 10, seed)
        starts = samples.starts(0)
        counts[(starts[0] - starts.min()) // 10] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 16.3


def test_golden_order() -> None:
    """The meaning of a checkpoint's data position must never change."""
    samples = TrainingWindows(np.arange(100), 10, seed=1234)
    assert [samples.starts(epoch).tolist() for epoch in (0, 1)] == GOLDEN_STARTS
    assert MockSamples(1000, 4, seed=1234, samples=10).batch(3, 1).tokens.tolist() == GOLDEN_MOCK


def test_far_positions_are_as_cheap_as_near_ones() -> None:
    samples = TrainingWindows(STREAM, 10, seed=7)
    far = 10**15
    assert torch.equal(samples.batch(far, 3).tokens[1:], samples.batch(far + 1, 2).tokens)


def test_too_short_a_stream_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`sequence_length` \(10\).*\(10\)"):
        TrainingWindows(np.arange(10), 10, seed=0)
    assert TrainingWindows(np.arange(11), 10, seed=0).batch(0, 1).labels[0, -1] == 10


@given(tokens=st.integers(2, 300), length=st.integers(1, 50), batch_size=st.integers(1, 9))
def test_evaluation_counts_every_token_once(tokens: int, length: int, batch_size: int) -> None:
    stream = np.arange(tokens)
    samples = EvaluationWindows(stream, length)
    seen: list[int] = []
    for first in range(0, samples.samples, batch_size):
        batch = samples.batch(first, batch_size)
        counted = batch.labels != IGNORE_INDEX
        assert torch.equal(batch.labels[counted], batch.tokens[counted] + 1)
        seen += batch.labels[counted].tolist()
    assert sorted(seen) == list(range(1, tokens))


def test_evaluation_is_padded_past_the_end() -> None:
    samples = EvaluationWindows(np.arange(100, 112), 5, pad_id=9)
    batch = samples.batch(0, 5)
    assert samples.samples == 3
    assert (batch.labels != IGNORE_INDEX).sum(1).tolist().count(0) == 2
    assert (batch.tokens[3:] == 9).all()
    [partial] = [row for row in range(3) if (batch.labels[row] == IGNORE_INDEX).any()]
    assert batch.tokens[partial].tolist() == [110, 9, 9, 9, 9]
    assert batch.labels[partial].tolist() == [111, *[IGNORE_INDEX] * 4]


def test_first_evaluation_windows_come_from_all_over_the_stream() -> None:
    tokens = EvaluationWindows(np.arange(100_000), 10).batch(0, 100).tokens.flatten()
    assert (tokens < 25_000).sum() > 100
    assert (tokens > 75_000).sum() > 100


def test_mock_tokens_fill_the_vocabulary_and_splits_differ() -> None:
    train, validation = (MockSamples(50, 100, seed=3, samples=10, rng_stream=part) for part in (0, 1))
    batch = train.batch(0, 10)
    assert set(batch.tokens.flatten().tolist()) == set(range(50))
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert not torch.equal(batch.tokens, validation.batch(0, 10).tokens)
    assert torch.equal(batch.tokens, train.batch(10, 10).tokens)


GOLDEN_STARTS = [[89, 79, 39, 9, 19, 49, 29, 59, 69], [3, 53, 63, 43, 23, 83, 13, 73, 33]]
GOLDEN_MOCK = [[1, 321, 828, 248]]
