"""RoPE frequency scaling for context lengths beyond those of pretraining, without torch.

Frequencies are angles per position, base^(-2i / dim) for i = 0..dim/2 - 1, highest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def rotary_frequencies(dim: int, base: float) -> list[float]:
    """Return base^(-2i / dim) for i = 0..dim/2 - 1 (RoFormer, arXiv 2104.09864)."""
    return [base ** (-channel / dim) for channel in range(0, dim, 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: divide low frequencies by `factor`, keep high ones, interpolate in between.

    Attributes:
        factor: divisor of the low frequencies.
        original_max_position_embeddings: context length of pretraining (`original_max_position_embeddings` in Hugging
            Face).
        low_freq_factor: frequencies with fewer rotations than this in `original_max_position_embeddings` are divided
            by `factor` (`low_freq_factor`).
        high_freq_factor: frequencies with more rotations than this are kept (`high_freq_factor`).
    """

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float

    @property
    def attention_factor(self) -> float:
        """Scale of the rotated queries and keys (`attention_factor` in Hugging Face)."""
        return 1.0

    def apply(self, frequencies: Sequence[float], base: float) -> list[float]:
        """Return the scaled frequencies."""
        return [self._scaled(frequency) for frequency in frequencies]

    def _scaled(self, frequency: float) -> float:
        rotations = self.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = min(1.0, max(0.0, (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)))
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): keep high frequencies, divide low ones by `factor`, with a linear ramp over channels.

    Attributes:
        factor: divisor of the low frequencies.
        original_max_position_embeddings: context length of pretraining (`original_max_position_embeddings` in Hugging
            Face).
        beta_fast: frequencies with more rotations than this in `original_max_position_embeddings` are kept
            (`beta_fast`).
        beta_slow: frequencies with fewer rotations than this are divided by `factor` (`beta_slow`).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float

    @property
    def attention_factor(self) -> float:
        """Factor of the rotated queries and keys, 0.1 ln(factor) + 1, the paper's softmax temperature."""
        return 0.1 * math.log(self.factor) + 1.0

    def apply(self, frequencies: Sequence[float], base: float) -> list[float]:
        """Return the scaled frequencies, given the unscaled ones of `base`."""
        dim = 2 * len(frequencies)
        first = max(math.floor(self._channel(self.beta_fast, dim, base)), 0)
        last = min(math.ceil(self._channel(self.beta_slow, dim, base)), dim - 1)
        width = last - first or 0.001  # avoids division by zero: the ramp becomes a step
        ramp = [min(1.0, max(0.0, (channel - first) / width)) for channel in range(dim // 2)]
        return [
            frequency / self.factor * share + frequency * (1 - share)
            for frequency, share in zip(frequencies, ramp, strict=True)
        ]

    def _channel(self, rotations: float, dim: int, base: float) -> float:
        """Return the (fractional) channel with this number of rotations in `original_max_position_embeddings`."""
        return dim * math.log(self.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(base))


RotaryScaling = Llama3Scaling | YarnScaling
