"""Position embeddings before the stacks, logits and loss after them, for all model families."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.cross_entropy import linear_cross_entropy
from .layers.position_embeddings import SamplePositionEmbedding

PositionEmbedding = nn.Embedding | SamplePositionEmbedding
"""Learned position embedding, indexed by the position within a document (nn.Embedding) or within a sample."""


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype of matmuls: that of `hidden`, or of autocast."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def add_position_embeddings(embedded: Tensor, table: PositionEmbedding | None, positions: Tensor | None) -> Tensor:
    """Add learned position embeddings.

    Args:
        embedded: (batch, tokens, hidden_size).
        table: learned position embedding, or None.
        positions: position ids, int64 (batch, tokens), ignored by a `SamplePositionEmbedding`; None counts each row
            from 0.
    """
    tokens = embedded.shape[1]
    if table is None:
        return embedded
    if isinstance(table, SamplePositionEmbedding):
        return embedded + table(tokens)
    return embedded + (table.weight[:tokens] if positions is None else table(positions))


def add_decode_position_embeddings(embedded: Tensor, table: PositionEmbedding | None, positions: Tensor) -> Tensor:
    """Add learned position embeddings to the tokens of a decode step.

    Args:
        embedded: (rows, 1, hidden_size).
        table: learned position embedding, or None.
        positions: positions of the tokens, int64 (rows, 1).
    """
    if table is None:
        return embedded
    return embedded + (table.table[positions] if isinstance(table, SamplePositionEmbedding) else table(positions))


def token_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, vocab_size: int, softcap: float = 0.0
) -> Tensor:
    """Return logits (..., padded_vocab_size) in the dtype of the model; -inf for the vocabulary padding.

    Args:
        hidden: (..., hidden_size).
        weight: (padded_vocab_size, hidden_size).
        bias: (padded_vocab_size,), or None.
        vocab_size: vocabulary size without padding.
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
    """Return the sum of the cross-entropies of all labels divided by `denominator`, without materializing all logits.

    Args:
        hidden: (batch, tokens, hidden_size).
        weight: (padded_vocab_size, hidden_size).
        labels: int64 (batch, tokens); -100 is ignored.
        vocab_size: vocabulary size without padding.
        label_smoothing: label smoothing factor.
        denominator: a scalar on the device, or a number.
        bias: (padded_vocab_size,), or None.
        softcap: as in `token_logits`.

    Returns:
        A scalar in fp32 (fp64 for an fp64 model).
    """
    dtype = matmul_dtype(hidden)  # autocast does not apply to the fused operator: cast here
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
