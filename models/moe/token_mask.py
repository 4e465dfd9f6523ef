"""Which tokens of a batch go to experts: those that a label depends on, as far as that is known.

Padding takes no room in an expert and counts in no loss or figure of a router. Data tell where their rows end; rows
that only fill up a batch of evaluation, and the end of a last window, are known by their labels alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def up_to_last_label(labels: Tensor) -> Tensor:
    """For a causal stack: True for every token with a label at it or behind it in its row, bool (batch, tokens)."""
    places = torch.arange(labels.shape[1], device=labels.device)
    return places <= places.where(labels >= 0, -1).amax(dim=1, keepdim=True)


def in_rows_with_label(tokens: Tensor, labels: Tensor, padding: Tensor | None) -> Tensor:
    """For a stack that sees both ways: True in rows that have a label, but for their padding.

    Args:
        tokens: (batch, tokens), of the stack.
        labels: (batch, any number), -100 where nothing counts.
        padding: bool like `tokens`, True for real tokens; None where all are.

    Returns:
        bool like `tokens`.
    """
    labelled = (labels >= 0).any(dim=1, keepdim=True)
    return labelled.expand_as(tokens) if padding is None else padding & labelled


def in_documents_with_label(documents: Tensor, labels: Tensor, labels_documents: Tensor) -> Tensor:
    """For an encoder of packed rows: True up to the last document that has a label; behind it stands padding.

    Args:
        documents: of the encoder's tokens, (batch, tokens), never falling in a row.
        labels: (batch, labels), -100 where nothing counts.
        labels_documents: like `labels`, what they belong to.

    Returns:
        bool like `documents`.
    """
    return documents <= labels_documents.where(labels >= 0, -1).amax(dim=1, keepdim=True)
