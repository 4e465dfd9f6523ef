"""Document indices of the tokens of a sample, which keep its documents apart.

A sample is cut out of a stream of documents, so it may contain the end of one, some whole ones and the start of
another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .samples import Batch, Samples


def document_ids(tokens: Tensor, eos_id: int) -> Tensor:
    """Return the document index of each token within its sample: 0, 0, 0, 1, 1, ...

    The EOS token belongs to the document that it ends, as in Megatron's `reset_position_ids` and
    `reset_attention_mask`; the token after it is the first of the next document.

    Args:
        tokens: int64 [B, S].

    Returns:
        int32 [B, S], from 0, non-decreasing along S.
    """
    ends = (tokens == eos_id).to(torch.int32)
    return ends.cumsum(dim=1, dtype=torch.int32) - ends


class DocumentIdSamples:
    """Samples with the document index of each token in `Batch.documents`.

    Only the tokens are inspected, so it works for samples of any source that ends documents with an EOS token.
    """

    def __init__(self, samples: Samples, eos_id: int) -> None:
        self.source = samples
        self.sequence_length = samples.sequence_length
        self.samples = samples.samples
        self._eos_id = eos_id

    def batch(self, first: int, count: int) -> Batch:
        """Return the samples at positions `first` to `first + count - 1`."""
        batch = self.source.batch(first, count)
        return batch._replace(documents=document_ids(batch.tokens, self._eos_id))
