"""Which document of its sample each token belongs to: what keeps the documents of one sample apart.

A sample is cut out of a row of documents, so it may hold the end of one, some whole ones and the beginning of another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .samples import Batch, Samples


def document_numbers(tokens: Tensor, eos_id: int) -> Tensor:
    """The number of each token's document within its sample: 0, 0, 0, 1, 1, ...

    The end token belongs to the document that it ends, as in Megatron's `reset_position_ids` and
    `reset_attention_mask`; the token after it is the first of the next document.

    Args:
        tokens: int64 [count, s].
        eos_id: the token that ends a document.

    Returns:
        int32 [count, s], from 0, never falling along a sample.
    """
    ends = (tokens == eos_id).to(torch.int32)
    return ends.cumsum(dim=1, dtype=torch.int32) - ends


class NumberedDocuments:
    """Samples with the number of each token's document: `Batch.documents`.

    It works on the tokens alone, so for samples of any source that ends its documents with an end token.

    Args:
        samples: the samples.
        eos_id: the token that ends a document.
    """

    def __init__(self, samples: Samples, eos_id: int) -> None:
        self.unnumbered = samples
        self._eos_id = eos_id

    @property
    def sequence_length(self) -> int:
        """Tokens in a sample."""
        return self.unnumbered.sequence_length

    @property
    def samples(self) -> int:
        """How many there are before they repeat or end."""
        return self.unnumbered.samples

    def batch(self, first: int, count: int) -> Batch:
        """The samples at positions `first` to `first + count - 1`."""
        batch = self.unnumbered.batch(first, count)
        return batch._replace(documents=document_numbers(batch.tokens, self._eos_id))
