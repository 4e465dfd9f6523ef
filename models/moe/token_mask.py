"""Masks of the tokens that are routed to experts: those that a label may depend on.

Padding takes no expert capacity and is not counted in router losses or statistics. The data mark padding; the rows that
fill up an evaluation batch, and the end of the last window, are recognized by their missing labels only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mask_up_to_last_label(labelled: Tensor) -> Tensor:
    """Return the mask of a causal stack, bool (batch, tokens): True up to the last label of each row.

    Args:
        labelled: bool (batch, tokens), True where there is a label.
    """
    positions = torch.arange(labelled.shape[1], device=labelled.device)
    return positions <= positions.where(labelled, -1).amax(dim=1, keepdim=True)


def mask_rows_with_label(length: int, labelled: Tensor, padding: Tensor | None) -> Tensor:
    """Return the mask of a bidirectional stack: True for the real tokens of rows that have a label.

    Args:
        length: tokens of each row.
        labelled: bool (batch, any number), True where there is a label.
        padding: bool (batch, tokens), True for real tokens; None: all are real.

    Returns:
        bool (batch, tokens).
    """
    rows = labelled.any(dim=1, keepdim=True)
    return rows.expand(-1, length) if padding is None else padding & rows


def mask_documents_with_label(documents: Tensor, labelled: Tensor, labels_documents: Tensor) -> Tensor:
    """Return the mask of an encoder of packed rows: True up to the last document with a label, then padding.

    Args:
        documents: document ids of the encoder tokens, (batch, tokens), non-decreasing in each row.
        labelled: bool (batch, labels), True where there is a label.
        labels_documents: document ids of the labels, like `labelled`.

    Returns:
        bool like `documents`.
    """
    return documents <= labels_documents.where(labelled, -1).amax(dim=1, keepdim=True)
