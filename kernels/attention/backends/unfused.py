"""Attention in three explicit steps: Q K^T, masked softmax, P V. Runs on every device, with every option."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import triton_runs_on
from ...masked_softmax import scaled_masked_softmax
from ..dense_bias import hidden_keys, queries_without_keys, written_out_bias
from ..packed_sequences import PackedSequences


@dataclass(frozen=True, slots=True)
class UnfusedAttention:
    """The products in the dtype of the inputs, the softmax in fp32.

    Attributes:
        masked_softmax_fusion: on a GPU one kernel does the masked softmax. Only the probabilities are kept for the
            backward pass, a causal mask is never built, and without bias and softcap nor is an fp32 copy of the scores.
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
        """Attend, with the arguments of `AttentionFunction`."""
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
        """How much each query takes of each key, after dropout: (batch, heads, queries, keys).

        The queries of one group are stacked, so that grouped keys and values are read as they are and never repeated.
        """
        batch, queries, heads, head_dim = query.shape
        keys, groups = key.shape[1], key.shape[2]
        stacked = stacked_by_group(query, groups)
        keys_t = key.permute(0, 2, 3, 1).reshape(batch * groups, head_dim, keys)

        # alpha scales inside the product, in its fp32 accumulator: fp16 scores do not overflow on the way; the first
        # argument, which beta=0 takes out, is zeros because MPS reads it all the same (pytorch #187521)
        scores = torch.baddbmm(stacked.new_zeros(1), stacked, keys_t, beta=0, alpha=scale)
        scores = scores.view(batch, heads, queries, keys)
        dense = written_out_bias(bias, distance_bias, alibi_slopes, queries, keys)
        if dense is not None or softcap:
            scores = scores.to(torch.promote_types(query.dtype, torch.float32))
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores if dense is None else scores + dense
        fused = self.masked_softmax_fusion and triton_runs_on(scores)
        causal_in_kernel = fused and causal and packed is None  # the mask of documents is causal already
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
            across = packed is not None and packed.key_documents is not None
            may_be_empty = dense is not None or window is not None or key_padding_mask is not None or across
            probabilities = _softmax(scores, may_be_empty or (causal and queries > keys))
        probabilities = probabilities.to(query.dtype)
        return F.dropout(probabilities, dropout) if dropout else probabilities

    def product(self, weights: Tensor, value: Tensor) -> Tensor:
        """The sums of values so weighted, (batch, queries, heads, head_dim)."""
        batch, heads, queries, keys = weights.shape
        groups, head_dim = value.shape[2:]
        by_group = weights.reshape(batch * groups, heads // groups * queries, keys)
        context = torch.bmm(by_group, stacked_by_group(value, groups))
        return context.view(batch, heads, queries, head_dim).transpose(1, 2)


def stacked_by_group(heads: Tensor, groups: int) -> Tensor:
    """(batch, tokens, heads, head_dim) as (batch * groups, heads of a group * tokens, head_dim)."""
    batch, tokens, number, head_dim = heads.shape
    each = number // groups
    return heads.unflatten(2, (groups, each)).permute(0, 2, 3, 1, 4).reshape(batch * groups, each * tokens, head_dim)


def _softmax(scores: Tensor, may_be_empty: bool) -> Tensor:
    """Softmax of which a row that is all -inf gives 0."""
    if not may_be_empty:
        return scores.softmax(dim=-1)
    empty = queries_without_keys(scores == float("-inf"))
    # made finite before the softmax, so that neither the row nor its gradient is NaN
    return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
