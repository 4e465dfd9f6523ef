"""How evaluation drives a model: batches of one shape, losses read once."""

import numpy as np
import pytest
import torch
from torch import Tensor

from stoker.trainer.data.samples import IGNORED_LABEL, EvaluationWindows, MockSamples
from stoker.trainer.evaluation import evaluate

ONES = np.ones(7, np.int64)


class Unread(Tensor):
    """A loss on a device that would have to be waited for."""

    def __float__(self) -> float:
        raise AssertionError("the host waits for a single batch")

    item = __float__  # type: ignore[assignment]


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
        return (labels != IGNORED_LABEL).sum() * 2.0

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
