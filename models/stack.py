"""Transformer layer, and a stack of layers with its final norm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.attention.packed_sequences import PackedSequences
from .config.memory import RecomputeModule
from .config.moe import MoESlice
from .config.stack import AttentionSlice, StackSlice
from .dispatch.attention_calls import CallKind
from .kv_cache import CrossAttentionCache, LayerKVCache
from .layers.attention_bias import ScoreBias, ScoreBiasModule, position_bias_parameters
from .layers.compiling import configure_dynamo
from .layers.context import LayerContext, Memory
from .layers.cost import LayerMemory, PartMemory, SavedTensors, StackInputs, Weights
from .layers.cross_attention import CrossAttention, cross_attention_memory, cross_attention_weights
from .layers.fused_linear import can_skip_norm_output
from .layers.mlp import MLP, mlp_memory, mlp_weights
from .layers.norm import (
    BranchInput,
    LayerNorm,
    RMSNorm,
    norm_parameters,
    norm_saved_bytes,
    norm_saves_input,
    norm_statistics_bytes,
)
from .layers.position_embeddings import RotaryEmbedding, XPosEmbedding
from .layers.self_attention import SelfAttention, attention_weights, self_attention_memory
from .memory.offload_activations import ActivationOffload
from .memory.offload_weights import WeightOffload
from .memory.recompute import RecomputableModule, run_with_recompute, should_recompute
from .moe.moe_layer import MoE, expert_rows, moe_memory, moe_weights, runs_eager_experts

BlockType = Literal["pre_ln", "post_ln", "normformer", "parallel_ln"]


class Layer(RecomputableModule):
    """Transformer layer: residual branches of self-attention, optional cross-attention, and MLP or MoE.

    Recomputed: everything but the layer input.

    With the residual stream x and a branch f: `pre_ln`: x + f(norm(x)) (arXiv 2002.04745). `post_ln`: norm(x + f(x))
    (arXiv 1706.03762). `normformer`: pre-norm, with norms after each attention and inside the MLP (arXiv 2110.09456).
    `parallel_ln`: every branch reads the layer input x, x + attention(norm(x)) + mlp(norm(x)) (GPT-NeoX,
    arXiv 2204.06745).

    Args:
        attention_norm: norm of the self-attention branch.
        attention: self-attention.
        cross_attention_norm: norm of the cross-attention branch, None without one.
        cross_attention: attention over the encoder output, None in a stack without it.
        mlp_norm: norm of the MLP branch.
        mlp: dense feed-forward, or a mixture of experts.
        dropout: dropout of each branch output before the residual add, in training.
        block: placement of the norms.
        attention_output_norm: norm of the self-attention output, for `normformer`.
        cross_attention_output_norm: norm of the cross-attention output, for `normformer`.

    Attributes:
        attention_adapter: bottleneck adapter on the self-attention output (`peft.bottleneck`), or None.
        mlp_adapter: bottleneck adapter on the MLP output, or None.
    """

    def __init__(
        self,
        *,
        attention_norm: LayerNorm | RMSNorm,
        attention: SelfAttention,
        mlp_norm: LayerNorm | RMSNorm,
        mlp: MLP | MoE,
        dropout: float,
        cross_attention_norm: LayerNorm | RMSNorm | None = None,
        cross_attention: CrossAttention | None = None,
        block: BlockType = "pre_ln",
        attention_output_norm: LayerNorm | RMSNorm | None = None,
        cross_attention_output_norm: LayerNorm | RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.block: BlockType = block
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_output_norm = attention_output_norm
        self.cross_attention_norm = cross_attention_norm
        self.cross_attention = cross_attention
        self.cross_attention_output_norm = cross_attention_output_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.attention_adapter: nn.Module | None = None
        self.mlp_adapter: nn.Module | None = None
        self.dropout = dropout
        self.uses_rng = dropout > 0

    def forward(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        """Run the layer without updating its buffers, so that it can be recomputed.

        Args:
            hidden: (batch, tokens, hidden_size).
            context: all other inputs.

        Returns:
            The new residual stream (batch, tokens, hidden_size), and the router statistics for `update_statistics`.
        """
        if self.is_recomputed:
            return run_with_recompute(self._run, self.preserve_rng_state, hidden, context)
        return self._run(hidden, context)

    def update_statistics(self, sums: Tensor | None) -> None:
        """Accumulate router statistics; to be called once per forward, which may itself run twice."""
        if sums is not None and self.training and isinstance(self.mlp, MoE):
            self.mlp.update_statistics(sums)

    def _run(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, Tensor | None]:
        layer_input = hidden
        # The residual add is fused into the output projection if no dropout, norm or adapter comes in between.
        fusable = self.block != "post_ln" and not (self.training and self.dropout)
        read = self._branch_input(self.attention_norm, hidden, layer_input, self.attention.qkv)
        fused = fusable and self.attention_adapter is None and self.attention_output_norm is None
        residual = read.residual if fused else None
        output = self.attention(read.hidden, context, read.norm, residual)
        if self.attention_adapter is not None:
            output = self.attention_adapter(output)
        output_norm = self.attention_output_norm
        hidden = output if fused else self._add_residual(read.residual, output, self.attention_norm, output_norm)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            read = self._branch_input(self.cross_attention_norm, hidden, layer_input, self.cross_attention.query)
            output_norm = self.cross_attention_output_norm
            fused = fusable and output_norm is None
            output = self.cross_attention(read.hidden, context, read.norm, read.residual if fused else None)
            norm = self.cross_attention_norm
            hidden = output if fused else self._add_residual(read.residual, output, norm, output_norm)
        sums = None
        fused = fusable and self.mlp_adapter is None
        if isinstance(self.mlp, MoE):
            read = self._branch_input(
                self.mlp_norm, hidden, layer_input, None, has_several_readers=not self.mlp.recompute
            )
            output, sums = self.mlp.forward_with_statistics(
                read.hidden,
                context.padding if context.routed is None else context.routed,
                read.norm,
                use_capacity=context.kind != "generation",
                router_input=read.second_hidden,
                residual=read.residual if fused else None,
            )
        else:
            read = self._branch_input(self.mlp_norm, hidden, layer_input, self.mlp.up)
            output = self.mlp(read.hidden, read.norm, read.residual if fused else None)
        if fused:
            return output, sums
        if self.mlp_adapter is not None:
            output = self.mlp_adapter(output)
        return self._add_residual(read.residual, output, self.mlp_norm), sums

    def _branch_input(
        self,
        norm: LayerNorm | RMSNorm,
        hidden: Tensor,
        layer_input: Tensor,
        projection: nn.Linear | None,
        *,
        has_several_readers: bool = False,
    ) -> BranchInput:
        """Return the residual stream and the input of a branch, normed here or by the branch itself.

        Args:
            norm: norm of the branch.
            hidden: residual stream.
            layer_input: residual stream at the start of the layer.
            projection: the only reader of the norm output; None if there are several.
            has_several_readers: several operations of the branch save the norm output, so recomputing it saves nothing.
        """
        if self.block == "post_ln":
            return BranchInput(hidden, hidden)
        source = layer_input if self.block == "parallel_ln" else hidden
        skips_output = projection is not None and can_skip_norm_output(projection, norm)
        if (norm.recompute or skips_output) and not has_several_readers and should_recompute(self):
            return BranchInput(hidden, source, norm=norm)
        # The fused norm saves the residual stream. The layer input is saved anyway; a sum would cost extra memory if
        # its summands are saved (other block types) or if one of them is narrower (autocast).
        is_saved = hidden is layer_input or (
            self.block == "pre_ln" and not torch.is_autocast_enabled(hidden.device.type)
        )
        if isinstance(norm, RMSNorm) and is_saved:
            return norm.forward_with_residual(hidden, has_several_readers)
        return BranchInput(hidden, norm(source))

    def _add_residual(
        self,
        hidden: Tensor,
        output: Tensor,
        norm: LayerNorm | RMSNorm,
        output_norm: LayerNorm | RMSNorm | None = None,
    ) -> Tensor:
        """Add a branch output to the residual stream, with its output norm, dropout and post-norm."""
        if output_norm is not None:
            output = output_norm(output)
        if self.training and self.dropout:
            output = F.dropout(output, self.dropout)
        hidden = hidden + output
        return norm(hidden) if self.block == "post_ln" else hidden


class Stack(RecomputableModule):
    """Sequence of layers with shared position modules and a final norm.

    Recomputed: everything but the input of each chunk of `recompute_chunk` layers.

    Args:
        layers: the layers, first to last.
        final_norm: norm of the last layer's output; None if the layers end with one (`post_ln`).
        rotary: rotary embedding shared by the layers, or None.
        score_positions: position module that biases attention scores, shared by the layers, or None.

    Attributes:
        recompute_chunk: number of layers that are recomputed together.
        activation_offload: keeps the saved tensors of the first layers in host memory, or None.
        weight_offload: keeps the weights of the first layers in host memory between uses, or None.
    """

    recompute_chunk: int = 1
    activation_offload: ActivationOffload | None = None
    weight_offload: WeightOffload | None = None

    def __init__(
        self,
        layers: Iterable[Layer],
        *,
        final_norm: LayerNorm | RMSNorm | None,
        rotary: RotaryEmbedding | XPosEmbedding | None = None,
        score_positions: ScoreBiasModule | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.final_norm = final_norm
        self.rotary = rotary
        self.score_positions = score_positions
        self._compiled_step: Callable[..., Tensor] | None = None

    def forward(
        self,
        hidden: Tensor,
        kind: CallKind,
        *,
        positions: Tensor | None = None,
        packed: PackedSequences | None = None,
        padding: Tensor | None = None,
        routed: Tensor | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """Run all layers.

        Args:
            hidden: (batch, tokens, hidden_size).
            kind: kind of call, which selects the attention backend.
            positions: position ids, int64 (batch, tokens); None counts each row from 0.
            packed: document boundaries of packed samples, for attention within documents.
            padding: bool (batch, tokens), True for real tokens, the only ones attended to; None: all are real.
            routed: bool (batch, tokens), True for tokens that are routed to experts, possibly fewer than are attended
                to; None: those of `padding`.
            memory: encoder output for cross-attention; None in a stack without it.

        Returns:
            (batch, tokens, hidden_size), after the final norm.
        """
        tokens = hidden.shape[1]
        rotary = None if self.rotary is None else self.rotary(tokens if positions is None else positions)
        terms = None if self.score_positions is None else self.score_positions(tokens, tokens)
        context = LayerContext(kind, rotary, terms, packed, padding, routed, memory)
        weights, activations = self.weight_offload, None
        if self.activation_offload is not None and should_recompute(self):
            activations = self.activation_offload.begin_forward(len(self.layers), context)
        chunk = self.recompute_chunk if self.is_recomputed else 1
        for first in range(0, len(self.layers), chunk):
            numbers = range(first, min(first + chunk, len(self.layers)))
            layers = [cast(Layer, self.layers[number]) for number in numbers]
            if weights is not None:
                weights.pre_forward(numbers)
            with (
                contextlib.nullcontext() if activations is None else activations.offload_saved_tensors(numbers, layers)
            ):
                if self.is_recomputed:
                    hidden, sums = run_with_recompute(_run_layers, self.preserve_rng_state, layers, hidden, context)
                else:
                    hidden, sums = _run_layers(layers, hidden, context)
            for layer, layer_sums in zip(layers, sums, strict=True):
                layer.update_statistics(layer_sums)
            if weights is not None and should_recompute(self):
                weights.post_forward(numbers, hidden)
            if activations is not None:
                activations.post_forward(numbers, hidden)
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def forward_cached(
        self,
        hidden: Tensor,
        caches: Sequence[LayerKVCache],
        *,
        positions: Tensor | None,
        terms: ScoreBias | None,
        memories: Sequence[CrossAttentionCache] | None = None,
    ) -> Tensor:
        """Run all layers with KV caches: prefill, or decode one token per sequence.

        Args:
            hidden: (rows, tokens, hidden_size); one token is a decode step, more are a prefill.
            caches: KV cache of each layer, whose lengths include these tokens.
            positions: position ids, int64 (rows, tokens), required for a decode step; None counts each row from 0.
            terms: position-dependent terms added to the attention scores.
            memories: cached cross-attention keys and values of each layer; None in a stack without it.

        Returns:
            (rows, tokens, hidden_size), after the final norm.
        """
        rotary = None if self.rotary is None else self.rotary(hidden.shape[1] if positions is None else positions)
        step = self._compiled_step if hidden.shape[1] == 1 and self._compiled_step is not None else _run_layer_cached
        for number, layer in enumerate(self.layers):
            memory = None if memories is None else memories[number]
            context = LayerContext("generation", rotary, terms, memory=memory, cache=caches[number])
            hidden = step(cast(Layer, layer), hidden, context)
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def compile_decode_step(self) -> None:
        """Compile the decode step of a layer; equal layers share one compilation."""
        configure_dynamo()
        self._compiled_step = torch.compile(_run_layer_cached, fullgraph=True, dynamic=False)

    def compile_layers(self, *, has_hooks: bool = False, fullgraph: bool = True) -> None:
        """Compile each layer and the final norm; equal layers share one compilation.

        Args:
            has_hooks: the modules will get forward hooks (FSDP2's all-gather and reshard), which stay outside the
                graph.
            fullgraph: compile each module as a full graph; False allows a graph break at attention that cannot be
                traced.
        """
        configure_dynamo()
        for module in (*self.layers, *([] if self.final_norm is None else [self.final_norm])):
            if has_hooks:
                module.forward = torch.compile(module.forward, fullgraph=fullgraph, dynamic=False)
            else:
                module.compile(fullgraph=fullgraph, dynamic=False)


def _run_layer_cached(layer: Layer, hidden: Tensor, context: LayerContext) -> Tensor:
    """Run one layer for prefill, or for a decode step."""
    return layer(hidden, context)[0]


def _run_layers(layers: Sequence[Layer], hidden: Tensor, context: LayerContext) -> tuple[Tensor, list[Tensor | None]]:
    """Run consecutive layers; return the statistics for `Layer.update_statistics` too, since this may be recomputed."""
    collected: list[Tensor | None] = []
    for layer in layers:
        hidden, sums = layer(hidden, context)
        collected.append(sums)
    return hidden, collected


# ---------------------------------------------------------------- cost


def layer_weights(
    stack: StackSlice, cross: AttentionSlice | None = None, *, has_experts: bool = False, active: bool = False
) -> Weights:
    """Return the weights of a layer with or without experts and cross-attention; `active` as in `moe_weights`."""
    weights = attention_weights(stack.attention, stack) + _mlp_weights(stack, has_experts=has_experts, active=active)
    branches = 2
    if cross is not None:
        weights, branches = weights + cross_attention_weights(cross, stack), 3
    norms = branches * norm_parameters(stack.norm, stack.hidden_size)
    if stack.block == "normformer":  # also of the attentions' outputs, and inside the MLP
        norms += (branches - 1) * norm_parameters(stack.norm, stack.hidden_size)
        norms += norm_parameters(stack.norm, stack.mlp.ffn_hidden_size)
    return weights + Weights(others=norms)


def _mlp_weights(stack: StackSlice, *, has_experts: bool, active: bool = False) -> Weights:
    if has_experts and stack.moe is not None:
        return moe_weights(stack, stack.moe, active=active)
    return mlp_weights(stack, stack.mlp.ffn_hidden_size)


def layer_kinds(stack: StackSlice) -> dict[bool, int]:
    """Return the number of layers without (False) and with experts (True)."""
    sparse = 0 if stack.moe is None else sum(stack.moe.layers)
    return {False: stack.num_layers - sparse, True: sparse}


def count_stack(stack: StackSlice, cross: AttentionSlice | None = None, *, active: bool = False) -> int:
    """Count the parameters of a stack with final norm and position bias; `active` as in `layer_weights`."""
    count = 0 if stack.block == "post_ln" else norm_parameters(stack.norm, stack.hidden_size)
    count += position_bias_parameters(stack.attention)
    kinds = layer_kinds(stack).items()
    return count + sum(n * layer_weights(stack, cross, has_experts=kind, active=active).numel for kind, n in kinds)


def layer_memory(inputs: StackInputs, *, is_moe: bool) -> LayerMemory:
    """Return memory and matmuls of a layer with or without experts.

    Eager and compiled layers differ. In eager mode autograd saves what each operation saves: an RMSNorm in 16 bits
    saves its input and the normalized input in fp32. Compiled, the partitioner saves the inputs of matmuls and
    attention, the operands of residual additions, and little else: pointwise results are recomputed. The tests compare
    both with what torch really saves.
    """
    stack, widths, moe = inputs.stack, inputs.widths, inputs.stack.moe if is_moe else None
    mlp = mlp_memory(inputs, stack.mlp.ffn_hidden_size) if moe is None else moe_memory(inputs, moe)
    mlp_part, weights = _mlp_weights(stack, has_experts=is_moe), layer_weights(stack, inputs.cross, has_experts=is_moe)
    own, cross = self_attention_memory(inputs), cross_attention_memory(inputs)
    attentions = (own,) if cross is None else (own, cross)
    mlp_saved, saved = [*mlp.saved], [*own.saved, *_stream_and_norms(inputs, moe), *(cross.saved if cross else ())]
    if widths.casts_weights:
        norms = 2 * norm_parameters(stack.norm, stack.hidden_size)
        saved.append(SavedTensors("weights", (weights.numel - mlp_part.numel - norms) * widths.compute))
        mlp_saved.append(SavedTensors("weights", mlp_part.numel * widths.compute, "moe" if moe else None))
    keeps_boundary = inputs.compiled or _norm_saves_stream(inputs) or stack.block == "post_ln"
    residual = inputs.residual_elements * widths.residual
    # gradients of the layer's output and of its input; compiled, the second overwrites the first
    mlp_base = residual * (1 if inputs.compiled else 2)
    mlp_base += mlp_part.matrices[-1].elements * widths.weights if moe is None else 0
    attention_base = 2 * residual + weights.numel * widths.weights
    return LayerMemory(
        inputs=inputs,
        weights=weights,
        mlp_weights=mlp_part,
        expert_rows=expert_rows(moe, inputs.tokens) if moe is not None else 0,
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


def _existing(saved: Iterable[SavedTensors]) -> tuple[SavedTensors, ...]:
    return tuple(each for each in saved if each.num_bytes)


def final_norm_saved_bytes(inputs: StackInputs) -> int:
    """Return the bytes saved by the final norm of a stack: its input, in eager mode also fp32 copies."""
    if inputs.stack.block == "post_ln":
        return 0
    elements, s = inputs.residual_elements, inputs.widths.residual
    if inputs.compiled:
        return elements * s
    return elements * s * _norm_saves_stream(inputs) + norm_saved_bytes(inputs.stack.norm, elements, s)


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
    """Return the tensors saved of the residual stream, of norms and of dropouts."""
    stack, e, s = inputs.stack, inputs.widths.compute, inputs.widths.residual
    elements, keeps_stream = inputs.residual_elements, _norm_saves_stream(inputs)
    branches = inputs.num_branches
    # inputs of the first projection of each sublayer; with post-LN the residual stream, of which the layer's input
    # is counted elsewhere
    projections = [inputs.saves_norm_output("attention_qkv")] * (branches - 1)
    projections += [inputs.saves_norm_output("mlp_fc1")] * (moe is None)
    normed = projections.count(True) - (stack.block == "post_ln")
    module: RecomputeModule | None = "norm" if stack.block != "post_ln" else None
    saved = [SavedTensors("norm", normed * elements * e, module)]
    # router and experts save one input; experts that gather rows save those rows instead
    if moe is not None and (not runs_eager_experts(inputs, moe) or moe.shared_ffn_hidden_size):
        saved.append(SavedTensors("norm", elements * e, module, "moe"))
    norms = branches + (branches if stack.block == "normformer" else 0)
    saved.append(SavedTensors("norm", norms * norm_statistics_bytes(stack.norm, inputs.tokens)))
    sequential = stack.block != "parallel_ln"  # in a parallel block all sublayers read the layer's input
    if inputs.compiled and sequential:
        # the output of the first sublayer; the residual stream before each further one
        saved.append(SavedTensors("stream", elements * e + (branches - 2) * elements * s))
        saved += [SavedTensors("stream", elements * s)] if stack.block == "post_ln" else []
    elif not inputs.compiled:
        streams = branches if stack.block == "post_ln" else (branches - 1) * sequential
        saved += [SavedTensors("stream", streams * elements * s)] if keeps_stream else []
        extra, moe_norms = norm_saved_bytes(stack.norm, elements, s), int(moe is not None)
        saved += [
            SavedTensors("norm", (branches - moe_norms) * extra, module),
            SavedTensors("norm", moe_norms * extra, module, "moe"),
        ]
        if stack.block == "normformer":
            saved.append(SavedTensors("norm", (branches - 1) * (extra + keeps_stream * elements * e)))
    if stack.hidden_dropout:
        saved.append(SavedTensors("dropout", branches * elements))
    return saved
