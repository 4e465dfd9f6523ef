"""Rotary frequencies for texts longer than those a model was trained on: plain numbers, no torch.

Each function takes and gives the angles per position, base^(-2i / dim) for i = 0..dim/2 - 1, highest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def rotary_frequencies(dim: int, base: float) -> list[float]:
    """base^(-2i / dim) for i = 0..dim/2 - 1 (RoFormer, arXiv 2104.09864)."""
    return [base ** (-channel / dim) for channel in range(0, dim, 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: waves longer than `original_length` / `low` are stretched, short ones kept, blended in between.

    Attributes:
        factor: by which long waves are stretched.
        original_length: tokens the model was trained on before.
        low: waves that turn less often than this in `original_length` are stretched by the whole factor.
        high: waves that turn more often than this are kept.
    """

    factor: float
    original_length: int
    low: float
    high: float

    @property
    def amplitude(self) -> float:
        """Factor of the rotated queries and keys."""
        return 1.0

    def apply(self, frequencies: Sequence[float], base: float) -> list[float]:
        """The frequencies in use instead of `frequencies`."""
        return [self._blended(frequency) for frequency in frequencies]

    def _blended(self, frequency: float) -> float:
        turns = self.original_length * frequency / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - self.low) / (self.high - self.low)))
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): waves that turn often are kept, others stretched, a ramp over the channels between.

    Attributes:
        factor: by which long waves are stretched.
        original_length: tokens the model was trained on before.
        fast: waves that turn more often than this in `original_length` are kept.
        slow: waves that turn less often than this are stretched by the whole factor.
    """

    factor: float
    original_length: int
    fast: float
    slow: float

    @property
    def amplitude(self) -> float:
        """Factor of the rotated queries and keys, 0.1 ln(factor) + 1: the paper's temperature of the softmax."""
        return 0.1 * math.log(self.factor) + 1.0

    def apply(self, frequencies: Sequence[float], base: float) -> list[float]:
        """The frequencies in use instead of `frequencies`, which are those of `base`."""
        dim = 2 * len(frequencies)
        first = max(math.floor(self._channel(self.fast, dim, base)), 0)
        last = min(math.ceil(self._channel(self.slow, dim, base)), dim - 1)
        width = last - first or 0.001  # a step where both are the same channel
        stretched = [min(1.0, max(0.0, (channel - first) / width)) for channel in range(dim // 2)]
        return [
            frequency / self.factor * share + frequency * (1 - share)
            for frequency, share in zip(frequencies, stretched, strict=True)
        ]

    def _channel(self, turns: float, dim: int, base: float) -> float:
        """The channel whose wave turns so many times in `original_length`, as a fraction."""
        return dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


RotaryScaling = Llama3Scaling | YarnScaling
