"""Cross-attention: the queries of a decoder ask the encoder's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.attention.backends.registry import AttentionFunction
from ...kernels.attention.decode import decode_attention
from ...kernels.attention.packed_sequences import PackedSequences
from ..dispatch.attention_calls import CallKind
from ..kv_cache import CachedMemory
from .fused_linear import added_to, product_of_norm
from .norm import LayerNorm, RMSNorm


class Memory(NamedTuple):
    """What the cross-attention of every layer of a decoder reads. A tuple of tensors: compiled layers take it as it is.

    Attributes:
        hidden: the encoder's normed output, (batch, keys, hidden_size).
        padding: bool (batch, keys), True for real tokens; None where all are.
        packed: the documents of the decoder's rows (queries) and of the encoder's (keys), where rows hold several.
        distance_bias: (heads, 2 R + 1), what is added to the scores by distance; None for nothing.
    """

    hidden: Tensor
    padding: Tensor | None = None
    packed: PackedSequences | None = None
    distance_bias: Tensor | None = None


class CrossAttention(nn.Module):
    """Multi-head or grouped-query attention over a memory, through the same backends as self-attention.

    The rows of `kv` are all key groups, then all value groups: [k | v].

    Args:
        hidden_size: width of the residual stream, and of the memory.
        heads: query heads.
        groups: key and value heads; divides `heads`.
        head_dim: width of a head.
        scale: factor of the scores.
        qkv_bias: bias on `query` and `kv`.
        output_bias: bias on `output`.
        dropout: probability of dropping an attention weight in training.
        backends: the function for each kind of call.
        softcap: bound of the scores, cap * tanh(score / cap); 0 for none.
        query_norm: norm over each query head; None without.
        key_norm: likewise of keys.
        head_scale: a learned factor for what each head gives.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int,
        groups: int,
        head_dim: int,
        scale: float,
        qkv_bias: bool,
        output_bias: bool,
        dropout: float,
        backends: Mapping[CallKind, AttentionFunction],
        softcap: float = 0.0,
        query_norm: LayerNorm | RMSNorm | None = None,
        key_norm: LayerNorm | RMSNorm | None = None,
        head_scale: bool = False,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.groups = groups
        self.head_dim = head_dim
        self.scale = scale
        self.dropout = dropout
        self.draws = dropout > 0
        self.softcap = softcap
        self.backends = dict(backends)
        self.query = nn.Linear(hidden_size, heads * head_dim, bias=qkv_bias)
        self.kv = nn.Linear(hidden_size, 2 * groups * head_dim, bias=qkv_bias)
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.head_scale = nn.Parameter(torch.ones(heads)) if head_scale else None
        self.output = nn.Linear(heads * head_dim, hidden_size, bias=output_bias)

    def forward(
        self,
        hidden: Tensor,
        memory: Memory | CachedMemory,
        kind: CallKind,
        norm: LayerNorm | RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        """Attend from each token of the decoder to all real tokens of its memory.

        Args:
            hidden: (batch, queries, hidden_size), normed, but for `norm`.
            memory: of the same batch; a cached one is read by one token of each row.
            kind: the kind of call, which selects the backend.
            norm: a norm of `hidden` that is not kept; None without.
            onto: a stream like `hidden` that the result is added to; None without.

        Returns:
            (batch, queries, hidden_size).
        """
        if norm is None:
            query = self.query(hidden)
        else:
            query, onto = product_of_norm(norm, self.query, hidden, onto)
        query = query.unflatten(-1, (self.heads, self.head_dim))
        if self.query_norm is not None:
            query = self.query_norm(query)
        if isinstance(memory, CachedMemory):
            context = self._step(query[:, 0], memory)[:, None]
        else:
            key, value = self.keys_and_values(memory.hidden)
            context = self.backends[kind](
                query,
                key,
                value,
                scale=self.scale,
                causal=False,
                dropout=self.dropout if self.training else 0.0,
                distance_bias=memory.distance_bias,
                softcap=self.softcap,
                packed=memory.packed,
                key_padding_mask=memory.padding,
            )
        if self.head_scale is not None:
            context = context * self.head_scale.to(context.dtype)[:, None]
        return added_to(onto, self.output, context.flatten(2))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What all queries see of a memory (batch, tokens, hidden_size): each (batch, tokens, groups, head_dim)."""
        key, value = self.kv(memory).unflatten(-1, (2 * self.groups, self.head_dim)).chunk(2, dim=2)
        return (key if self.key_norm is None else self.key_norm(key)), value

    def _step(self, query: Tensor, memory: CachedMemory) -> Tensor:
        """One token of each text, (rows, heads, head_dim)."""
        return decode_attention(
            query,
            memory.key,
            memory.value,
            memory.positions,
            scale=self.scale,
            lengths=memory.memory_lengths,
            distance_bias=memory.distance_bias,
            softcap=self.softcap,
        )
