"""Expand relative-position biases, masks and padding to dense (queries, keys) tensors."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .inputs import AttentionInputs
from .reference import document_chunks, relative_positions, visibility_mask


def combine_biases(inputs: AttentionInputs) -> Tensor | None:
    """Combine a dense bias, a distance bias and ALiBi slopes into one dense bias, differentiable in all of them.

    Returns:
        Broadcastable to (batch, heads, queries, keys), None without biases. Expanded biases have four dimensions and
        contiguous rows, as PyTorch's memory-efficient attention requires.
    """
    queries, keys, dense = inputs.queries, inputs.keys, inputs.bias
    if inputs.distance_bias is not None:
        reach = inputs.distance_bias.shape[1] // 2
        index = relative_positions(queries, keys, inputs.distance_bias.device).clamp(-reach, reach) + reach
        # embedding instead of indexing: its gradient sums equal indices in a fixed order, so it is deterministic
        expanded = F.embedding(index, inputs.distance_bias.t()).permute(2, 0, 1)[None].contiguous()
        dense = expanded if dense is None else dense + expanded
    if inputs.alibi_slopes is not None:
        distance = relative_positions(queries, keys, inputs.alibi_slopes.device).abs()
        expanded = -inputs.alibi_slopes[None, :, None, None] * distance
        dense = expanded if dense is None else dense + expanded
    return dense


def build_mask(inputs: AttentionInputs, *, causal: bool) -> Tensor | None:
    """Return the mask, bool, broadcastable to (batch, heads, queries, keys), True where masked; None for no mask.

    `causal` replaces that of the inputs: a backend may mask later keys itself.
    """
    hidden, packed = None, inputs.packed
    chunk = inputs.attention_chunk if packed is None else 0
    if (causal and packed is None) or inputs.window_size is not None or chunk:  # the document mask is causal already
        visible = visibility_mask(
            inputs.queries, inputs.keys, causal=causal, window=inputs.window_size, device=inputs.q.device, chunk=chunk
        )
        hidden = ~visible[None, None]
    if packed is not None:
        other_document = packed.require_mask() == float("-inf")
        hidden = other_document if hidden is None else hidden | other_document
        if inputs.attention_chunk:
            hidden = hidden | ~document_chunks(inputs)
    if inputs.key_padding_mask is not None:
        padding = ~inputs.key_padding_mask[:, None, None, :]
        hidden = padding if hidden is None else hidden | padding
    return hidden


def fully_masked_rows(hidden: Tensor) -> Tensor:
    """Return the fully masked rows, bool (batch or 1, heads or 1, queries or 1, 1)."""
    return hidden.all(dim=-1, keepdim=True)
