"""The inverse of span corruption."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def restore(encoder: NDArray[Any], decoder: NDArray[Any], sentinels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The text that `corrupt` took apart: what the decoder wrote, put back where the sentinels are.

    A sentinel that the decoder did not write leaves nothing; what it wrote under another one is left out.

    Args:
        encoder: [n], without end token.
        decoder: [m], without end token.
        sentinels: as in `corrupt`.
    """
    written: dict[int, list[int]] = {}
    known = set(sentinels.tolist())
    span: list[int] = []
    for token in decoder.tolist():
        if token in known:
            span = written.setdefault(token, [])
        else:
            span.append(token)
    text = (written.get(token, []) if token in known else [token] for token in encoder.tolist())
    return np.array([token for part in text for token in part], np.int64)
