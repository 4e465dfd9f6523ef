"""What a model must beat: two ways to code held-out bytes without one, and a docstring without reading the function.

Bits per byte are comparable between any two models of the same text, whatever their tokens are.
"""

from __future__ import annotations

import lzma
import re

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


_NAME = re.compile(r"\bdef\s+(\w+)")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def copied_name(source: str) -> str:
    """What the name of a function says: its words, with a capital and a full stop, as a docstring has them.

    Args:
        source: of the function; without a `def` in it the answer is empty.
    """
    found = _NAME.search(source)
    if found is None:
        return ""
    words = [word for part in found[1].split("_") for word in _CAMEL.split(part) if word]
    return " ".join(word.lower() for word in words).capitalize() + "." if words else ""
