"""Tensor parallelism: the slices of a rank's model, and the plan that splits a model built from them.

The heads of each attention, the channels of each MLP and the vocabulary are split over the ranks; a rank's model is an
ordinary one with fewer of them, in which the linear layers at the cuts communicate. With sequence parallelism the
residual stream between them is sharded over tokens (arXiv 1909.08053, 2205.05198).
Experts are not split, shared experts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from .config.dense_stack import AttentionSlice
from .config.families import FamilySlice
from .config.stack import StackSlice
from .config.t5 import T5Slice
from .language_model import BaseLanguageModel
from .layer import Layer
from .layers.attention_bias import OwnBias, ScoreBiasModule
from .layers.cross_attention import CrossAttention
from .layers.mlp import MLP, mlp_weights
from .layers.norm import LayerNorm, RMSNorm, norm_parameters
from .layers.self_attention import SelfAttention
from .moe.experts import Experts
from .moe.router import Router
from .parallel.collectives import TensorParallel
from .parallel.linear import ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding
from .parallel.norm import ChannelParallelNorm
from .parallel.partition import Partition, Section, even_partition, set_partitions
from .peft.adapter import BottleneckAdapter
from .peft.lora_parallel import LoRAColumnParallelLinear, LoRARowParallelLinear
from .stack import Stack
from .t5 import T5


def rank_slice(model: FamilySlice, ranks: int) -> FamilySlice:
    """Return the slice of one rank's model: its heads, key groups, channels and rows of the vocabulary.

    Raises:
        ValueError: they do not split evenly over the ranks.
    """
    if ranks == 1:
        return model
    vocabulary = _share(model.padded_vocab_size, ranks)
    if not isinstance(model, T5Slice):
        return replace(model, stack=_rank_stack(model.stack, ranks), padded_vocab_size=vocabulary)
    return replace(
        model,
        encoder=replace(model.encoder, stack=_rank_stack(model.encoder.stack, ranks)),
        decoder=replace(model.decoder, stack=_rank_stack(model.decoder.stack, ranks)),
        cross_attention=_rank_attention(model.cross_attention, ranks),
        padded_vocab_size=vocabulary,
    )


def _rank_stack(stack: StackSlice, ranks: int) -> StackSlice:
    moe = stack.moe
    if moe is not None and moe.shared_ffn_hidden_size:  # experts are whole on the ranks that have them
        moe = replace(moe, shared_ffn_hidden_size=_share(moe.shared_ffn_hidden_size, ranks))
    return replace(
        stack,
        moe=moe,
        attention=_rank_attention(stack.attention, ranks),
        mlp=replace(stack.mlp, ffn_hidden_size=_share(stack.mlp.ffn_hidden_size, ranks)),
    )


def _rank_attention(attention: AttentionSlice, ranks: int) -> AttentionSlice:
    groups = _share(attention.groups, group_parts(attention.groups, ranks))
    return replace(attention, heads=_share(attention.heads, ranks), groups=groups, split=True)


def _share(size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"{size} must be a multiple of the {ranks} tensor-parallel ranks")
    return size // ranks


def group_parts(groups: int, ranks: int) -> int:
    """Return the number of distinct parts of the key and value heads: fewer than ranks if several share a head."""
    if ranks > groups and ranks % groups:
        raise ValueError(f"the {ranks} tensor-parallel ranks must be a multiple of the {groups} key and value heads")
    return min(groups, ranks)


# ---------------------------------------------------------------- plan


def apply_tensor_parallel(model: BaseLanguageModel, full: FamilySlice, ranks: TensorParallel) -> None:
    """Split a model, built from `rank_slice` on the meta device, over the ranks, in place.

    Args:
        model: model of this rank's shapes; its modules get `partitions` (`partitions_of`).
        full: slice of the whole model.
        ranks: the tensor-parallel ranks.
    """
    model.tensor_parallel = ranks
    vocabulary = ranks.part(even_partition(0, ranks.size, full.padded_vocab_size))
    set_partitions(model, {} if model.head_bias is None else {"head_bias": vocabulary}, default=ranks.part(None))
    if model.head is not None:
        set_partitions(model.head, {"weight": vocabulary})
    model.token_embedding = VocabularyParallelEmbedding(model.token_embedding, ranks)
    if isinstance(model, T5) and isinstance(full, T5Slice):
        if model.decoder_token_embedding is not None:
            model.decoder_token_embedding = VocabularyParallelEmbedding(model.decoder_token_embedding, ranks)
        _split_stack(model.encoder, full.encoder.stack, None, ranks)
        _split_stack(model.decoder, full.decoder.stack, full.cross_attention, ranks)
        if model.cross_positions is not None:
            _split_positions(model.cross_positions, full.cross_attention.heads, ranks)
    else:
        _split_stack(model.stacks[0], full.stacks[0], None, ranks)


def _split_stack(stack: Stack, full: StackSlice, cross: AttentionSlice | None, ranks: TensorParallel) -> None:
    stack.tensor_parallel = ranks
    for module in stack.layers:
        layer = cast(Layer, module)
        _split_attention(layer.attention, full.attention, ranks)
        if layer.cross_attention is not None and cross is not None:
            _split_attention(layer.cross_attention, cross, ranks)
        if isinstance(layer.mlp, MLP):
            _split_mlp(layer.mlp, full.mlp.ffn_hidden_size, ranks)
            continue
        layer.mlp.router.tensor_parallel = ranks
        if layer.mlp.shared is not None:
            assert full.moe is not None
            assert full.moe.shared_ffn_hidden_size is not None
            _split_mlp(layer.mlp.shared, full.moe.shared_ffn_hidden_size, ranks)
    if stack.score_positions is not None:
        _split_positions(stack.score_positions, full.attention.heads, ranks)


def _split_positions(positions: ScoreBiasModule, heads: int, ranks: TensorParallel) -> None:
    positions.select_heads(ranks.rank * heads // ranks.size, heads)
    if isinstance(positions, OwnBias):  # every rank has all of it
        return
    split = {  # a table (buckets, heads), or one number for each head
        name: ranks.part(even_partition(parameter.ndim - 1, ranks.size, heads))
        for name, parameter in positions.named_parameters()
    }
    set_partitions(positions, split)


def _split_attention(attention: SelfAttention | CrossAttention, full: AttentionSlice, ranks: TensorParallel) -> None:
    queries = Section(full.heads * full.head_dim, ranks.size)
    keys = Section(full.groups * full.head_dim, group_parts(full.groups, ranks.size))
    if isinstance(attention, SelfAttention):
        attention.qkv = ColumnParallelLinear(attention.qkv, ranks, Partition(0, (queries, keys, keys)))
    else:
        attention.query = ColumnParallelLinear(attention.query, ranks, Partition(0, (queries,)))
        # every rank has the whole output of the encoder
        attention.kv = ColumnParallelLinear(attention.kv, ranks, Partition(0, (keys, keys)), gathers=False)
    attention.output = RowParallelLinear(attention.output, ranks)
    attention.first_head = ranks.rank * full.heads // ranks.size
    of_heads = [name for name in ("head_scale", "sinks") if getattr(attention, name) is not None]
    if of_heads:
        set_partitions(attention, dict.fromkeys(of_heads, ranks.part(even_partition(0, ranks.size, full.heads))))


def _split_mlp(mlp: MLP, width: int, ranks: TensorParallel) -> None:
    rows = even_partition(0, ranks.size, *[width] * (2 if mlp.gated else 1))
    mlp.first_channel = ranks.rank * width // ranks.size
    mlp.up, mlp.down = ColumnParallelLinear(mlp.up, ranks, rows), RowParallelLinear(mlp.down, ranks)
    norm = mlp.inner_norm
    if isinstance(norm, LayerNorm | RMSNorm):
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        settings = {"epsilon": norm.epsilon, "zero_centered": norm.zero_centered}
        mlp.inner_norm = ChannelParallelNorm(norm.weight, bias, **settings, ranks=ranks)


# ---------------------------------------------------------------- gradients


def partial_gradients(model: nn.Module, ranks: TensorParallel) -> set[str]:
    """Return the names of the replicated parameters whose gradients the ranks must sum.

    These are norms of heads, of which each rank has its own, position biases of users' own, the replicated matrices of
    LoRA, and with sequence parallelism the norms of the residual stream, the biases added to it, its adapters, routers,
    and experts that every rank has, since each rank sees its own tokens only; other experts are no tensor-parallel
    parameters.
    """
    found: set[str] = set()
    for prefix, stack in model.named_children():
        if not isinstance(stack, Stack):
            continue
        for name, module in stack.named_modules(prefix=prefix):
            of_heads = name.endswith((".query_norm", ".key_norm"))
            of_tokens = isinstance(module, LayerNorm | RMSNorm | BottleneckAdapter) and ranks.sequence
            if of_tokens or of_heads:
                found |= {f"{name}.{part}" for part, _ in module.named_parameters(recurse=False)}
            if isinstance(module, RowParallelLinear) and module.bias is not None and ranks.sequence:
                found.add(f"{name}.bias")
            if ranks.sequence and (isinstance(module, Router) or (isinstance(module, Experts) and not module.ranks)):
                found |= {f"{name}.{part}" for part, _ in module.named_parameters(recurse=False)}
            if isinstance(module, OwnBias):
                found |= {f"{name}.{part}" for part, _ in module.named_parameters()}
            if isinstance(module, LoRAColumnParallelLinear | LoRARowParallelLinear):
                found |= {f"{name}.{part}" for part in module.partial_gradients}
    return found


def count_partial_gradients(model: FamilySlice, *, sequence: bool, expert_ranks: int = 1) -> int:
    """Count the elements of the parameters of `partial_gradients`, given the slice of a rank's model.

    With sequence parallelism these include routers, and experts that all ranks have (`expert_ranks` 1).
    """
    crosses = (None, model.cross_attention) if isinstance(model, T5Slice) else (None,)
    pairs = zip(model.stacks, crosses, strict=True)
    count = sum(_count_partial(stack, cross, sequence=sequence) for stack, cross in pairs)
    return count + (sum(_count_partial_experts(stack, expert_ranks) for stack in model.stacks) if sequence else 0)


def _count_partial_experts(stack: StackSlice, expert_ranks: int) -> int:
    """Count what layers with experts have more than those with the biases of a dense MLP."""
    moe = stack.moe
    if moe is None:
        return 0
    router = moe.experts * stack.hidden_size
    experts = mlp_weights(stack, moe.ffn_hidden_size, moe.experts, experts=True).numel if expert_ranks == 1 else 0
    bias = 0 if moe.shared_ffn_hidden_size else stack.hidden_size * stack.mlp.bias
    return sum(moe.layers) * (router + experts - bias)


def _count_partial(stack: StackSlice, cross: AttentionSlice | None, *, sequence: bool) -> int:
    attentions = [stack.attention, *([] if cross is None else [cross])]
    count = stack.num_layers * sum(
        2 * norm_parameters(stack.norm, each.head_dim) for each in attentions if each.qk_norm
    )
    bias = stack.attention.position_bias
    count += 0 if bias is None else bias.parameters
    if not sequence:
        return count
    norms = stack.num_layers * (len(attentions) + 1) + (stack.ends and stack.block != "post_ln")
    biases = sum(each.output_bias for each in attentions) + stack.mlp.bias
    return (
        count + norms * norm_parameters(stack.norm, stack.hidden_size) + stack.num_layers * biases * stack.hidden_size
    )


def reduce_partial_gradients(gradients: Mapping[str, Tensor], partial: Set[str], ranks: TensorParallel) -> None:
    """Sum the gradients of `partial_gradients` over the ranks, in place, in one message for each dtype.

    Args:
        gradients: by name of the parameter; others are left alone.
        partial: names of the parameters.
        ranks: the tensor-parallel ranks.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for name in sorted(partial & gradients.keys()):
        by_dtype.setdefault(gradients[name].dtype, []).append(gradients[name])
    for found in by_dtype.values():
        total = ranks.sum(torch.cat([gradient.flatten() for gradient in found]))
        for gradient, part in zip(found, total.split([gradient.numel() for gradient in found]), strict=True):
            gradient.copy_(part.view_as(gradient))
