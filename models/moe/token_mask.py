"""Masks of the tokens that are routed to experts: those that a label may depend on.

Padding takes no expert capacity and is not counted in router losses or statistics. The data mark padding; the rows that
fill up an evaluation batch, and the end of the last window, are recognized by their missing labels only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mask_up_to_last_label(labels: Tensor) -> Tensor:
    """Return the mask of a causal stack, bool (batch, tokens): True up to the last label of each row."""
    positions = torch.arange(labels.shape[1], device=labels.device)
    return positions <= positions.where(labels >= 0, -1).amax(dim=1, keepdim=True)


def mask_rows_with_label(tokens: Tensor, labels: Tensor, padding: Tensor | None) -> Tensor:
    """Return the mask of a bidirectional stack: True for the real tokens of rows that have a label.

    Args:
        tokens: (batch, tokens), input of the stack.
        labels: (batch, any number), -100 is ignored.
        padding: bool like `tokens`, True for real tokens; None: all are real.

    Returns:
        bool like `tokens`.
    """
    labelled = (labels >= 0).any(dim=1, keepdim=True)
    return labelled.expand_as(tokens) if padding is None else padding & labelled


def mask_documents_with_label(documents: Tensor, labels: Tensor, labels_documents: Tensor) -> Tensor:
    """Return the mask of an encoder of packed rows: True up to the last document with a label, then padding.

    Args:
        documents: document ids of the encoder tokens, (batch, tokens), non-decreasing in each row.
        labels: (batch, labels), -100 is ignored.
        labels_documents: document ids of the labels, like `labels`.

    Returns:
        bool like `documents`.
    """
    return documents <= labels_documents.where(labels >= 0, -1).amax(dim=1, keepdim=True)
