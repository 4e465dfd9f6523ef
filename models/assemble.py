"""Build the modules of a model from its slice, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..kernels.attention.backends.registry import AttentionFunction
from ..kernels.attention.dispatch import BackendSelection
from .bert import BERT
from .config.batch_shape import BatchSpec
from .config.bert import BertSlice
from .config.families import FamilySlice
from .config.gpt import GPTSlice
from .config.moe import MoESlice
from .config.stack import AttentionSlice, StackSlice
from .config.t5 import T5Slice, T5StackSlice
from .dispatch.attention_calls import CallKind
from .gpt import GPT
from .layer import Layer
from .layers.attention import AttentionArguments
from .layers.attention_bias import ALiBi, CrossRelativeBias, Kerple, RelativeBias, Sandwich, ScoreBiasModule
from .layers.cross_attention import CrossAttention
from .layers.mlp import MLP
from .layers.norm import NORMS, LayerNorm, RMSNorm
from .layers.position_embeddings import RotaryEmbedding, SamplePositionEmbedding, XPosEmbedding
from .layers.self_attention import SelfAttention
from .lm_head import PositionEmbedding
from .moe.experts import Experts
from .moe.moe_layer import MoE
from .moe.router import Router
from .stack import Stack
from .t5 import T5

Backends = Mapping[CallKind, AttentionFunction]
LanguageModel = GPT | T5 | BERT
_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def assemble(
    model: FamilySlice,
    batch_spec: BatchSpec,
    decisions: Mapping[str, BackendSelection],
    backends: Mapping[str, Backends],
) -> LanguageModel:
    """Build a model on the meta device, without allocating memory.

    Args:
        model: slice of the model.
        batch_spec: shape of the samples of training and evaluation.
        decisions: attention backends by label (`PlannedAttention.label`).
        backends: attention function for each kind of call, by name of the attention (`PlannedAttention.name`).
    """
    with torch.device("meta"):
        match model:
            case T5Slice():
                return _assemble_t5(model, batch_spec, decisions, backends)
            case BertSlice():
                return _assemble_bert(model, batch_spec, decisions, backends.get("", {}))
            case _:
                return _assemble_gpt(model, batch_spec, decisions, backends.get("", {}))


def _assemble_gpt(gpt: GPTSlice, form: BatchSpec, decisions: Mapping[str, BackendSelection], backends: Backends) -> GPT:
    hidden_size = gpt.stack.hidden_size
    return GPT(
        token_embedding=nn.Embedding(gpt.padded_vocab_size, hidden_size),
        position_embedding=_build_position_table(
            gpt.learned_positions, hidden_size, by_document=gpt.positions_by_document
        ),
        decoder=_build_stack(gpt.stack, backends),
        head=None if gpt.tied else nn.Linear(hidden_size, gpt.padded_vocab_size, bias=False),
        vocab_size=gpt.vocab_size,
        seq_length=form.seq_length,
        max_positions=gpt.max_positions,
        dropout=gpt.embedding_dropout,
        label_smoothing=gpt.label_smoothing,
        embedding_scale=gpt.embedding_scale,
        logits_softcap=gpt.logits_softcap,
        reset_position_ids=form.reset_position_ids,
        reset_attention_mask=form.packed,
        attention_decisions=decisions,
    )


def _assemble_t5(
    t5: T5Slice, form: BatchSpec, decisions: Mapping[str, BackendSelection], backends: Mapping[str, Backends]
) -> T5:
    hidden_size = t5.encoder.stack.hidden_size
    cross = t5.cross_attention

    def table(part: T5StackSlice) -> PositionEmbedding | None:
        return _build_position_table(part.learned_positions, hidden_size, by_document=part.positions_by_document)

    return T5(
        token_embedding=nn.Embedding(t5.padded_vocab_size, hidden_size),
        decoder_token_embedding=None if t5.shared_embeddings else nn.Embedding(t5.padded_vocab_size, hidden_size),
        encoder_position_embedding=table(t5.encoder),
        decoder_position_embedding=table(t5.decoder),
        encoder=_build_stack(t5.encoder.stack, backends.get("encoder", {})),
        decoder=_build_stack(t5.decoder.stack, backends.get("decoder", {}), cross, backends.get("cross", {})),
        cross_positions=None
        if cross.position_bias is None
        else CrossRelativeBias(
            cross.heads, buckets=cross.position_bias.buckets, max_distance=cross.position_bias.max_distance
        ),
        head=None if t5.tied else nn.Linear(hidden_size, t5.padded_vocab_size, bias=False),
        head_bias=t5.head_bias,
        output_scale=t5.output_scale,
        vocab_size=t5.vocab_size,
        batch_spec=form,
        max_positions=(t5.encoder.max_positions, t5.decoder.max_positions),
        dropouts=(t5.encoder.embedding_dropout, t5.decoder.embedding_dropout),
        label_smoothing=t5.label_smoothing,
        attention_decisions=decisions,
    )


def _assemble_bert(
    bert: BertSlice, form: BatchSpec, decisions: Mapping[str, BackendSelection], backends: Backends
) -> BERT:
    hidden_size, stack = bert.stack.hidden_size, bert.stack
    return BERT(
        token_embedding=nn.Embedding(bert.padded_vocab_size, hidden_size),
        position_embedding=_build_position_table(
            bert.learned_positions, hidden_size, by_document=bert.positions_by_document
        ),
        token_type_embedding=nn.Embedding(bert.token_types, hidden_size) if bert.token_types else None,
        embedding_norm=_build_norm(stack) if bert.embedding_norm else None,
        encoder=_build_stack(stack, backends),
        transform=nn.Linear(hidden_size, hidden_size) if bert.mlm_transform else None,
        transform_norm=_build_norm(stack) if bert.mlm_transform else None,
        head=None if bert.tied else nn.Linear(hidden_size, bert.padded_vocab_size, bias=False),
        head_bias=bert.head_bias,
        vocab_size=bert.vocab_size,
        batch_spec=form,
        max_positions=bert.max_positions,
        dropout=bert.embedding_dropout,
        label_smoothing=bert.label_smoothing,
        attention_decisions=decisions,
    )


# ---------------------------------------------------------------- stacks


def _build_stack(
    stack: StackSlice,
    backends: Backends,
    cross_attention: AttentionSlice | None = None,
    cross_backends: Backends | None = None,
) -> Stack:
    """Build a stack of layers, which differ only in having an MLP or experts.

    Args:
        stack: slice of the stack.
        backends: self-attention function for each kind of call.
        cross_attention: slice of the cross-attention, None without.
        cross_backends: cross-attention function for each kind of call.
    """
    layers = (_build_layer(stack, n, backends, cross_attention, cross_backends) for n in range(stack.num_layers))
    return Stack(
        layers,
        final_norm=None if stack.block == "post_ln" else _build_norm(stack),
        rotary=_build_rotary(stack),
        score_positions=_build_score_positions(stack),
    )


def _build_rotary(stack: StackSlice) -> RotaryEmbedding | XPosEmbedding | None:
    rotary = stack.rotary
    if rotary is None:
        return None
    if rotary.xpos:
        return XPosEmbedding(rotary.dim, rotary.positions)
    return RotaryEmbedding(
        rotary.dim,
        rotary.positions,
        base=rotary.base,
        position_scale=rotary.position_scale,
        scaling=rotary.scaling,
    )


def _build_score_positions(stack: StackSlice) -> ScoreBiasModule | None:
    attention = stack.attention
    distance = attention.position_bias
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


def _build_position_table(rows: int | None, hidden_size: int, *, by_document: bool) -> PositionEmbedding | None:
    """Build a learned position embedding, or return None without one.

    Args:
        rows: maximal sequence length, or None.
        hidden_size: width of the residual stream.
        by_document: index by the position within a document instead of within a sample.
    """
    if rows is None:
        return None
    return (nn.Embedding if by_document else SamplePositionEmbedding)(rows, hidden_size)


def _build_layer(
    stack: StackSlice,
    number: int,
    backends: Backends,
    cross_attention: AttentionSlice | None,
    cross_backends: Backends | None,
) -> Layer:
    """Build layer `number` of a stack, counted from 0."""
    normformer = stack.block == "normformer"
    cross = None
    if cross_attention is not None:
        arguments = _attention_arguments(stack, cross_attention, cross_backends or {})
        cross = CrossAttention(stack.hidden_size, **arguments)
    return Layer(
        block=stack.block,
        attention_norm=_build_norm(stack),
        attention=_build_attention(stack, backends),
        attention_output_norm=_build_norm(stack) if normformer else None,
        cross_attention_norm=None if cross is None else _build_norm(stack),
        cross_attention=cross,
        cross_attention_output_norm=_build_norm(stack) if cross is not None and normformer else None,
        mlp_norm=_build_norm(stack),
        mlp=_build_mlp(stack) if stack.moe is None or not stack.moe.layers[number] else _build_moe(stack, stack.moe),
        dropout=stack.hidden_dropout,
    )


def _build_mlp(stack: StackSlice, ffn_hidden_size: int | None = None) -> MLP:
    """Build the MLP of a layer, or one of another width, such as a shared expert."""
    mlp = stack.mlp
    width = ffn_hidden_size or mlp.ffn_hidden_size
    return MLP(
        stack.hidden_size,
        width,
        nonlinearity=mlp.nonlinearity,
        gated=mlp.gated,
        bias=mlp.bias,
        dropout=mlp.dropout,
        inner_norm=_build_norm(stack, width) if stack.block == "normformer" else None,
    )


def _build_moe(stack: StackSlice, moe: MoESlice) -> MoE:
    mlp = stack.mlp
    router = Router(
        stack.hidden_size,
        moe.experts,
        topk=moe.topk,
        balancing=moe.balancing,
        score=moe.score,
        pre_softmax=moe.pre_softmax,
        topk_scaling=moe.topk_scaling,
        num_groups=moe.num_groups,
        group_topk=moe.group_topk,
        aux_loss=moe.aux_loss,
        z_loss=moe.z_loss,
        jitter=moe.jitter,
        capacity_factor=moe.capacity_factor,
        drop_policy=moe.drop_policy,
        dtype=_ROUTER_DTYPES[moe.router_dtype],
    )
    experts = Experts(
        moe.experts,
        stack.hidden_size,
        moe.ffn_hidden_size,
        nonlinearity=mlp.nonlinearity,
        gated=mlp.gated,
        bias=mlp.bias,
        dropout=moe.dropout,
        implementation="auto" if moe.implementation == "grouped" else "sequential",
        pad_to_capacity=moe.pad_to_capacity,
    )
    shared = _build_mlp(stack, moe.shared_ffn_hidden_size) if moe.shared_ffn_hidden_size else None
    return MoE(router, experts, shared=shared, expert_bias=moe.bias_update_rate is not None)


def _build_norm(stack: StackSlice, width: int | None = None) -> LayerNorm | RMSNorm:
    """Build a norm of the stack's kind; its width is that of the residual stream unless given."""
    norm = stack.norm
    return NORMS[norm.kind](width or stack.hidden_size, norm.epsilon, zero_centered=norm.zero_centered)


def _build_attention(stack: StackSlice, backends: Backends) -> SelfAttention:
    attention = stack.attention
    return SelfAttention(
        stack.hidden_size,
        causal=attention.causal,
        rotary_interleaved=stack.rotary.interleaved if stack.rotary else False,
        window=attention.window,
        **_attention_arguments(stack, attention, backends),
    )


def _attention_arguments(stack: StackSlice, attention: AttentionSlice, backends: Backends) -> AttentionArguments:
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
        query_norm=_build_norm(stack, attention.head_dim) if attention.qk_norm else None,
        key_norm=_build_norm(stack, attention.head_dim) if attention.qk_norm else None,
        head_scale=attention.head_scale,
    )
