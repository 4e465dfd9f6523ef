"""Unfused attention in three steps: Q K^T, masked softmax, P V. Supports every device and option."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import triton_runs_on
from ...masked_softmax import scaled_masked_softmax
from ..dense_bias import combine_biases, fully_masked_rows, hidden_keys
from ..packed_sequences import PackedSequences


@dataclass(frozen=True, slots=True)
class UnfusedAttention:
    """Attention with matrix products in the dtype of the inputs and the softmax in fp32.

    Attributes:
        masked_softmax_fusion: use the fused masked softmax kernel on a GPU. It saves only the probabilities for the
            backward pass, never builds a causal mask, and needs no fp32 copy of the scores without bias and softcap.
    """

    masked_softmax_fusion: bool = True

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        causal: bool,
        dropout: float = 0.0,
        bias: Tensor | None = None,
        distance_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        window: tuple[int, int] | None = None,
        softcap: float = 0.0,
        packed: PackedSequences | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; arguments as in `AttentionFunction`."""
        weights = self.weights(
            query, key, scale=scale, causal=causal, dropout=dropout, bias=bias, distance_bias=distance_bias,
            alibi_slopes=alibi_slopes, window=window, softcap=softcap, packed=packed,
            key_padding_mask=key_padding_mask,
        )  # fmt: skip
        return self.product(weights, value)

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scale: float,
        causal: bool,
        dropout: float = 0.0,
        bias: Tensor | None = None,
        distance_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        window: tuple[int, int] | None = None,
        softcap: float = 0.0,
        packed: PackedSequences | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the attention weights after dropout, (batch, heads, queries, keys).

        The query heads of a group are stacked along the rows, so that grouped keys and values are never repeated.
        """
        batch, queries, heads, head_dim = query.shape
        keys, groups = key.shape[1], key.shape[2]
        stacked = stack_heads_by_group(query, groups)
        keys_t = key.permute(0, 2, 3, 1).reshape(batch * groups, head_dim, keys)

        # alpha scales in the fp32 accumulator of the product, so that fp16 scores do not overflow; the first argument,
        # unused with beta=0, must be zeros because MPS reads it nevertheless (pytorch #187521)
        scores = torch.baddbmm(stacked.new_zeros(1), stacked, keys_t, beta=0, alpha=scale)
        scores = scores.view(batch, heads, queries, keys)
        dense = combine_biases(bias, distance_bias, alibi_slopes, queries, keys)
        if dense is not None or softcap:
            scores = scores.to(torch.promote_types(query.dtype, torch.float32))
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores if dense is None else scores + dense
        fused = self.masked_softmax_fusion and triton_runs_on(scores)
        causal_in_kernel = fused and causal and packed is None  # the document mask is causal already
        hidden = hidden_keys(
            queries, keys, causal=causal and not causal_in_kernel, window=window, packed=packed,
            key_padding_mask=key_padding_mask, device=query.device,
        )  # fmt: skip
        if fused:
            probabilities = scaled_masked_softmax(scores, hidden, causal=causal_in_kernel)
        else:
            scores = scores.to(torch.promote_types(query.dtype, torch.float32))
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            across = packed is not None and packed.key_document_ids is not None
            may_be_empty = dense is not None or window is not None or key_padding_mask is not None or across
            probabilities = _softmax(scores, may_be_empty or (causal and queries > keys))
        probabilities = probabilities.to(query.dtype)
        return F.dropout(probabilities, dropout) if dropout else probabilities

    def product(self, weights: Tensor, value: Tensor) -> Tensor:
        """Return the weighted sum of the values, (batch, queries, heads, head_dim)."""
        batch, heads, queries, keys = weights.shape
        groups, head_dim = value.shape[2:]
        by_group = weights.reshape(batch * groups, heads // groups * queries, keys)
        context = torch.bmm(by_group, stack_heads_by_group(value, groups))
        return context.view(batch, heads, queries, head_dim).transpose(1, 2)


def stack_heads_by_group(heads: Tensor, groups: int) -> Tensor:
    """Reshape (batch, tokens, heads, head_dim) to (batch * groups, heads per group * tokens, head_dim)."""
    batch, tokens, num_heads, head_dim = heads.shape
    per_group = num_heads // groups
    by_group = heads.unflatten(2, (groups, per_group)).permute(0, 2, 3, 1, 4)
    return by_group.reshape(batch * groups, per_group * tokens, head_dim)


def _softmax(scores: Tensor, may_be_empty: bool) -> Tensor:
    """Softmax over the last dimension that returns 0 for fully masked rows."""
    if not may_be_empty:
        return scores.softmax(dim=-1)
    empty = fully_masked_rows(scores == float("-inf"))
    # set to a finite value before the softmax, so that neither the row nor its gradient is NaN
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
