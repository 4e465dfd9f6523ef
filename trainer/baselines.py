"""What a model must beat: two ways to code the same held-out bytes without one.

Bits per byte are comparable between any two models of the same text, whatever their tokens are.
"""

from __future__ import annotations

import lzma

import numpy as np


def unigram_bits_per_byte(train: bytes, held_out: bytes) -> float:
    """Cross-entropy of the held-out bytes under the byte frequencies of the training text, in bits per byte.

    Each count starts at 1 (Laplace's rule of succession), so that an unseen byte costs much but not infinitely much.
    """
    counts = np.bincount(np.frombuffer(train, np.uint8), minlength=256) + 1.0
    bits = -np.log2(counts / counts.sum())
    return float(bits[np.frombuffer(held_out, np.uint8)].mean())


def xz_bits_per_byte(held_out: bytes) -> float:
    """Size of the held-out bytes after xz (LZMA2, strongest preset), in bits per byte; it sees no training text."""
    return 8 * len(lzma.compress(held_out, preset=9 | lzma.PRESET_EXTREME)) / len(held_out)
