"""Evaluation of a model on held-out data: batches of one shape, losses read once."""

import numpy as np
import pytest
import torch
from torch import Tensor

from stoker.trainer.data.datasets.samples import IGNORE_INDEX, Batch, EvaluationWindows, MockSamples
from stoker.trainer.evaluation.held_out_loss import EvaluationInterruptedError, evaluate
from stoker.trainer.utils.errors import UserError

ONES = np.ones(7, np.int64)


class Unread(Tensor):
    """A loss on a device that would have to be waited for."""

    def __float__(self) -> float:
        raise AssertionError("the host waits for a single batch")

    item = __float__


@pytest.mark.parametrize(
    "samples",
    [EvaluationWindows(np.arange(50) % 7, 5), MockSamples(7, 5, seed=0, samples=10)],
    ids=["windows", "mock"],
)
def test_batches_have_one_shape_and_count_once(samples) -> None:
    shapes: list[tuple[int, ...]] = []

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        shapes.append(tuple(tokens.shape))
        assert tokens.shape == labels.shape
        return (labels != IGNORE_INDEX).sum() * 2.0

    result = evaluate(loss, samples, token_bytes=ONES, batch_size=4)
    assert shapes == [(4, 5)] * 3
    assert (result.loss, result.tokens) == (2.0, 49 if isinstance(samples, EvaluationWindows) else 50)


def test_a_single_small_batch_is_not_filled_up() -> None:
    samples = MockSamples(7, 5, seed=0, samples=3)
    shapes: list[tuple[int, ...]] = []

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        shapes.append(tuple(tokens.shape))
        return torch.zeros(())

    evaluate(loss, samples, token_bytes=ONES, batch_size=64)
    assert shapes == [(3, 5)]


def test_losses_are_read_once_at_the_end() -> None:
    samples = MockSamples(7, 5, seed=0, samples=4)
    result = evaluate(
        lambda tokens, labels: torch.tensor(10.0).as_subclass(Unread), samples, token_bytes=ONES, batch_size=1
    )
    assert result.loss == pytest.approx(2.0)


class AllIgnored(MockSamples):
    """Samples of which no token is to be predicted."""

    def batch(self, first: int, count: int) -> Batch:
        batch = super().batch(first, count)
        return batch._replace(labels=torch.full_like(batch.labels, IGNORE_INDEX))


def test_data_without_a_label_that_counts_are_refused() -> None:
    samples = AllIgnored(7, 5, seed=0, samples=10)
    with pytest.raises(UserError, match="all labels of 8 held-out samples are ignored"):
        evaluate(lambda tokens, labels: torch.zeros(()), samples, token_bytes=ONES, batch_size=4, limit_batches=2)


def test_it_can_be_stopped_between_two_batches() -> None:
    samples, seen = MockSamples(7, 5, seed=0, samples=10), []

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        seen.append(len(tokens))
        return torch.zeros(())

    with pytest.raises(EvaluationInterruptedError):
        evaluate(loss, samples, token_bytes=ONES, batch_size=2, should_stop=lambda: len(seen) == 3)
    assert len(seen) == 3
    seen.clear()
    evaluate(loss, samples, token_bytes=ONES, batch_size=2, should_stop=lambda: len(seen) == 5)  # it has a result
