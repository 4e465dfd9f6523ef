"""What a backend cannot take as it is, written out over queries and keys: biases by distance, masks, padding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed_sequences import PackedSequences
from .reference import key_distances, visible_keys


def written_out_bias(
    bias: Tensor | None, distance_bias: Tensor | None, alibi_slopes: Tensor | None, queries: int, keys: int
) -> Tensor | None:
    """A dense bias, a distance bias and slopes as one dense bias, differentiable in all of them.

    Args:
        bias: broadcastable to (batch, heads, queries, keys).
        distance_bias: (heads, 2 R + 1), see `reference_attention`.
        alibi_slopes: (heads,), see `reference_attention`.
        queries: tokens that ask.
        keys: tokens that are asked.

    Returns:
        Broadcastable to (batch, heads, queries, keys), None without biases. What comes of distances has four
        dimensions and contiguous rows: PyTorch's memory-efficient attention takes nothing else.
    """
    dense = bias
    if distance_bias is not None:
        reach = distance_bias.shape[1] // 2
        place = key_distances(queries, keys, distance_bias.device).clamp(-reach, reach) + reach
        # an embedding: its gradient sums equal places in a fixed order, which indexing does not
        by_distance = F.embedding(place, distance_bias.t()).permute(2, 0, 1)[None].contiguous()
        dense = by_distance if dense is None else dense + by_distance
    if alibi_slopes is not None:
        by_slope = -alibi_slopes[None, :, None, None] * key_distances(queries, keys, alibi_slopes.device).abs()
        dense = by_slope if dense is None else dense + by_slope
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
    """What a query must not see, bool, broadcastable to (batch, heads, queries, keys); None for nothing."""
    hidden = None
    if (causal and packed is None) or window is not None:  # the mask of documents is causal already
        hidden = ~visible_keys(queries, keys, causal=causal, window=window, device=device)[None, None]
    if packed is not None:
        apart = packed.needed_mask() == float("-inf")
        hidden = apart if hidden is None else hidden | apart
    if key_padding_mask is not None:
        padding = ~key_padding_mask[:, None, None, :]
        hidden = padding if hidden is None else hidden | padding
    return hidden


def queries_without_keys(hidden: Tensor) -> Tensor:
    """Queries from which every key is hidden, bool (batch or 1, heads or 1, queries or 1, 1)."""
    return hidden.all(dim=-1, keepdim=True)
