"""Parts shared by self-attention and cross-attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict, Unpack

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
from .norm import LayerNorm, RMSNorm, build_norm
from .recomputed_attention import RecomputedAttention

Backends = Mapping[CallKind, AttentionFunction]
"""Attention function for each kind of call."""


class AttentionArguments(TypedDict):
    """Arguments of both kinds of attention.

    Attributes:
        heads: query heads.
        groups: key and value heads; divides `heads`.
        head_dim: width of a head.
        scale: factor of the scores.
        qkv_bias: bias on the projections of queries, keys and values.
        output_bias: bias on `output`.
        dropout: probability of dropping an attention weight in training.
        backends: attention function for each kind of call.
        softcap: bound of the scores, cap * tanh(score / cap); 0 for none.
        softmax_type: attention sinks in the denominator of the softmax: none (`vanilla`), zeros or learned.
        query_norm: norm over each query head, before the rotary embedding; None without.
        key_norm: norm over each key head, likewise.
        head_scale: learned scale of each head's output (NormFormer, arXiv 2110.09456).
    """

    heads: int
    groups: int
    head_dim: int
    scale: float
    qkv_bias: bool
    output_bias: bool
    dropout: float
    backends: Backends
    softcap: NotRequired[float]
    softmax_type: NotRequired[SoftmaxType]
    query_norm: NotRequired[LayerNorm | RMSNorm | None]
    key_norm: NotRequired[LayerNorm | RMSNorm | None]
    head_scale: NotRequired[bool]


class Attention(RecomputableModule):
    """Multi-head, multi-query or grouped-query attention: projections, per-head norms, attention function, output.

    Recomputed: scores and softmax (selective recomputation, arXiv 2205.05198).

    Args:
        hidden_size: width of the residual stream.
        projections: width of each input projection by name, counted in heads.
        arguments: see `AttentionArguments`.

    Attributes:
        first_head: place of the first query head among those of all tensor-parallel ranks.
        fp8_core: attention function of training in fp8; None in the dtype of the activations.
    """

    first_head: int = 0
    fp8_core: TEFp8Attention | None = None

    def __init__(
        self, hidden_size: int, projections: Mapping[str, int], **arguments: Unpack[AttentionArguments]
    ) -> None:
        super().__init__()
        self.heads = arguments["heads"]
        self.groups = arguments["groups"]
        self.head_dim = arguments["head_dim"]
        self.scale = arguments["scale"]
        self.dropout = arguments["dropout"]
        self.has_dropout = self.dropout > 0
        self.softcap = arguments.get("softcap", 0.0)
        self.softmax_type: SoftmaxType = arguments.get("softmax_type", "vanilla")
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if self.softmax_type == "learnable" else None
        self.backends = dict(arguments["backends"])
        training = self.backends.get("training")
        self.uses_rng = self.has_dropout and training is not None and not draws_from_keys(training)
        for name, heads in projections.items():
            setattr(self, name, nn.Linear(hidden_size, heads * self.head_dim, bias=arguments["qkv_bias"]))
        self.query_norm = arguments.get("query_norm")
        self.key_norm = arguments.get("key_norm")
        self.head_scale = nn.Parameter(torch.ones(self.heads)) if arguments.get("head_scale") else None
        self.output = nn.Linear(self.heads * self.head_dim, hidden_size, bias=arguments["output_bias"])

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


def attention_arguments(stack: StackSlice, attention: AttentionSlice, backends: Backends) -> AttentionArguments:
    """Return the arguments that self-attention and cross-attention share."""
    return AttentionArguments(
        heads=attention.heads,
        groups=attention.groups,
        head_dim=attention.head_dim,
        scale=attention.scale,
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
        dropout=attention.dropout,
        backends=backends,
        softcap=attention.softcap,
        softmax_type=attention.softmax_type,
        query_norm=build_norm(stack.norm, attention.head_dim) if attention.qk_norm else None,
        key_norm=build_norm(stack.norm, attention.head_dim) if attention.qk_norm else None,
        head_scale=attention.head_scale,
    )
