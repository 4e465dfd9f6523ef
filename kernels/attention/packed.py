"""Rows that hold several documents: what keeps their attention apart, prepared once for all layers of a model."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedSequences(NamedTuple):
    """The documents of one micro batch, as an attention backend wants to know them.

    A tuple of tensors: compiled layers, recomputation and the hooks of FSDP2 take it as it is. Nothing here makes the
    host wait for the device.

    Attributes:
        documents: the number of each token's document within its row, from 0, never falling along a row; int32
            (batch, tokens).
        mask: what is added to the scores, (batch, 1, tokens, tokens): 0 where a query sees a key of its own document,
            -inf elsewhere. In the dtype of the queries, so that no layer makes a copy of its own.
    """

    documents: Tensor
    mask: Tensor

    @classmethod
    def of(cls, documents: Tensor, *, dtype: torch.dtype, causal: bool) -> PackedSequences:
        """Prepare the documents of a micro batch.

        Args:
            documents: as in the attribute.
            dtype: of the queries.
            causal: a query sees no later key of its document either.
        """
        batch, tokens = documents.shape
        hidden = documents[:, :, None] != documents[:, None, :]
        if causal:
            place = torch.arange(tokens, device=documents.device)
            hidden |= place > place[:, None]
        mask = torch.zeros((batch, 1, tokens, tokens), dtype=dtype, device=documents.device)
        return cls(documents, mask.masked_fill_(hidden[:, None], float("-inf")))

    def cu_seqlens(self) -> Tensor:
        """Where each document begins in the flattened rows, for kernels of variable length.

        A document ends with its row. No document is longer than a row, which bounds `max_seqlen`.

        Returns:
            int32 (batch * tokens + 1): ascending, padded with batch * tokens, so documents of no length end it. The
            length does not depend on what the rows hold, for that is known on the device only.
        """
        total = self.documents.numel()
        place = torch.arange(total, dtype=torch.int32, device=self.documents.device)
        starts = torch.where(_begins(self.documents).flatten(), place, total).sort().values
        return F.pad(starts, (0, 1), value=total)


def positions_in_documents(documents: Tensor) -> Tensor:
    """How many tokens of its document come before each token: 0, 1, 2, 0, 1, ...

    Args:
        documents: as in `PackedSequences`, (batch, tokens).

    Returns:
        int64 (batch, tokens).
    """
    place = torch.arange(documents.shape[1], device=documents.device)
    return place - torch.where(_begins(documents), place, 0).cummax(dim=1).values


def _begins(documents: Tensor) -> Tensor:
    """Whether a token is the first of its document in its row, bool (batch, tokens)."""
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
