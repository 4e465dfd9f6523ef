"""Training cost of a transformer layer: weights, tensors saved for the backward pass, matmuls and traffic.

Sums over the parts of the layer, none of which is built except in a user's own block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import torch

from .config.dense_stack import AttentionSlice
from .config.memory import RecomputeModule
from .config.moe import MoESlice
from .config.stack import StackSlice
from .layer import build_layer
from .layers.cost import LayerMemory, PartMemory, SavedTensors, StackInputs, Weights
from .layers.cross_attention import cross_attention_memory, cross_attention_traffic, cross_attention_weights
from .layers.mlp import mlp_memory, mlp_traffic, mlp_weights
from .layers.norm import norm_parameters, norm_saved_bytes, norm_saves_input, norm_statistics_bytes
from .layers.self_attention import attention_traffic, attention_weights, self_attention_memory
from .moe.moe_layer import expert_rows, moe_memory, moe_traffic, moe_weights, runs_eager_experts
from .parallel.traffic import Collective, recomputed


def layer_weights(
    stack: StackSlice,
    cross: AttentionSlice | None = None,
    *,
    has_experts: bool = False,
    active: bool = False,
    expert_ranks: int = 1,
) -> Weights:
    """Return the weights of a layer with or without experts and cross-attention; others as in `moe_weights`."""
    mlp = _mlp_weights(stack, has_experts=has_experts, active=active, expert_ranks=expert_ranks)
    weights = attention_weights(stack.attention, stack) + mlp
    branches = 2
    if cross is not None:
        weights, branches = weights + cross_attention_weights(cross, stack), 3
    norms = branches * norm_parameters(stack.norm, stack.hidden_size)
    if stack.block == "normformer":  # also of the attentions' outputs, and inside the MLP
        norms += (branches - 1) * norm_parameters(stack.norm, stack.hidden_size)
        norms += norm_parameters(stack.norm, stack.mlp.ffn_hidden_size)
    if stack.is_own_block:
        norms += _own_parameters(replace(stack, num_layers=1, moe=None), cross)
    return weights + Weights(others=norms)


@cache
def _own_parameters(stack: StackSlice, cross: AttentionSlice | None) -> int:
    """Return how many parameters more than `pre_ln` the layers of a user's own block have, by building one."""
    with torch.device("meta"):
        layer = build_layer(stack, 0, {}, cross, None)
    return sum(each.numel() for each in layer.parameters()) - layer_weights(replace(stack, block="pre_ln"), cross).numel


def _mlp_weights(stack: StackSlice, *, has_experts: bool, active: bool = False, expert_ranks: int) -> Weights:
    if has_experts and stack.moe is not None:
        return moe_weights(stack, stack.moe, active=active, expert_ranks=expert_ranks)
    return mlp_weights(stack, stack.mlp.ffn_hidden_size)


def layer_memory(inputs: StackInputs, *, is_moe: bool, is_fp8: bool = False) -> LayerMemory:
    """Return memory and matmuls of a layer with or without experts, whose linear layers multiply in fp8 if `is_fp8`.

    Eager and compiled layers differ. In eager mode autograd saves what each operation saves: an RMSNorm in 16 bits
    saves its input and the normalized input in fp32. Compiled, the partitioner saves the inputs of matmuls and
    attention, the operands of residual additions, and little else: pointwise results are recomputed. The tests compare
    both with what torch really saves.
    """
    inputs = inputs.with_layer(is_fp8=is_fp8)
    stack, widths, moe = inputs.stack, inputs.widths, inputs.stack.moe if is_moe else None
    mlp = mlp_memory(inputs, stack.mlp.ffn_hidden_size) if moe is None else moe_memory(inputs, moe)
    mlp_part = _mlp_weights(stack, has_experts=is_moe, expert_ranks=inputs.mesh.expert)
    weights = layer_weights(stack, inputs.cross, has_experts=is_moe, expert_ranks=inputs.mesh.expert)
    own, cross = self_attention_memory(inputs), cross_attention_memory(inputs)
    attentions = (own,) if cross is None else (own, cross)
    mlp_saved, saved = [*mlp.saved], [*own.saved, *_stream_and_norms(inputs, moe), *(cross.saved if cross else ())]
    if widths.casts_weights:
        norms, linear = 2 * norm_parameters(stack.norm, stack.hidden_size), _linear_elements(weights, inputs)
        mlp_linear = _linear_elements(mlp_part, inputs)
        other = weights.numel - mlp_part.numel - norms - (linear - mlp_linear)
        saved.append(SavedTensors("weights", other * widths.compute))
        mlp_saved.append(
            SavedTensors("weights", (mlp_part.numel - mlp_linear) * widths.compute, "moe" if moe else None)
        )
    saves_linear_input = stack.block == "post_ln" and not inputs.saves_fp8
    keeps_boundary = inputs.compiled or _norm_saves_stream(inputs) or saves_linear_input
    residual = inputs.residual_elements * widths.residual
    # gradients of the layer's output and of its input; compiled, the second overwrites the first
    mlp_base = residual * (1 if inputs.compiled else 2)
    mlp_base += mlp_part.matrices[-1].elements * widths.weights if moe is None else 0
    attention_base = 2 * residual + weights.numel * widths.weights
    if inputs.residual_tokens < inputs.tokens:  # gathered: the input of a projection, and the gradient of its output
        gathered = 2 * inputs.outer_elements * widths.compute
        mlp_base, attention_base = mlp_base + gathered, attention_base + gathered
    return LayerMemory(
        inputs=inputs,
        weights=weights,
        mlp_weights=mlp_part,
        expert_rows=expert_rows(moe, inputs.residual_tokens, inputs.routed_tokens) if moe is not None else 0,
        saves_input=keeps_boundary,
        norm_input_bytes=_norm_input_bytes(inputs, keeps_boundary=keeps_boundary),
        mlp=PartMemory(_existing(mlp_saved), mlp_base + mlp.working, recompute_inputs=mlp.recompute_inputs),
        attention=PartMemory(
            _existing(saved),
            attention_base + max(each.working for each in attentions),
            attention_base + max(each.working_recomputed for each in attentions),
            sum(each.recompute_inputs for each in attentions),
        ),
    )


def _linear_elements(weights: Weights, inputs: StackInputs) -> int:
    """Return the elements of the weights that are cast to fp8 only."""
    return sum(each.numel for each in weights.matrices if inputs.is_in_fp8(each))


def _existing(saved: Iterable[SavedTensors]) -> tuple[SavedTensors, ...]:
    return tuple(each for each in saved if each.num_bytes)


def _norm_saves_stream(inputs: StackInputs) -> bool:
    """Return True if an eager norm saves the residual stream itself instead of an fp32 copy."""
    return norm_saves_input(inputs.stack.norm, inputs.widths.residual)


def _norm_input_bytes(inputs: StackInputs, *, keeps_boundary: bool) -> int:
    """Return the bytes of the residual stream saved, besides the layer's input, for each recomputed norm."""
    stack = inputs.stack
    if inputs.compiled and stack.block == "parallel_ln" and stack.norm.kind == "layernorm":
        return inputs.residual_elements * 4  # the compiler shares one normalized fp32 input among all norms
    return 0 if keeps_boundary else inputs.residual_elements * inputs.widths.residual


def _stream_and_norms(inputs: StackInputs, moe: MoESlice | None) -> list[SavedTensors]:
    """Return the tensors saved of the residual stream and of norms."""
    stack, e, s = inputs.stack, inputs.widths.compute, inputs.widths.residual
    elements, keeps_stream = inputs.residual_elements, _norm_saves_stream(inputs)
    branches = inputs.num_branches
    # inputs of the first projection of each sublayer; with post-LN the residual stream, of which the layer's input
    # is counted elsewhere
    projections = [inputs.saves_norm_output("attention_qkv")] * (branches - 1)
    projections += [inputs.saves_norm_output("mlp_fc1")] * (moe is None)
    normed = projections.count(True) - (stack.block == "post_ln")
    module: RecomputeModule | None = "norm" if stack.block != "post_ln" else None
    if inputs.saves_fp8:  # casts, which the compiler does not repeat
        casts = projections.count(True) * inputs.saved_norm_bytes
        saved = [SavedTensors("norm", casts, None if inputs.compiled else module)]
    else:
        saved = [SavedTensors("norm", normed * elements * e, module)]
    # router and experts save one input; experts that gather rows save those rows instead
    gathers = moe is not None and (runs_eager_experts(inputs, moe) or inputs.experts_in_fp8)
    if moe is not None and (not gathers or (moe.shared_ffn_hidden_size and not inputs.saves_fp8)):
        saved.append(SavedTensors("norm", elements * e, module, "moe"))
    norms = branches + (branches if stack.block == "normformer" else 0)
    saved.append(SavedTensors("norm", norms * norm_statistics_bytes(stack.norm, inputs.residual_tokens)))
    sequential = stack.block != "parallel_ln"  # in a parallel block all sublayers read the layer's input
    if inputs.compiled and sequential:
        # the output of the first sublayer; the residual stream before each further one
        saved.append(SavedTensors("stream", elements * e + (branches - 2) * elements * s))
        saved += [SavedTensors("stream", elements * s)] if stack.block == "post_ln" and not inputs.saves_fp8 else []
    elif not inputs.compiled:
        streams = branches if stack.block == "post_ln" else (branches - 1) * sequential
        saved += [SavedTensors("stream", streams * elements * s)] if keeps_stream else []
        extra, moe_norms = norm_saved_bytes(stack.norm, elements, s), int(moe is not None)
        saved += [
            SavedTensors("norm", (branches - moe_norms) * extra, module),
            SavedTensors("norm", moe_norms * extra, module, "moe"),
        ]
        if stack.block == "normformer":
            of_branch = norm_saved_bytes(stack.norm, elements, inputs.widths.branch)
            keeps = norm_saves_input(stack.norm, inputs.widths.branch)
            saved.append(SavedTensors("norm", (branches - 1) * (of_branch + keeps * elements * e)))
    return saved


def layer_traffic(
    inputs: StackInputs,
    *,
    is_moe: bool,
    is_fp8: bool = False,
    recomputes: frozenset[RecomputeModule] = frozenset(),
    recomputed_layer: bool = False,
    ends_recompute: bool = False,
) -> tuple[Collective, ...]:
    """Return the traffic of a layer with or without experts in the forward and backward pass of a micro batch.

    Args:
        inputs: inputs of the stack.
        is_moe: it has experts.
        is_fp8: its linear layers multiply in fp8.
        recomputes: modules that the backward pass recomputes.
        recomputed_layer: it recomputes the whole layer.
        ends_recompute: it is the last of the layers that are recomputed together.
    """
    inputs, moe = inputs.with_layer(is_fp8=is_fp8), inputs.stack.moe if is_moe else None
    mlp = mlp_traffic(inputs) if moe is None else moe_traffic(inputs, moe)
    attentions = attention_traffic(inputs), cross_attention_traffic(inputs)
    found = (*attentions[0], *attentions[1], *mlp)
    # a recomputation ends at the last tensor that is saved, before the output of an MLP or of experts is reduced
    if moe is None or inputs.mesh.expert == 1:
        reduces_last = inputs.mesh.tensor > 1 and (moe is None or bool(moe.shared_ffn_hidden_size))
    else:
        reduces_last = moe.dispatcher == "allgather"
    if recomputed_layer:
        reads_output = bool(inputs.stack.hidden_dropout) or inputs.stack.block == "post_ln"
        again = recomputed(found)
        return found + (again[:-1] if ends_recompute and reduces_last and not reads_output else again)
    again = recomputed(mlp) if moe is not None and "moe" in recomputes else ()
    again = again[:-1] if again and reduces_last else again
    if "norm" in recomputes and not inputs.compiled:
        # a projection is run again with the norm before it, up to what it saves: after its tokens have been gathered
        normed = attentions if moe is not None else (*attentions, mlp)
        again += tuple(each for part in normed for each in recomputed(part) if each.kind == "all-gather")
    return found + again
