"""Self-attention: one fused projection, rotary embedding, a backend chosen by the dispatcher, the output projection."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..kernels.attention.backends import AttentionFunction
from ..kernels.attention.packed import PackedSequences
from ..kernels.rope import apply_rotary
from .attention_calls import CallKind


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
    ) -> None:
        super().__init__()
        self.heads = heads
        self.groups = groups
        self.head_dim = head_dim
        self.scale = scale
        self.dropout = dropout
        self.causal = causal
        self.rotary_interleaved = rotary_interleaved
        self.backends = dict(backends)
        self.qkv = nn.Linear(hidden_size, (heads + 2 * groups) * head_dim, bias=qkv_bias)
        self.output = nn.Linear(heads * head_dim, hidden_size, bias=output_bias)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        kind: CallKind,
        packed: PackedSequences | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            hidden: (batch, tokens, hidden_size).
            rotary: cosine and sine, each (tokens, dim / 2) or (batch, tokens, dim / 2), or None.
            kind: the kind of call, which selects the backend.
            packed: the documents of the rows, where they must not see each other.

        Returns:
            (batch, tokens, hidden_size).
        """
        projected = self.qkv(hidden).unflatten(-1, (self.heads + 2 * self.groups, self.head_dim))
        if rotary is None:
            query, key, value = projected.split((self.heads, self.groups, self.groups), dim=2)
        else:  # queries and keys are neighbours: one pass turns both
            turning, value = projected.split((self.heads + self.groups, self.groups), dim=2)
            turned = apply_rotary(turning, *rotary, interleaved=self.rotary_interleaved)
            query, key = turned.split((self.heads, self.groups), dim=2)
        dropout = self.dropout if self.training else 0.0
        context = self.backends[kind](
            query, key, value, scale=self.scale, causal=self.causal, dropout=dropout, packed=packed
        )
        return self.output(context.flatten(2))
