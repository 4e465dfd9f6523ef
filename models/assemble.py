"""The modules of a stack, made from its slice. On the meta device nothing is allocated."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..kernels.attention.backends import AttentionFunction
from .attention import SelfAttention
from .attention_calls import CallKind
from .config.slices import AttentionSlice, StackSlice
from .cross_attention import CrossAttention
from .mlp import MLP
from .norms import NORMS, LayerNorm, RMSNorm
from .positions import PositionTable, RotaryEmbedding, XPosEmbedding
from .score_positions import ALiBi, Kerple, RelativeBias, Sandwich, ScorePositions
from .stack import Layer, Stack

Backends = Mapping[CallKind, AttentionFunction]


def build_stack(
    stack: StackSlice,
    backends: Backends,
    cross_attention: AttentionSlice | None = None,
    cross_backends: Backends | None = None,
) -> Stack:
    """A stack of equal layers.

    Args:
        stack: what it is.
        backends: the function of its self-attention for each kind of call.
        cross_attention: the cross-attention of each layer, None without.
        cross_backends: the function of that for each kind of call.
    """
    layers = (_build_layer(stack, backends, cross_attention, cross_backends) for _ in range(stack.num_layers))
    return Stack(
        layers,
        final_norm=None if stack.block == "post_ln" else build_norm(stack),
        rotary=_build_rotary(stack),
        score_positions=_build_score_positions(stack),
    )


def _build_rotary(stack: StackSlice) -> RotaryEmbedding | XPosEmbedding | None:
    rotary = stack.rotary
    if rotary is None:
        return None
    if rotary.fading:
        return XPosEmbedding(rotary.dim, rotary.positions)
    return RotaryEmbedding(
        rotary.dim,
        rotary.positions,
        base=rotary.base,
        position_scale=rotary.position_scale,
        scaling=rotary.scaling,
    )


def _build_score_positions(stack: StackSlice) -> ScorePositions | None:
    attention = stack.attention
    distance = attention.distance
    if distance is None:
        return None
    match distance.kind:
        case "alibi":
            return ALiBi(attention.heads, distance.alibi_heads)
        case "kerple":
            return Kerple(attention.heads)
        case "sandwich":
            return Sandwich(attention.heads, attention.head_dim)
        case "relative":
            return RelativeBias(
                attention.heads,
                buckets=distance.buckets,
                max_distance=distance.max_distance,
                bidirectional=not attention.causal,
            )


def build_position_table(
    rows: int | None, hidden_size: int, *, by_document: bool
) -> nn.Embedding | PositionTable | None:
    """A learned table of positions that is added to the embeddings; None for no rows.

    Args:
        rows: longest sequence.
        hidden_size: width of the residual stream.
        by_document: it may be read by the position within a document.
    """
    if rows is None:
        return None
    return (nn.Embedding if by_document else PositionTable)(rows, hidden_size)


def _build_layer(
    stack: StackSlice, backends: Backends, cross_attention: AttentionSlice | None, cross_backends: Backends | None
) -> Layer:
    normformer = stack.block == "normformer"
    cross = cross_attention is not None
    return Layer(
        block=stack.block,
        attention_norm=build_norm(stack),
        attention=_build_attention(stack, backends),
        attention_output_norm=build_norm(stack) if normformer else None,
        cross_attention_norm=build_norm(stack) if cross else None,
        cross_attention=_build_cross_attention(stack, cross_attention, cross_backends or {}) if cross else None,
        cross_attention_output_norm=build_norm(stack) if cross and normformer else None,
        mlp_norm=build_norm(stack),
        mlp=MLP(
            stack.hidden_size,
            stack.mlp.ffn_hidden_size,
            nonlinearity=stack.mlp.nonlinearity,
            gated=stack.mlp.gated,
            bias=stack.mlp.bias,
            dropout=stack.mlp.dropout,
            inner_norm=build_norm(stack, stack.mlp.ffn_hidden_size) if normformer else None,
        ),
        dropout=stack.hidden_dropout,
    )


def build_norm(stack: StackSlice, width: int | None = None) -> LayerNorm | RMSNorm:
    """A norm of the stack's kind, of the residual stream unless it has another width."""
    norm = stack.norm
    return NORMS[norm.kind](width or stack.hidden_size, norm.epsilon, zero_centered=norm.zero_centered)


def _build_attention(stack: StackSlice, backends: Backends) -> SelfAttention:
    attention = stack.attention
    return SelfAttention(
        stack.hidden_size,
        heads=attention.heads,
        groups=attention.groups,
        head_dim=attention.head_dim,
        scale=attention.scale,
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
        dropout=attention.dropout,
        causal=attention.causal,
        rotary_interleaved=stack.rotary.interleaved if stack.rotary else False,
        backends=backends,
        window=attention.window,
        softcap=attention.softcap,
        query_norm=build_norm(stack, attention.head_dim) if attention.qk_norm else None,
        key_norm=build_norm(stack, attention.head_dim) if attention.qk_norm else None,
        head_scale=attention.head_scale,
    )


def _build_cross_attention(stack: StackSlice, attention: AttentionSlice, backends: Backends) -> CrossAttention:
    return CrossAttention(
        stack.hidden_size,
        heads=attention.heads,
        groups=attention.groups,
        head_dim=attention.head_dim,
        scale=attention.scale,
        qkv_bias=attention.qkv_bias,
        output_bias=attention.output_bias,
        dropout=attention.dropout,
        backends=backends,
        softcap=attention.softcap,
        query_norm=build_norm(stack, attention.head_dim) if attention.qk_norm else None,
        key_norm=build_norm(stack, attention.head_dim) if attention.qk_norm else None,
        head_scale=attention.head_scale,
    )
