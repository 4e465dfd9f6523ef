"""Self-attention: fused QKV projection, positions, the attention backend, output projection."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from ...kernels.attention.decode import DecodeInputs, decode_attention
from ...kernels.attention.inputs import AttentionInputs
from ...kernels.attention.kv_append import apply_rotary_and_append_kv
from ...kernels.fused_qkv_rope import fused_qkv_rope
from ...kernels.rope import apply_rotary
from ..kv_cache import LayerKVCache
from .attention import Attention, AttentionArguments
from .context import LayerContext
from .fused_linear import norm_linear
from .norm import LayerNorm, RMSNorm
from .position_embeddings import RotaryTables


class SelfAttention(Attention):
    """Multi-head, multi-query or grouped-query self-attention.

    The rows of `qkv` are all query heads, then all key groups, then all value groups: [q | k | v].

    Args:
        hidden_size: width of the residual stream.
        causal: mask later tokens.
        rotary_interleaved: rotate adjacent pairs of channels instead of halves, with a rotary embedding.
        window: keys visible to the left and right of a query, inclusive, -1 for all of them; None for no window.
        arguments: see `AttentionArguments`.
    """

    qkv: nn.Linear

    def __init__(
        self,
        hidden_size: int,
        *,
        causal: bool,
        rotary_interleaved: bool,
        window: tuple[int, int] | None = None,
        **arguments: Unpack[AttentionArguments],
    ) -> None:
        super().__init__(hidden_size, {"qkv": arguments["heads"] + 2 * arguments["groups"]}, **arguments)
        self.causal = causal
        self.window = window
        self.rotary_interleaved = rotary_interleaved

    def forward(
        self,
        hidden: Tensor,
        context: LayerContext,
        norm: LayerNorm | RMSNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            hidden: (batch, tokens, hidden_size), already normed unless `norm` is given.
            context: kind of call, positions, masks and KV cache.
            norm: norm to apply to `hidden` without saving its output; None if it has been applied.
            residual: residual stream to add the output to, shaped like `hidden`; None without.

        Returns:
            (batch, tokens, hidden_size).
        """
        if norm is None:
            projected = self.qkv(hidden)
        else:
            projected, residual = norm_linear(norm, self.qkv, hidden, residual)
        projected = projected.unflatten(-1, (self.heads + 2 * self.groups, self.head_dim))
        cache = context.cache
        if cache is not None and hidden.shape[1] == 1:
            return self._project_output(self._decode(projected[:, 0], context, cache)[:, None], residual)
        query, key, value = self._split_and_rotate(projected, context.rotary)
        if cache is not None:
            cache.prefill(key, value)
        terms = context.terms
        inputs = AttentionInputs(
            query,
            key,
            value,
            causal=self.causal,
            window_size=self.window,
            softmax_scale=self.scale,
            softcap=self.softcap,
            distance_bias=None if terms is None else terms.distance_bias,
            alibi_slopes=None if terms is None else terms.alibi_slopes,
            key_padding_mask=None if self.causal else context.padding,
            dropout_p=self.dropout if self.training else 0.0,
            packed=context.packed,
        )
        return self._project_output(self.backends[context.kind](inputs), residual)

    def _decode(self, projected: Tensor, context: LayerContext, cache: LayerKVCache) -> Tensor:
        """Append one token per sequence, (rows, heads + 2 groups, head_dim), to the KV cache; attend to all of it."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = projected.split((self.heads, self.groups, self.groups), dim=1)
            projected = torch.cat((self.query_norm(query), self.key_norm(key), value), dim=1)
        tables, rotary, terms = None, context.rotary, context.terms
        if rotary is not None:
            key_cosine, key_sine = rotary.for_keys()
            tables = rotary.cosine[:, 0], rotary.sine[:, 0], key_cosine[:, 0], key_sine[:, 0]
        query = apply_rotary_and_append_kv(
            projected, cache.key, cache.value, cache.lengths, tables, interleaved=self.rotary_interleaved
        )
        inputs = DecodeInputs(
            query,
            cache.key,
            cache.value,
            cache.positions,
            scale=self.scale,
            distance_bias=None if terms is None else terms.distance_bias,
            alibi_slopes=None if terms is None else terms.alibi_slopes,
            left_window=-1 if self.window is None else self.window[0],
            softcap=self.softcap,
        )
        return decode_attention(inputs)

    def _split_and_rotate(self, projected: Tensor, rotary: RotaryTables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split (batch, tokens, heads + 2 groups, head_dim) into normed and rotated queries, keys, and values."""
        interleaved = self.rotary_interleaved
        if rotary is not None and rotary.key_cosine is None and self.query_norm is None:
            return fused_qkv_rope(projected, rotary.cosine, rotary.sine, self.groups, interleaved=interleaved)
        query, key, value = projected.split((self.heads, self.groups, self.groups), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query = apply_rotary(query, rotary.cosine, rotary.sine, interleaved=interleaved)
            key = apply_rotary(key, *rotary.for_keys(), interleaved=interleaved)
            if self.query_norm is None:
                # A view would keep the whole projection alive, although rotated queries and keys are new tensors.
                value = value.contiguous()
        return query, key, value
