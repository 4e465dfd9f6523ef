"""What all families put around their stacks: positions of tokens before them, logits or the loss after them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.cross_entropy import linear_cross_entropy
from .layers.position_embeddings import PositionTable

TokenPositions = nn.Embedding | PositionTable
"""A learned table of positions that is added to the embeddings, read by place within a document or within a sample."""


def dtype_of_products(hidden: Tensor) -> torch.dtype:
    """The dtype in which the layers multiply: that of the stream, or autocast's."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def add_positions(embedded: Tensor, table: TokenPositions | None, positions: Tensor | None) -> Tensor:
    """Embeddings with their learned positions.

    Args:
        embedded: (batch, tokens, hidden_size).
        table: the learned table, or None.
        positions: int64 (batch, tokens), for a table that is read by them; None counts each row from 0.
    """
    tokens = embedded.shape[1]
    if table is None:
        return embedded
    if isinstance(table, PositionTable):
        return embedded + table(tokens)
    return embedded + (table.weight[:tokens] if positions is None else table(positions))


def add_places(embedded: Tensor, table: TokenPositions | None, places: Tensor) -> Tensor:
    """Embeddings of single tokens with their learned positions.

    Args:
        embedded: (rows, 1, hidden_size).
        table: the learned table, or None.
        places: int64 (rows, 1), of the tokens in their texts.
    """
    if table is None:
        return embedded
    return embedded + (table.table[places] if isinstance(table, PositionTable) else table(places))


def token_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, vocab_size: int, softcap: float = 0.0
) -> Tensor:
    """(..., padded_vocab_size) of (..., hidden_size), in the dtype of the model; -inf behind `vocab_size`.

    Args:
        hidden: (..., hidden_size).
        weight: (padded_vocab_size, hidden_size).
        bias: (padded_vocab_size,), or None.
        vocab_size: real tokens.
        softcap: bound of the logits, softcap * tanh(logit / softcap); 0 for none.
    """
    logits = F.linear(hidden, weight, bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits[..., vocab_size:] = float("-inf")
    return logits


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float,
    denominator: Tensor | float,
    bias: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Sum of the cross-entropies of all labels, divided by `denominator`, without ever holding all logits.

    Args:
        hidden: (batch, tokens, hidden_size).
        weight: (padded_vocab_size, hidden_size).
        labels: int64 (batch, tokens); -100 counts nothing.
        vocab_size: real tokens.
        label_smoothing: share of a label that the other tokens get.
        denominator: of the sum; a scalar on the device, or a number.
        bias: (padded_vocab_size,), or None.
        softcap: as in `token_logits`.

    Returns:
        A scalar in fp32 (fp64 for an fp64 model).
    """
    dtype = dtype_of_products(hidden)  # the fused operation is opaque to autocast
    if not isinstance(denominator, Tensor):
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        denominator = torch.full((), denominator, dtype=exact, device=hidden.device)
    return linear_cross_entropy(
        hidden.flatten(0, 1).to(dtype),
        weight.to(dtype),
        labels.flatten(),
        valid_vocab=vocab_size,
        bias=None if bias is None else bias.to(dtype),
        softcap=softcap,
        label_smoothing=label_smoothing,
        denominator=denominator,
    )
