"""Attention as it is defined, eagerly and with nothing saved: the truth of every test. Chosen by name only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed import PackedSequences


def visible_keys(
    queries: int, keys: int, *, causal: bool, window: tuple[int, int] | None, device: torch.device
) -> Tensor:
    """Which key each query may see, bool (queries, keys). Both sequences end at the same token (bottom-right)."""
    distance = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
    visible = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        left, right = window
        if left >= 0:
            visible &= distance >= -left
        if right >= 0:
            visible &= distance <= right
    return visible


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    window: tuple[int, int] | None = None,
    packed: PackedSequences | None = None,
) -> Tensor:
    """softmax(scale * Q K^T + bias + mask) V, in fp32 (fp64 for fp64 inputs).

    Args:
        query: (batch, queries, heads, head_dim).
        key: (batch, keys, groups, head_dim); query head h reads group h // (heads / groups).
        value: like `key`.
        scale: factor of the scores.
        causal: a query sees no later key, bottom-right aligned.
        dropout: probability of dropping an attention weight.
        bias: added to the scaled scores, broadcastable to (batch, heads, queries, keys).
        window: keys visible to the left and right, inclusive; -1 for all.
        packed: documents that do not see each other, where a row holds several; `causal` is as they were prepared.

    Returns:
        (batch, queries, heads, head_dim) in the dtype of `query`. A query that may see no key gives 0, gradients 0.
    """
    accumulate = torch.promote_types(query.dtype, torch.float32)
    per_group = query.shape[2] // key.shape[2]
    wide_key = key.to(accumulate).repeat_interleave(per_group, dim=2)
    wide_value = value.to(accumulate).repeat_interleave(per_group, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query.to(accumulate), wide_key) * scale
    if bias is not None:
        scores = scores + bias.to(accumulate)
    visible = visible_keys(query.shape[1], key.shape[1], causal=causal, window=window, device=query.device)
    if packed is not None:
        numbers = packed.documents
        visible = visible & (numbers[:, None, :, None] == numbers[:, None, None, :])
    scores = scores.masked_fill(~visible, float("-inf"))
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True)
    # an empty row is made finite before the softmax, so that neither it nor its gradient is NaN
    probabilities = scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    probabilities = F.dropout(probabilities, dropout) if dropout else probabilities
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, wide_value).to(query.dtype)
