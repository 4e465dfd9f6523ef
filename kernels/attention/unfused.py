"""Attention in three explicit steps: Q K^T, masked softmax, P V. Runs on every device, with every option."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .packed import PackedSequences
from .reference import visible_keys


def unfused_attention(
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
    """Like `reference_attention`, with the products in the dtype of the inputs and the softmax in fp32.

    The queries of one group are stacked, so that grouped keys and values are read as they are and never repeated.
    """
    batch, queries, heads, head_dim = query.shape
    keys, groups = key.shape[1], key.shape[2]
    per_group = heads // groups
    stacked = query.unflatten(2, (groups, per_group)).permute(0, 2, 3, 1, 4)  # (batch, groups, per_group, queries, d)
    stacked = stacked.reshape(batch * groups, per_group * queries, head_dim)
    keys_t = key.permute(0, 2, 3, 1).reshape(batch * groups, head_dim, keys)
    values = value.transpose(1, 2).reshape(batch * groups, keys, head_dim)

    # alpha scales inside the product, in its fp32 accumulator: fp16 scores do not overflow on the way; the first
    # argument, which beta=0 takes out, is zeros because MPS reads it all the same (pytorch #187521)
    scores = torch.baddbmm(stacked.new_zeros(1), stacked, keys_t, beta=0, alpha=scale)
    scores = scores.to(torch.promote_types(query.dtype, torch.float32)).view(batch, heads, queries, keys)
    if bias is not None:
        scores = scores + bias
    if packed is not None:
        scores = scores + packed.mask
    if (causal and packed is None) or window is not None:
        visible = visible_keys(queries, keys, causal=causal, window=window, device=query.device)
        scores = scores.masked_fill(~visible, float("-inf"))
    may_be_empty = bias is not None or window is not None or (causal and queries > keys)
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True) if may_be_empty else None
    if empty is not None:  # made finite before the softmax, so that neither the row nor its gradient is NaN
        scores = scores.masked_fill(empty, 0.0)
    probabilities = scores.softmax(dim=-1)
    if empty is not None:
        probabilities = probabilities.masked_fill(empty, 0.0)
    probabilities = probabilities.to(query.dtype)
    probabilities = F.dropout(probabilities, dropout) if dropout else probabilities
    context = torch.bmm(probabilities.view(batch * groups, per_group * queries, keys), values)
    return context.view(batch, groups * per_group, queries, head_dim).transpose(1, 2)
