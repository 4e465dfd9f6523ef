"""Prefix language modeling (T5, arXiv 1910.10683, 3.2.1): the encoder reads a prefix, the decoder predicts the rest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..datasets.seq2seq import Pair


class PrefixSplitter(NamedTuple):
    """Split texts at a random position, uniform over those that fit and leave neither side empty."""

    encoder_length: int
    decoder_length: int

    def pair(self, text: NDArray[np.int64], rng: np.random.Philox) -> Pair | None:
        """Split a text, int64 [N]; None for a single token.

        A window ends in the middle of a document, so no EOS token is appended.
        """
        if len(text) < 2:
            return None
        first = max(1, len(text) - self.decoder_length)
        last = min(len(text) - 1, self.encoder_length)
        split = first + int(rng.random_raw()) % (last - first + 1)
        return Pair(text[:split], text[split:])
