"""Samples drawn from several sets by weight, on a schedule that follows the weights as closely as is possible.

Megatron takes the set that is furthest behind its weight, sample by sample. Here the schedule is the one of Tijdeman
1980, "The chairman assignment problem" (Discrete Mathematics 32), so that at every position every set is less than one
sample away from its weight, whatever the weights are. It repeats after a period in which each set gets a whole number
of samples, so a position is looked up in one period and nothing grows with the length of a run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .samples import Batch, Samples, positions_of
from .seq2seq import FieldSamples, NamedTensors

MAX_PERIOD = 1_000_000
"""Weights whose exact period is longer are rounded to millionths of their sum."""
MAX_SETS = 10_000


class Interleave:
    """Position of a sample to its data set and its position there, in constant time.

    Args:
        weights: one per set, positive and finite; only their proportions count. A weight means the decimal number that
            it is printed as: 0.1 is a tenth.

    Attributes:
        shares: the proportions that the schedule follows exactly, summing to 1.
        period: samples after which the order of the sets repeats.

    Raises:
        ValueError: no weight, too many, or one that is not positive and finite.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not 1 <= len(weights) <= MAX_SETS:
            raise ValueError(f"`weights` ({len(weights)}) must be 1 to {MAX_SETS} numbers")
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"`weights` ({weight}) must be positive and finite; leave out a set that counts nothing"
                )
        counts = _whole_numbers([Fraction(str(weight)) for weight in weights])
        self.period = sum(counts)
        self.shares = tuple(Fraction(count, self.period) for count in counts)
        self._counts = np.array(counts, np.int64)
        self._sets = _schedule(counts)
        self._ranks = _ranks(self._sets, self._counts)

    def at(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the samples at positions `first` to `first + count - 1` come from.

        Returns:
            The set of each sample, int64 [count], and its position among the samples of that set, int64 [count].
        """
        turns, places = np.divmod(positions_of(first, count), self.period)
        sets = self._sets[places].astype(np.int64)
        return sets, turns * self._counts[sets] + self._ranks[places]


class BlendedSamples:
    """Endless training samples out of several sets, by weight; each set is taken in its own order, epoch after epoch.

    Args:
        parts: the samples of each set, of one sequence length, endless.
        weights: one per set; see `Interleave`.

    Attributes:
        sequence_length: s, tokens in a sample.
        samples: as many as all sets have together; a set with more than its part of the weights repeats sooner.

    Raises:
        ValueError: weights that do not fit the sets, or sets of different sequence lengths.
    """

    def __init__(self, parts: Sequence[Samples], weights: Sequence[float]) -> None:
        if len(parts) != len(weights):
            raise ValueError(f"`weights` ({len(weights)}) must be as many as `parts` ({len(parts)})")
        lengths = {part.sequence_length for part in parts}
        if len(lengths) != 1:
            raise ValueError(f"`parts` must have one sequence length, not {sorted(lengths)}")
        self.parts = tuple(parts)
        self.interleave = Interleave(weights)
        self.sequence_length = lengths.pop()
        self.samples = sum(part.samples for part in parts)

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions `first` to `first + count - 1` of training, counted from 0."""
        drawn, back = _drawn(self.parts, self.interleave, first, count)
        tokens = torch.cat([batch.tokens for batch in drawn])[back]
        labels = torch.cat([batch.labels for batch in drawn])[back]
        return Batch(tokens, labels)


class BlendedFields:
    """`BlendedSamples` of samples whose batches are tensors by name; all have the same names.

    Args:
        parts: the samples of each set, endless.
        weights: one per set; see `Interleave`.
    """

    def __init__(self, parts: Sequence[FieldSamples], weights: Sequence[float]) -> None:
        self.parts = tuple(parts)
        self.interleave = Interleave(weights)
        self.sequence_length = parts[0].sequence_length
        self.samples = sum(part.samples for part in parts)

    def batch(self, first: int, count: int) -> NamedTensors:
        """The samples at positions `first` to `first + count - 1` of training, counted from 0."""
        drawn, back = _drawn(self.parts, self.interleave, first, count)
        return {name: torch.cat([batch[name] for batch in drawn])[back] for name in drawn[0]}


BatchT = TypeVar("BatchT", covariant=True)


class _Part(Protocol[BatchT]):
    def batch(self, first: int, count: int) -> BatchT: ...


def _drawn(
    parts: Sequence[_Part[BatchT]], interleave: Interleave, first: int, count: int
) -> tuple[list[BatchT], Tensor]:
    """What each set gives to a batch, set by set, and where the rows of the batch lie in that."""
    sets, positions = interleave.at(first, count)
    by_set = np.argsort(sets, kind="stable")
    # The samples of one set follow each other in it, so each set is asked once.
    used, begins, counts = np.unique(sets[by_set], return_index=True, return_counts=True)
    drawn = [
        parts[number].batch(position, taken)
        for number, position, taken in zip(
            used.tolist(), positions[by_set[begins]].tolist(), counts.tolist(), strict=True
        )
    ]
    return drawn, torch.from_numpy(np.argsort(by_set))


def _whole_numbers(weights: list[Fraction]) -> list[int]:
    """The smallest whole numbers in these proportions, or the nearest ones that sum to `MAX_PERIOD`; none is 0."""
    total = sum(weights)
    scale = math.lcm(*((weight / total).denominator for weight in weights))
    if scale <= MAX_PERIOD:
        return [int(weight / total * scale) for weight in weights]
    exact = [weight / total * MAX_PERIOD for weight in weights]
    counts = [max(1, math.floor(count)) for count in exact]
    # Largest remainders first, as seats are given out; sets raised to 1 take theirs from the largest set.
    by_remainder = sorted(range(len(exact)), key=lambda i: exact[i] - counts[i], reverse=True)
    missing = MAX_PERIOD - sum(counts)
    for i in by_remainder[: max(0, missing)]:
        counts[i] += 1
    counts[counts.index(max(counts))] += min(0, missing)
    return counts


def _schedule(counts: list[int]) -> NDArray[np.uint16]:
    """The set of each position of one period, [sum(counts)].

    With n sets, delta = 1 / (2n - 2) and share w, the k-th sample of a set (from 1) may not come before step
    (k - 1 + delta) / w, or the set would be 1 - delta ahead, and not after step (k - delta) / w + 1, or it would have
    been as far behind. Tijdeman proves that all these windows can be met; taking the earliest deadline among the open
    windows then meets them. All in whole numbers, so that every machine finds the same schedule.
    """
    period, sets = sum(counts), len(counts)
    if sets == 1:
        return np.zeros(period, np.uint16)
    grid = 2 * sets - 2

    def window(number: int, k: int) -> tuple[int, int]:
        share = grid * counts[number]
        return -(-((k - 1) * grid + 1) * period // share), (k * grid - 1) * period // share + 1

    opens = [(window(number, 1)[0], number, 1) for number in range(sets)]
    heapq.heapify(opens)
    due: list[tuple[int, int, int]] = []
    schedule = np.empty(period, np.uint16)
    for step in range(1, period + 1):
        while opens and opens[0][0] <= step:
            _, number, k = heapq.heappop(opens)
            heapq.heappush(due, (window(number, k)[1], number, k))
        _, number, k = heapq.heappop(due)
        schedule[step - 1] = number
        heapq.heappush(opens, (window(number, k + 1)[0], number, k + 1))
    return schedule


def _ranks(schedule: NDArray[np.uint16], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """How often the set of each position came before it in the period, [period]."""
    by_set = np.argsort(schedule, kind="stable")
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    ranks = np.empty(len(schedule), np.int32)
    ranks[by_set] = np.arange(len(schedule)) - firsts
    return ranks
