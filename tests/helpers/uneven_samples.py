"""Samples with different numbers of targets."""

from stoker.trainer.data.datasets.samples import Batch, MockSamples


class UnevenSamples(MockSamples):
    """Random tokens of which sample i has about i targets: the micro batches weigh differently in the LM loss."""

    def __init__(self) -> None:
        super().__init__(100, 16, seed=3, samples=1000)

    def batch(self, first: int, count: int) -> Batch:
        tokens, labels, *_ = super().batch(first, count)
        for row in range(count):
            labels[row, (first + row) % 16 + 1 :] = -100
        return Batch(tokens, labels)
