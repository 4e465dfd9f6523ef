"""Inverse of T5 span corruption."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def restore(encoder: NDArray[Any], decoder: NDArray[Any], sentinels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Restore the sequence before `corrupt`: replace each sentinel in the encoder input by its decoder span.

    Sentinels without a decoder span are removed; spans of sentinels that are not in the encoder input are ignored.

    Args:
        encoder: [n], without EOS token.
        decoder: [m], without EOS token.
        sentinels: as in `corrupt`.
    """
    spans: dict[int, list[int]] = {}
    known = set(sentinels.tolist())
    span: list[int] = []
    for token in decoder.tolist():
        if token in known:
            span = spans.setdefault(token, [])
        else:
            span.append(token)
    parts = (spans.get(token, []) if token in known else [token] for token in encoder.tolist())
    return np.array([token for part in parts for token in part], np.int64)
