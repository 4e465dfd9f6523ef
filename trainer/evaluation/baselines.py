"""Baselines: two compressors in bits per byte of held-out text, and docstrings copied from function names.

Bits per byte do not depend on the tokenizer, so models with different vocabularies are comparable.
"""

from __future__ import annotations

import lzma
import re

import numpy as np


def unigram_bits_per_byte(train: bytes, held_out: bytes) -> float:
    """Return the cross-entropy of the held-out bytes under the byte frequencies of the training text, in bits per byte.

    Counts start at 1 (Laplace's rule of succession), so unseen bytes have a finite cost.
    """
    counts = np.bincount(np.frombuffer(train, np.uint8), minlength=256) + 1.0
    bits = -np.log2(counts / counts.sum())
    return float(bits[np.frombuffer(held_out, np.uint8)].mean())


def xz_bits_per_byte(held_out: bytes) -> float:
    """Return the xz size (LZMA2, strongest preset) of the held-out bytes in bits per byte; no training text is used."""
    return 8 * len(lzma.compress(held_out, preset=9 | lzma.PRESET_EXTREME)) / len(held_out)


_NAME = re.compile(r"\bdef\s+(\w+)")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def docstring_from_name(source: str) -> str:
    """Return the words of a function's name as a sentence: capitalized, with a full stop.

    Args:
        source: source of the function; the result is empty if it has no `def`.
    """
    found = _NAME.search(source)
    if found is None:
        return ""
    words = [word for part in found[1].split("_") for word in _CAMEL.split(part) if word]
    return " ".join(word.lower() for word in words).capitalize() + "." if words else ""
