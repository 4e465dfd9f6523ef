"""Rows that hold several documents: what keeps their attention apart, prepared once for all layers of a model."""

from __future__ import annotations

import weakref
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
        ends: where the documents lie in the flattened rows; see `cu_seqlens`.
        mask: what is added to the scores, (batch, 1, tokens, tokens): 0 where a query sees a key of its own document,
            -inf elsewhere. In the dtype of the queries, so that no layer makes a copy of its own. None where the
            backend needs none.
    """

    documents: Tensor
    ends: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, documents: Tensor, *, dtype: torch.dtype, causal: bool, mask: bool = True) -> PackedSequences:
        """Prepare the documents of a micro batch.

        Args:
            documents: as in the attribute.
            dtype: of the queries.
            causal: a query sees no later key of its document either.
            mask: the backend takes the documents as a mask.
        """
        return cls(documents, _ends(documents), _mask(documents, dtype, causal) if mask else None)

    def needed_mask(self) -> Tensor:
        """The mask, for a backend that cannot do without.

        Raises:
            ValueError: it was not made.
        """
        if self.mask is None:
            raise ValueError("`packed` must hold a mask for this backend; make it with PackedSequences.of(mask=True).")
        return self.mask

    def cu_seqlens(self) -> Tensor:
        """Where each document begins in the flattened rows, for kernels of variable length.

        A document ends with its row. No document is longer than a row, which bounds `max_seqlen`.

        Returns:
            int32 (batch * tokens + 1): ascending, padded with batch * tokens, so documents of no length end it. The
            length does not depend on what the rows hold, for that is known on the device only.
        """
        return self.ends


def _ends(documents: Tensor) -> Tensor:
    total = documents.numel()
    place = torch.arange(total, dtype=torch.int32, device=documents.device)
    starts = torch.where(_begins(documents).flatten(), place, total).sort().values
    return F.pad(starts, (0, 1), value=total)


def _mask(documents: Tensor, dtype: torch.dtype, causal: bool) -> Tensor:
    batch, tokens = documents.shape
    hidden = documents[:, :, None] != documents[:, None, :]
    if causal:
        place = torch.arange(tokens, device=documents.device)
        hidden |= place > place[:, None]
    mask = torch.zeros((batch, 1, tokens, tokens), dtype=dtype, device=documents.device)
    return mask.masked_fill_(hidden[:, None], float("-inf"))


_last_whole: list[tuple[weakref.ref[Tensor], Tensor]] = []


def whole_cu_seqlens(packed: PackedSequences) -> Tensor:
    """`cu_seqlens` without the documents of no length that end it, for kernels that pay for each.

    Waits for the device, once for all layers of a micro batch: the number of documents is known there only.

    Returns:
        int32 (documents + 1).
    """
    ends = packed.cu_seqlens()
    if not _last_whole or _last_whole[0][0]() is not ends:
        documents = int((ends < packed.documents.numel()).sum())
        _last_whole[:] = [(weakref.ref(ends), ends[: documents + 1].contiguous())]
    return _last_whole[0][1]


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
