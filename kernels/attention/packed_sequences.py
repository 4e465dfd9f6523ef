"""Packed sequences: boundaries and masks of rows that hold several documents, prepared once per micro batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class PackedSequences(NamedTuple):
    """Document boundaries of one micro batch, for the attention backends.

    A tuple of tensors, which torch.compile, recomputation and FSDP2 hooks support as an argument. Nothing here
    synchronizes with the device.

    Attributes:
        document_ids: document id of each token within its row, starting at 0, non-decreasing; int32 (batch, tokens).
        padded_cu_seqlens: document boundaries in the flattened rows; see `cu_seqlens`.
        mask: additive mask (batch, 1, tokens, tokens): 0 within a document (up to the query itself if causal),
            -inf elsewhere. In the dtype of the queries, so that layers need no converted copy. None if the backend
            does not need it.
        key_document_ids: document ids of the keys in cross-attention, int32 (batch, keys); `document_ids` then belongs
            to the queries, and `mask` is (batch, 1, queries, keys). None if these are the same tokens.
        padded_key_cu_seqlens: document boundaries in the flattened keys, as many entries as `padded_cu_seqlens`; None
            if the keys are the same tokens.
        calls: those of each of a rank's calls, if the context-parallel ranks make several; the others are then those of
            whole sequences, without mask.
    """

    document_ids: Tensor
    padded_cu_seqlens: Tensor
    mask: Tensor | None
    key_document_ids: Tensor | None = None
    padded_key_cu_seqlens: Tensor | None = None
    calls: tuple[PackedSequences, ...] = ()

    @classmethod
    def from_documents(
        cls, documents: Tensor, *, dtype: torch.dtype, causal: bool, with_mask: bool = True
    ) -> PackedSequences:
        """Build from the document ids of a micro batch, for self-attention.

        Args:
            documents: see `document_ids`.
            dtype: of the queries.
            causal: also mask later keys of the same document.
            with_mask: build the mask, for backends without support for `cu_seqlens`.
        """
        return cls(documents, _ends(documents), _mask(documents, documents, dtype, causal) if with_mask else None)

    @classmethod
    def from_query_and_key_documents(
        cls,
        documents: Tensor,
        key_documents: Tensor,
        *,
        dtype: torch.dtype,
        causal: bool = False,
        with_mask: bool = True,
    ) -> PackedSequences:
        """Build from the document ids of queries and keys; equal ids attend to each other.

        A document may lack queries or keys; a query whose document has no keys is fully masked.

        Args:
            documents: document ids of the queries; see `document_ids`.
            key_documents: of the keys.
            dtype: of the queries.
            causal: also mask later keys; both end at the same token.
            with_mask: build the mask, for backends without support for `cu_seqlens`.
        """
        ends, key_ends = _common_ends(documents, key_documents)
        additive_mask = _mask(documents, key_documents, dtype, causal) if with_mask else None
        return cls(documents, ends, additive_mask, key_documents, key_ends)

    def require_mask(self) -> Tensor:
        """Return the mask, for a backend that requires it.

        Raises:
            ValueError: the mask was not built.
        """
        if self.mask is None:
            raise ValueError("`packed` must hold a mask for this backend; build it with `with_mask=True`.")
        return self.mask

    def cu_seqlens(self) -> Tensor:
        """Return the cumulative document lengths in the flattened rows, for variable-length kernels.

        No document crosses the end of its row, so the row length bounds `max_seqlen`.

        Returns:
            int32 (batch * tokens + 1): ascending, padded with batch * tokens, i.e. with empty documents at the end. The
            fixed shape avoids a device synchronization.
        """
        return self.padded_cu_seqlens

    def key_cu_seqlens(self) -> Tensor:
        """Return the same for the keys; in self-attention equal to `cu_seqlens`."""
        return self.padded_cu_seqlens if self.padded_key_cu_seqlens is None else self.padded_key_cu_seqlens


def _ends(documents: Tensor) -> Tensor:
    total = documents.numel()
    index = torch.arange(total, dtype=torch.int32, device=documents.device)
    starts = torch.where(_begins(documents).flatten(), index, total).sort().values
    return F.pad(starts, (0, 1), value=total)


def _common_ends(documents: Tensor, key_documents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the boundaries of all documents in queries and in keys, each (queries + keys + 1,); see `cu_seqlens`."""
    # ids that are unique across rows: the row in the upper 32 bits
    ids: list[Tensor] = []
    for tokens in (documents, key_documents):
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        ids.append((tokens.long() + (row << 32)).flatten())
    merged = torch.cat(ids).sort().values
    repeated = F.pad(merged[1:] == merged[:-1], (1, 0), value=False)
    distinct = merged.masked_fill(repeated, torch.iinfo(torch.int64).max).sort().values
    starts = (torch.searchsorted(tokens, distinct, out_int32=True) for tokens in ids)
    ends, key_ends = (F.pad(start, (0, 1), value=tokens.numel()) for start, tokens in zip(starts, ids, strict=True))
    return ends, key_ends


def _mask(documents: Tensor, key_documents: Tensor, dtype: torch.dtype, causal: bool) -> Tensor:
    (batch, queries), keys = documents.shape, key_documents.shape[1]
    hidden = documents[:, :, None] != key_documents[:, None, :]
    if causal:
        position = torch.arange(keys, device=documents.device)
        hidden |= position > position[keys - queries :, None]
    mask = torch.zeros((batch, 1, queries, keys), dtype=dtype, device=documents.device)
    return mask.masked_fill_(hidden[:, None], float("-inf"))


_unpadded_cache: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Unpadded `cu_seqlens` of queries and keys by the padded ones of the queries, as long as these exist."""


def unpadded_cu_seqlens(packed: PackedSequences) -> Tensor:
    """Return `cu_seqlens` without the empty documents at the end, for kernels whose cost grows with the entries.

    Synchronizes with the device once per micro batch, for all layers, to read the number of documents.

    Returns:
        int32 (documents + 1).
    """
    return _whole(packed)[0]


def unpadded_key_cu_seqlens(packed: PackedSequences) -> Tensor:
    """Return the same for `key_cu_seqlens`, with as many entries."""
    return _whole(packed)[1]


def _whole(packed: PackedSequences) -> tuple[Tensor, Tensor]:
    ends, key_ends = packed.cu_seqlens(), packed.key_cu_seqlens()
    cached: tuple[Tensor, Tensor] | None = _unpadded_cache.get(ends)
    if cached is None:
        nonempty = ends < packed.document_ids.numel()
        if packed.key_document_ids is not None:
            nonempty |= key_ends < packed.key_document_ids.numel()
        documents = int(nonempty.sum())
        unpadded, unpadded_keys = (each[: documents + 1].contiguous() for each in (ends, key_ends))
        cached = _unpadded_cache[ends] = unpadded, unpadded_keys
    return cached


def document_position_ids(documents: Tensor) -> Tensor:
    """Return position ids that restart at each document: 0, 1, 2, 0, 1, ...

    Args:
        documents: (batch, tokens), see `PackedSequences`.

    Returns:
        int64 (batch, tokens).
    """
    position = torch.arange(documents.shape[1], device=documents.device)
    return position - torch.where(_begins(documents), position, 0).cummax(dim=1).values


def _begins(documents: Tensor) -> Tensor:
    """Return True for the first token of each document in its row, bool (batch, tokens)."""
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
