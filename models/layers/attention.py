"""Parts shared by self-attention and cross-attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.attention.backends.registry import AttentionFunction, draws_from_keys
from ...kernels.fp8.te_attention import TEFp8Attention
from ..config.dense_stack import AttentionSlice, SoftmaxType
from ..config.stack import StackSlice
from ..dispatch.attention_calls import CallKind
from ..memory.recompute import RecomputableModule
from .dropout import LayerDropout, require_dropout
from .fused_linear import linear_add_residual
from .norm import build_norm
from .recomputed_attention import RecomputedAttention

Backends = Mapping[CallKind, AttentionFunction]
"""Attention function for each kind of call."""


class Attention(RecomputableModule):
    """Multi-head, multi-query or grouped-query attention: projections, per-head norms, attention function, output.

    Recomputed: scores and softmax (selective recomputation, arXiv 2205.05198).

    Args:
        stack: slice of the stack, whose residual stream it reads and writes.
        attention: slice of the attention.
        backends: attention function for each kind of call.
        projections: width of each input projection by name, counted in heads.

    Attributes:
        first_head: place of the first query head among those of all tensor-parallel ranks.
        fp8_core: attention function of training in fp8; None in the dtype of the activations.
    """

    first_head: int = 0
    fp8_core: TEFp8Attention | None = None

    def __init__(
        self, stack: StackSlice, attention: AttentionSlice, backends: Backends, projections: Mapping[str, int]
    ) -> None:
        super().__init__()
        self.heads = attention.heads
        self.groups = attention.groups
        self.head_dim = attention.head_dim
        self.scale = attention.scale
        self.dropout = attention.dropout
        self.has_dropout = self.dropout > 0
        self.softcap = attention.softcap
        self.softmax_type: SoftmaxType = attention.softmax_type
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if self.softmax_type == "learnable" else None
        self.backends = dict(backends)
        training = self.backends.get("training")
        self.uses_rng = self.has_dropout and training is not None and not draws_from_keys(training)
        for name, heads in projections.items():
            setattr(self, name, nn.Linear(stack.hidden_size, heads * self.head_dim, bias=attention.qkv_bias))
        self.query_norm = build_norm(stack.norm, self.head_dim) if attention.qk_norm else None
        self.key_norm = build_norm(stack.norm, self.head_dim) if attention.qk_norm else None
        self.head_scale = nn.Parameter(torch.ones(self.heads)) if attention.head_scale else None
        self.output = nn.Linear(self.heads * self.head_dim, stack.hidden_size, bias=attention.output_bias)

    def enable_recompute(self) -> None:
        """See `RecomputableModule.enable_recompute`; the attention function of training recomputes the scores."""
        super().enable_recompute()
        if "training" in self.backends:
            self.backends["training"] = RecomputedAttention(self.backends["training"], self.uses_rng)

    def _sinks(self, query: Tensor) -> Tensor | None:
        """Return the sinks of a call, (heads,) in fp32 or fp64; None for a plain softmax."""
        if self.softmax_type == "vanilla":
            return None
        dtype = torch.promote_types(query.dtype, torch.float32)
        return query.new_zeros(self.heads, dtype=dtype) if self.sinks is None else self.sinks.to(dtype)

    def _dropout(self, number: int, dropout: LayerDropout | None) -> tuple[float, Tensor | None]:
        """Return `dropout_p` and `rng` of a call with the dropouts of the layer."""
        if not self.training or not self.dropout:
            return 0.0, None
        return self.dropout, require_dropout(dropout).of_heads(number, self.first_head)

    def _project_output(
        self,
        heads: Tensor,
        residual: Tensor | None,
        number: int,
        dropout: LayerDropout | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Scale the heads of (batch, tokens, heads, head_dim), project them, and add the residual if given.

        `number` is the dropout of the projection's LoRA; for `bias` see `linear_add_residual`.
        """
        mask = None if dropout is None else dropout.of_channels(number, self.first_head * self.head_dim)
        if self.head_scale is not None:
            heads = heads * self.head_scale.to(heads.dtype)[:, None]
        return linear_add_residual(residual, self.output, heads.flatten(2), mask, bias=bias)
