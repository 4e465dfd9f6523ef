"""Unfused attention in three steps: Q K^T, masked softmax, P V. Supports every device and option."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...launch import triton_runs_on
from ...masked_softmax import scaled_masked_softmax
from ..dense_bias import build_mask, combine_biases, fully_masked_rows
from ..dropout import dropout_rng, dropout_weights
from ..inputs import AttentionInputs


@dataclass(frozen=True, slots=True)
class UnfusedAttention:
    """Attention with matrix products in the dtype of the inputs and the softmax in fp32.

    Attributes:
        masked_softmax_fusion: use the fused masked softmax kernel on a GPU. It saves only the probabilities for the
            backward pass, never builds a causal mask, and needs no fp32 copy of the scores without bias and softcap.
    """

    masked_softmax_fusion: bool = True

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention."""
        return self.weighted_sum(self.weights(inputs), inputs.v)

    def weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the attention weights after dropout, (batch, heads, queries, keys).

        The query heads of a group are stacked along the rows, so that grouped keys and values are never repeated.
        """
        query, key, softcap = inputs.q, inputs.k, inputs.softcap
        batch, queries, heads, head_dim = query.shape
        keys, groups = key.shape[1], key.shape[2]
        stacked = stack_heads_by_group(query, groups)
        keys_t = key.permute(0, 2, 3, 1).reshape(batch * groups, head_dim, keys)

        # alpha scales in the fp32 accumulator of the product, so that fp16 scores do not overflow; the first argument,
        # unused with beta=0, must be zeros because MPS reads it nevertheless (pytorch #187521)
        scores = torch.baddbmm(stacked.new_zeros(1), stacked, keys_t, beta=0, alpha=inputs.scale)
        scores = scores.view(batch, heads, queries, keys)
        dense = combine_biases(inputs)
        if dense is not None or softcap:
            scores = scores.to(torch.promote_types(query.dtype, torch.float32))
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores if dense is None else scores + dense
        fused = self.masked_softmax_fusion and triton_runs_on(scores)
        causal_in_kernel = fused and inputs.causal and inputs.packed is None  # the document mask is causal already
        hidden = build_mask(inputs, causal=inputs.causal and not causal_in_kernel)
        if fused:
            probabilities = scaled_masked_softmax(scores, hidden, causal=causal_in_kernel, sinks=inputs.sinks)
        else:
            scores = scores.to(torch.promote_types(query.dtype, torch.float32))
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            across = inputs.packed is not None and inputs.packed.key_document_ids is not None
            masks = (dense, inputs.window_size, inputs.key_padding_mask)
            may_be_empty = across or any(mask is not None for mask in masks)
            probabilities = _softmax(scores, may_be_empty or (inputs.causal and queries > keys), inputs.sinks)
        probabilities = probabilities.to(query.dtype)
        if inputs.dropout_p:
            return dropout_weights(probabilities, inputs.dropout_p, dropout_rng(inputs))
        return probabilities

    def weighted_sum(self, weights: Tensor, value: Tensor) -> Tensor:
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


def _softmax(scores: Tensor, may_be_empty: bool, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension, and the sinks of the heads, that returns 0 for fully masked rows."""
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return _softmax(torch.cat((scores, column), dim=-1), may_be_empty, None)[..., :-1]
    if not may_be_empty:
        return scores.softmax(dim=-1)
    empty = fully_masked_rows(scores == float("-inf"))
    # set to a finite value before the softmax, so that neither the row nor its gradient is NaN
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
