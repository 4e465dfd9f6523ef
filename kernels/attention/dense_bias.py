"""Expand relative-position biases, masks and padding to dense (queries, keys) tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed_sequences import PackedSequences
from .reference import relative_positions, visibility_mask


def combine_biases(
    bias: Tensor | None, distance_bias: Tensor | None, alibi_slopes: Tensor | None, queries: int, keys: int
) -> Tensor | None:
    """Combine a dense bias, a distance bias and ALiBi slopes into one dense bias, differentiable in all of them.

    Args:
        bias: broadcastable to (batch, heads, queries, keys).
        distance_bias: (heads, 2 R + 1), see `reference_attention`.
        alibi_slopes: (heads,), see `reference_attention`.
        queries: query length.
        keys: key length.

    Returns:
        Broadcastable to (batch, heads, queries, keys), None without biases. Expanded biases have four dimensions and
        contiguous rows, as PyTorch's memory-efficient attention requires.
    """
    dense = bias
    if distance_bias is not None:
        reach = distance_bias.shape[1] // 2
        index = relative_positions(queries, keys, distance_bias.device).clamp(-reach, reach) + reach
        # embedding instead of indexing: its gradient sums equal indices in a fixed order, so it is deterministic
        expanded = F.embedding(index, distance_bias.t()).permute(2, 0, 1)[None].contiguous()
        dense = expanded if dense is None else dense + expanded
    if alibi_slopes is not None:
        expanded = -alibi_slopes[None, :, None, None] * relative_positions(queries, keys, alibi_slopes.device).abs()
        dense = expanded if dense is None else dense + expanded
    return dense


def hidden_keys(
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: tuple[int, int] | None,
    packed: PackedSequences | None,
    key_padding_mask: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Return the mask, bool, broadcastable to (batch, heads, queries, keys), True where masked; None for no mask."""
    hidden = None
    if (causal and packed is None) or window is not None:  # the document mask is causal already
        hidden = ~visibility_mask(queries, keys, causal=causal, window=window, device=device)[None, None]
    if packed is not None:
        other_document = packed.require_mask() == float("-inf")
        hidden = other_document if hidden is None else hidden | other_document
    if key_padding_mask is not None:
        padding = ~key_padding_mask[:, None, None, :]
        hidden = padding if hidden is None else hidden | padding
    return hidden


def fully_masked_rows(hidden: Tensor) -> Tensor:
    """Return the fully masked rows, bool (batch or 1, heads or 1, queries or 1, 1)."""
    return hidden.all(dim=-1, keepdim=True)
