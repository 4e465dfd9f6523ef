"""Samples of several datasets blended by weight, on a schedule that follows the weights as closely as possible.

Megatron greedily takes the dataset that is furthest behind its weight. Here the schedule is that of Tijdeman 1980, "The
chairman assignment problem" (Discrete Mathematics 32), which keeps every dataset less than one sample away from its
weight at every position, for any weights. It repeats after a period in which each dataset has a whole number of
samples, so positions are looked up in one period and nothing grows with the length of a run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Generic

import numpy as np
import torch
from numpy.typing import NDArray

from .samples import AnySamples, BatchT, concatenate_batches, position_range

MAX_PERIOD = 1_000_000
"""Weights with a longer exact period are rounded to millionths of their sum."""
MAX_DATASETS = 10_000


class BlendSchedule:
    """Map the position of a sample to a dataset and the position there, in constant time.

    Args:
        weights: one per dataset, positive and finite; only their proportions count. A weight means the decimal number
            that it is printed as: 0.1 is a tenth.

    Attributes:
        shares: the proportions that the schedule follows exactly, summing to 1.
        period: samples after which the schedule repeats.

    Raises:
        ValueError: no weight, too many, or one that is not positive and finite.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not 1 <= len(weights) <= MAX_DATASETS:
            raise ValueError(f"`weights` ({len(weights)}) must be 1 to {MAX_DATASETS} numbers")
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"`weights` ({weight}) must be positive and finite; remove a dataset of weight 0")
        counts = _integer_proportions([Fraction(str(weight)) for weight in weights])
        self.period = sum(counts)
        self.shares = tuple(Fraction(count, self.period) for count in counts)
        self._counts = np.array(counts, np.int64)
        self._sets = _schedule(counts)
        self._occurrence_ranks = _occurrence_ranks(self._sets, self._counts)

    def lookup(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Map the positions `first` to `first + count - 1`.

        Returns:
            The dataset of each sample, int64 [count], and its position in that dataset, int64 [count].
        """
        periods, offsets = np.divmod(position_range(first, count), self.period)
        sets = self._sets[offsets].astype(np.int64)
        return sets, periods * self._counts[sets] + self._occurrence_ranks[offsets]


class BlendedSamples(Generic[BatchT]):
    """Endless training samples of several datasets, by weight; each is read in its own order, epoch after epoch.

    Args:
        datasets: the endless samples of each dataset, of one sequence length and with one kind of batch.
        weights: one per dataset; see `BlendSchedule`.

    Attributes:
        sequence_length: S, tokens in a sample.
        samples: sum over all datasets; a dataset with more than its share of the weights repeats sooner.

    Raises:
        ValueError: the weights do not match the datasets, or sequence lengths differ.
    """

    def __init__(self, datasets: Sequence[AnySamples[BatchT]], weights: Sequence[float]) -> None:
        if len(datasets) != len(weights):
            raise ValueError(f"`weights` ({len(weights)}) must be as many as `datasets` ({len(datasets)})")
        lengths = {part.sequence_length for part in datasets}
        if len(lengths) != 1:
            raise ValueError(f"`datasets` must have one sequence length, not {sorted(lengths)}")
        self.datasets = tuple(datasets)
        self.schedule = BlendSchedule(weights)
        self.sequence_length = lengths.pop()
        self.samples = sum(part.samples for part in datasets)

    def batch(self, first: int, count: int) -> BatchT:
        """Return the training samples at positions `first` to `first + count - 1`, counted from 0."""
        sets, positions = self.schedule.lookup(first, count)
        by_set = np.argsort(sets, kind="stable")
        # The samples of a dataset within a batch are consecutive in it, so each dataset is read once.
        used, begins, counts = np.unique(sets[by_set], return_index=True, return_counts=True)
        batches = [
            self.datasets[number].batch(position, length)
            for number, position, length in zip(
                used.tolist(), positions[by_set[begins]].tolist(), counts.tolist(), strict=True
            )
        ]
        return concatenate_batches(batches, torch.from_numpy(np.argsort(by_set)))


def _integer_proportions(weights: list[Fraction]) -> list[int]:
    """Return the smallest integers in these proportions, or the nearest that sum to `MAX_PERIOD`; none is 0."""
    total = sum(weights)
    scale = math.lcm(*((weight / total).denominator for weight in weights))
    if scale <= MAX_PERIOD:
        return [int(weight / total * scale) for weight in weights]
    exact = [weight / total * MAX_PERIOD for weight in weights]
    counts = [max(1, math.floor(count)) for count in exact]
    # Largest remainder method; counts raised to 1 are taken from the largest one.
    by_remainder = sorted(range(len(exact)), key=lambda i: exact[i] - counts[i], reverse=True)
    missing = MAX_PERIOD - sum(counts)
    for i in by_remainder[: max(0, missing)]:
        counts[i] += 1
    counts[counts.index(max(counts))] += min(0, missing)
    return counts


def _schedule(counts: list[int]) -> NDArray[np.uint16]:
    """Return the dataset of each position of one period, [sum(counts)].

    With n datasets, delta = 1 / (2n - 2) and share w, the k-th sample of a dataset (from 1) may not come before step
    (k - 1 + delta) / w, or the dataset would be 1 - delta ahead, and not after step (k - delta) / w + 1, or it would
    have been as far behind. Tijdeman proves that all these windows can be met; taking the earliest deadline among the
    open windows then meets them. Integer arithmetic makes the schedule the same on every machine.
    """
    period, sets = sum(counts), len(counts)
    if sets == 1:
        return np.zeros(period, np.uint16)
    grid = 2 * sets - 2

    def window(number: int, k: int) -> tuple[int, int]:
        share = grid * counts[number]
        return -(-((k - 1) * grid + 1) * period // share), (k * grid - 1) * period // share + 1

    waiting = [(window(number, 1)[0], number, 1) for number in range(sets)]
    heapq.heapify(waiting)
    deadlines: list[tuple[int, int, int]] = []
    schedule = np.empty(period, np.uint16)
    for step in range(1, period + 1):
        while waiting and waiting[0][0] <= step:
            _, number, k = heapq.heappop(waiting)
            heapq.heappush(deadlines, (window(number, k)[1], number, k))
        _, number, k = heapq.heappop(deadlines)
        schedule[step - 1] = number
        heapq.heappush(waiting, (window(number, k + 1)[0], number, k + 1))
    return schedule


def _occurrence_ranks(schedule: NDArray[np.uint16], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return how often the dataset of each position occurs before it in the period, [period]."""
    by_set = np.argsort(schedule, kind="stable")
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.empty(len(schedule), np.int32)
    ranks[by_set] = np.arange(len(schedule)) - firsts
    return ranks
