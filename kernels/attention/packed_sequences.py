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
        key_documents: in cross-attention the same numbers for the keys, int32 (batch, keys); `documents` are then those
            of the queries, and `mask` is (batch, 1, queries, keys). None where queries and keys are the same tokens.
        key_ends: where the documents lie in the flattened keys, as many entries as in `ends`; None likewise.
    """

    documents: Tensor
    ends: Tensor
    mask: Tensor | None
    key_documents: Tensor | None = None
    key_ends: Tensor | None = None

    @classmethod
    def of(cls, documents: Tensor, *, dtype: torch.dtype, causal: bool, mask: bool = True) -> PackedSequences:
        """Prepare the documents of a micro batch.

        Args:
            documents: as in the attribute.
            dtype: of the queries.
            causal: a query sees no later key of its document either.
            mask: the backend takes the documents as a mask.
        """
        return cls(documents, _ends(documents), _mask(documents, documents, dtype, causal) if mask else None)

    @classmethod
    def across(
        cls, documents: Tensor, key_documents: Tensor, *, dtype: torch.dtype, mask: bool = True
    ) -> PackedSequences:
        """Prepare the documents of queries and keys that are different tokens: those of equal number belong together.

        A document may lack queries or keys; a query whose document has no keys sees nothing.

        Args:
            documents: of the queries, as in the attribute.
            key_documents: of the keys.
            dtype: of the queries.
            mask: the backend takes the documents as a mask.
        """
        ends, key_ends = _common_ends(documents, key_documents)
        made = _mask(documents, key_documents, dtype, causal=False) if mask else None
        return cls(documents, ends, made, key_documents, key_ends)

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

    def key_cu_seqlens(self) -> Tensor:
        """The same for the keys, where they are tokens of their own; else `cu_seqlens`."""
        return self.ends if self.key_ends is None else self.key_ends


def _ends(documents: Tensor) -> Tensor:
    total = documents.numel()
    place = torch.arange(total, dtype=torch.int32, device=documents.device)
    starts = torch.where(_begins(documents).flatten(), place, total).sort().values
    return F.pad(starts, (0, 1), value=total)


def _common_ends(documents: Tensor, key_documents: Tensor) -> tuple[Tensor, Tensor]:
    """Where each document of the queries or of the keys begins in either, (queries + keys + 1) entries; see `ends`."""
    numbers = [
        (tokens.long() + (torch.arange(len(tokens), device=tokens.device)[:, None] << 32)).flatten()
        for tokens in (documents, key_documents)
    ]
    every = torch.cat(numbers).sort().values
    repeated = F.pad(every[1:] == every[:-1], (1, 0), value=False)
    distinct = every.masked_fill(repeated, torch.iinfo(torch.int64).max).sort().values
    starts = (torch.searchsorted(of_tokens, distinct, out_int32=True) for of_tokens in numbers)
    ends, key_ends = (
        F.pad(start, (0, 1), value=of_tokens.numel()) for start, of_tokens in zip(starts, numbers, strict=True)
    )
    return ends, key_ends


def _mask(documents: Tensor, key_documents: Tensor, dtype: torch.dtype, causal: bool) -> Tensor:
    batch, tokens = documents.shape
    hidden = documents[:, :, None] != key_documents[:, None, :]
    if causal:
        place = torch.arange(tokens, device=documents.device)
        hidden |= place > place[:, None]
    mask = torch.zeros((batch, 1, tokens, key_documents.shape[1]), dtype=dtype, device=documents.device)
    return mask.masked_fill_(hidden[:, None], float("-inf"))


_last_whole: dict[bool, tuple[weakref.ref[Tensor], Tensor, Tensor]] = {}
"""The last micro batch's, of self-attention (False) and of cross-attention (True)."""


def whole_cu_seqlens(packed: PackedSequences) -> Tensor:
    """`cu_seqlens` without the documents of no length that end it, for kernels that pay for each.

    Waits for the device, once for all layers of a micro batch: the number of documents is known there only.

    Returns:
        int32 (documents + 1).
    """
    return _whole(packed)[0]


def whole_key_cu_seqlens(packed: PackedSequences) -> Tensor:
    """The same of `key_cu_seqlens`, as many entries."""
    return _whole(packed)[1]


def _whole(packed: PackedSequences) -> tuple[Tensor, Tensor]:
    ends, key_ends = packed.cu_seqlens(), packed.key_cu_seqlens()
    across = packed.key_documents is not None
    last = _last_whole.get(across)
    if last is None or last[0]() is not ends:
        there = ends < packed.documents.numel()
        if packed.key_documents is not None:
            there |= key_ends < packed.key_documents.numel()
        documents = int(there.sum())
        whole, whole_keys = (each[: documents + 1].contiguous() for each in (ends, key_ends))
        last = _last_whole[across] = weakref.ref(ends), whole, whole_keys
    return last[1], last[2]


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
