"""Cross-attention of a decoder to the encoder output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.attention.backends.registry import AttentionFunction
from ...kernels.attention.decode import decode_attention
from ...kernels.attention.packed_sequences import PackedSequences
from ..config.slices import AttentionSlice, StackSlice
from ..dispatch.attention_calls import CallKind
from ..kv_cache import CrossAttentionCache
from .cost import Matrix, PartMemory, StackInputs, Weights
from .fused_linear import linear_add_residual, norm_linear
from .norm import LayerNorm, RMSNorm
from .self_attention import attention_memory, attention_weights


class Memory(NamedTuple):
    """Encoder output for the cross-attention of every decoder layer. A tuple of tensors, which compiled layers accept.

    Attributes:
        hidden: encoder output after its final norm, (batch, keys, hidden_size).
        padding: bool (batch, keys), True for real tokens; None: all are real.
        packed: document boundaries of decoder rows (queries) and encoder rows (keys), for packed samples.
        distance_bias: (heads, 2 R + 1), score bias by distance, as in `ScoreBias`; None for none.
    """

    hidden: Tensor
    padding: Tensor | None = None
    packed: PackedSequences | None = None
    distance_bias: Tensor | None = None


class CrossAttention(nn.Module):
    """Multi-head or grouped-query attention to an encoder output, with the same backends as self-attention.

    The rows of `kv` are all key groups, then all value groups: [k | v].

    Args:
        hidden_size: width of the residual stream, and of the encoder output.
        heads: query heads.
        groups: key and value heads; divides `heads`.
        head_dim: width of a head.
        scale: factor of the scores.
        qkv_bias: bias on `query` and `kv`.
        output_bias: bias on `output`.
        dropout: probability of dropping an attention weight in training.
        backends: attention function for each kind of call.
        softcap: bound of the scores, cap * tanh(score / cap); 0 for none.
        query_norm: norm over each query head; None without.
        key_norm: norm over each key head; None without.
        head_scale: learned scale of each head's output.
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
        self.uses_rng = dropout > 0
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
        memory: Memory | CrossAttentionCache,
        kind: CallKind,
        norm: LayerNorm | RMSNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Attend from each decoder token to all real tokens of the encoder output.

        Args:
            hidden: (batch, queries, hidden_size), already normed unless `norm` is given.
            memory: encoder output of the same batch; its cached keys and values for a decode step (queries = 1).
            kind: kind of call, which selects the backend.
            norm: norm to apply to `hidden` without saving its output; None if it has been applied.
            residual: residual stream to add the output to, shaped like `hidden`; None without.

        Returns:
            (batch, queries, hidden_size).
        """
        if norm is None:
            query = self.query(hidden)
        else:
            query, residual = norm_linear(norm, self.query, hidden, residual)
        query = query.unflatten(-1, (self.heads, self.head_dim))
        if self.query_norm is not None:
            query = self.query_norm(query)
        if isinstance(memory, CrossAttentionCache):
            context = self._decode(query[:, 0], memory)[:, None]
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
        return linear_add_residual(residual, self.output, context.flatten(2))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project an encoder output (batch, tokens, hidden_size) to K and V, each (batch, tokens, groups, head_dim)."""
        key, value = self.kv(memory).unflatten(-1, (2 * self.groups, self.head_dim)).chunk(2, dim=2)
        return (key if self.key_norm is None else self.key_norm(key)), value

    def _decode(self, query: Tensor, memory: CrossAttentionCache) -> Tensor:
        """Attend from one token per sequence, (rows, heads, head_dim), to cached keys and values."""
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


# ---------------------------------------------------------------- cost


def cross_attention_weights(attention: AttentionSlice, stack: StackSlice) -> Weights:
    """Return the weights of a cross-attention: those of self-attention, in other matrices."""
    hidden, query, key = stack.hidden_size, attention.heads * attention.head_dim, attention.groups * attention.head_dim
    matrices = (
        Matrix("query", hidden * query),
        Matrix("kv", hidden * 2 * key, "encoder tokens"),
        Matrix("output", hidden * query),
    )
    return replace(attention_weights(attention, stack), matrices=matrices)


def cross_attention_memory(inputs: StackInputs) -> PartMemory | None:
    """Return the memory of the cross-attention of a layer; None without one."""
    attention, decision = inputs.cross, inputs.cross_attention
    if attention is None or decision is None:
        return None
    rows = inputs.tokens * attention.heads, inputs.encoder_tokens * attention.groups
    return attention_memory(attention, inputs, decision, rows, has_rotary=False)
