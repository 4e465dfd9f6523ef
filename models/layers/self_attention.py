"""Self-attention: one fused projection, positions, a backend chosen by the dispatcher, the output projection."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.attention.backends.registry import AttentionFunction
from ...kernels.attention.decode import decode_attention
from ...kernels.attention.kv_append import turn_and_append
from ...kernels.attention.packed_sequences import PackedSequences
from ...kernels.fused_qkv_rope import rotary_split
from ...kernels.rope import apply_rotary
from ..dispatch.attention_calls import CallKind
from ..kv_cache import LayerCache
from .attention_bias import ScoreTerms
from .fused_linear import added_to, product_of_norm
from .norm import LayerNorm, RMSNorm
from .position_embeddings import Rotation


class SelfAttention(nn.Module):
    """Multi-head, multi-query or grouped-query self-attention.

    The rows of `qkv` are all query heads, then all key groups, then all value groups: [q | k | v].

    Args:
        hidden_size: width of the residual stream.
        heads: query heads.
        groups: key and value heads; divides `heads`.
        head_dim: width of a head.
        scale: factor of the scores.
        qkv_bias: bias on `qkv`.
        output_bias: bias on `output`.
        dropout: probability of dropping an attention weight in training.
        causal: a token sees no later token.
        rotary_interleaved: turn pairs of neighbours instead of halves, where there is a rotary embedding.
        backends: the function for each kind of call.
        window: keys visible to the left and right of a query, inclusive, -1 for all of them; None for no window.
        softcap: bound of the scores, cap * tanh(score / cap); 0 for none.
        query_norm: norm over each query head, before it turns; None without.
        key_norm: likewise of keys.
        head_scale: a learned factor for what each head gives (NormFormer, arXiv 2110.09456).
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
        causal: bool,
        rotary_interleaved: bool,
        backends: Mapping[CallKind, AttentionFunction],
        window: tuple[int, int] | None = None,
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
        self.causal = causal
        self.window = window
        self.softcap = softcap
        self.rotary_interleaved = rotary_interleaved
        self.backends = dict(backends)
        self.qkv = nn.Linear(hidden_size, (heads + 2 * groups) * head_dim, bias=qkv_bias)
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.head_scale = nn.Parameter(torch.ones(heads)) if head_scale else None
        self.output = nn.Linear(heads * head_dim, hidden_size, bias=output_bias)

    def forward(
        self,
        hidden: Tensor,
        rotary: Rotation | None,
        kind: CallKind,
        packed: PackedSequences | None = None,
        terms: ScoreTerms | None = None,
        padding: Tensor | None = None,
        norm: LayerNorm | RMSNorm | None = None,
        cache: LayerCache | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            hidden: (batch, tokens, hidden_size), normed, but for `norm`.
            rotary: how far queries and keys turn, or None.
            kind: the kind of call, which selects the backend.
            packed: the documents of the rows, where they must not see each other.
            terms: what the positions add to the scores, or None.
            padding: bool (batch, tokens), True for real tokens, which alone are seen; None where all are. Causal
                attention needs none: padding ends the rows, where no real token sees it.
            norm: a norm of `hidden` that is not kept; None without.
            cache: takes in keys and values of texts that begin, or of the one token that each goes on with, which then
                sees what is there; None without.
            onto: a stream like `hidden` that the result is added to; None without.

        Returns:
            (batch, tokens, hidden_size).
        """
        if norm is None:
            projected = self.qkv(hidden)
        else:
            projected, onto = product_of_norm(norm, self.qkv, hidden, onto)
        projected = projected.unflatten(-1, (self.heads + 2 * self.groups, self.head_dim))
        if cache is not None and hidden.shape[1] == 1:
            return self._projected(self._step(projected[:, 0], rotary, terms, cache)[:, None], onto)
        query, key, value = self._parts(projected, rotary)
        if cache is not None:
            cache.begin(key, value)
        context = self.backends[kind](
            query,
            key,
            value,
            scale=self.scale,
            causal=self.causal,
            dropout=self.dropout if self.training else 0.0,
            distance_bias=None if terms is None else terms.distance_bias,
            alibi_slopes=None if terms is None else terms.alibi_slopes,
            window=self.window,
            softcap=self.softcap,
            packed=packed,
            key_padding_mask=None if self.causal else padding,
        )
        return self._projected(context, onto)

    def _projected(self, context: Tensor, onto: Tensor | None) -> Tensor:
        """What the layer adds to the stream, from what each head gives; with the stream, where it is given."""
        if self.head_scale is not None:
            context = context * self.head_scale.to(context.dtype)[:, None]
        return added_to(onto, self.output, context.flatten(2))

    def _step(self, projected: Tensor, rotary: Rotation | None, terms: ScoreTerms | None, cache: LayerCache) -> Tensor:
        """One token of each text, (rows, heads + 2 groups, head_dim), over all that the cache holds of it."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = projected.split((self.heads, self.groups, self.groups), dim=1)
            projected = torch.cat((self.query_norm(query), self.key_norm(key), value), dim=1)
        angles = None
        if rotary is not None:
            key_cosine, key_sine = rotary.of_keys()
            angles = rotary.cosine[:, 0], rotary.sine[:, 0], key_cosine[:, 0], key_sine[:, 0]
        query = turn_and_append(
            projected, cache.key, cache.value, cache.lengths, angles, interleaved=self.rotary_interleaved
        )
        return decode_attention(
            query,
            cache.key,
            cache.value,
            cache.positions,
            scale=self.scale,
            distance_bias=None if terms is None else terms.distance_bias,
            alibi_slopes=None if terms is None else terms.alibi_slopes,
            left=-1 if self.window is None else self.window[0],
            softcap=self.softcap,
        )

    def _parts(self, projected: Tensor, rotary: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of (batch, tokens, heads + 2 groups, head_dim), normed and turned."""
        interleaved = self.rotary_interleaved
        if rotary is not None and rotary.key_cosine is None and self.query_norm is None:
            return rotary_split(projected, rotary.cosine, rotary.sine, self.groups, interleaved=interleaved)
        query, key, value = projected.split((self.heads, self.groups, self.groups), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query = apply_rotary(query, rotary.cosine, rotary.sine, interleaved=interleaved)
            key = apply_rotary(key, *rotary.of_keys(), interleaved=interleaved)
            if self.query_norm is None:  # a view would keep all of the projection, beside queries and keys once turned
                value = value.contiguous()
        return query, key, value
