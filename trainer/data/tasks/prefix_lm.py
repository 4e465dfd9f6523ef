"""Prefix language modelling (T5, arXiv 1910.10683, 3.2.1): the encoder reads the beginning, the decoder goes on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..datasets.seq2seq import Pair


class PrefixCut:
    """Cuts a text at a random place, each place that leaves no side empty and fits equally likely.

    Args:
        encoder_length: tokens that fit on the encoder's side.
        decoder_length: tokens that fit on the decoder's side.
    """

    def __init__(self, encoder_length: int, decoder_length: int) -> None:
        self._encoder_length = encoder_length
        self._decoder_length = decoder_length

    def pair(self, text: NDArray[np.int64], source: np.random.Philox) -> Pair | None:
        """Both sides of a text, int64 [n]; None where a single token cannot be cut.

        A window of text goes on behind its last token, so no end token closes the sides.
        """
        if len(text) < 2:
            return None
        first = max(1, len(text) - self._decoder_length)
        last = min(len(text) - 1, self._encoder_length)
        place = first + int(source.random_raw()) % (last - first + 1)
        return Pair(text[:place], text[place:])
