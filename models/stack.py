"""Stack of transformer layers with its position modules and final norm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..kernels.attention.packed_sequences import PackedSequences
from ..kernels.autocast import autocast_dtype
from .config.dense_stack import AttentionSlice
from .config.stack import StackSlice
from .dispatch.attention_calls import CallKind
from .fused_decoding import fused_decode_step
from .kv_cache import CrossAttentionCache, LayerKVCache
from .layer import Layer, build_layer
from .layer_cost import layer_weights
from .layer_graphs import Capture, LayerGraphs, LayerPart
from .layers.attention import Backends
from .layers.attention_bias import ScoreBias, ScoreBiasModule, build_score_bias, position_bias_parameters
from .layers.compiling import configure_dynamo
from .layers.context import LayerContext, Memory
from .layers.cost import StackInputs
from .layers.dropout import StackDropout, token_places
from .layers.norm import LayerNorm, RMSNorm, build_norm, norm_parameters, norm_saved_bytes, norm_saves_input
from .layers.position_embeddings import RotaryEmbedding, XPosEmbedding, build_rotary
from .memory.offload_activations import ActivationOffload
from .memory.offload_weights import WeightOffload
from .memory.recompute import RecomputableModule, run_with_recompute, should_recompute
from .moe.moe_layer import MoE
from .parallel.collectives import TensorParallel, shard_tokens, unshard_tokens
from .parallel.context import SequenceShard
from .parallel.relay import Relay
from .parallel.stages import Stage, StageInput
from .parallel.traffic import Collective


class Stack(RecomputableModule):
    """Sequence of layers with shared position modules and a final norm.

    Recomputed: everything but the input of each chunk of `recompute_chunk` layers.

    Args:
        layers: the layers, first to last.
        final_norm: norm of the last layer's output; None if the layers end with one (`post_ln`).
        rotary: rotary embedding shared by the layers, or None.
        score_positions: position module that biases attention scores, shared by the layers, or None.
        fp32_residual: keep the residual stream in fp32 beside 16-bit weights.

    Attributes:
        num_layers: number of layers of all pipeline stages; `layers` has those of this rank, under their numbers.
        recompute_chunk: number of layers that are recomputed together.
        relay: the pipeline ranks that share the layers in inference; None for one.
        activation_offload: keeps the saved tensors of the first layers in host memory, or None.
        shard: which tokens of whole sequences the rank has in training and evaluation; None: all.
        tensor_parallel: the ranks that share each layer; None for one.
        recomputes_stage: returns True if a micro batch recomputes all layers of a pipeline stage, given the stage, the
            index of the micro batch in the step, and their number; None: none does.
        weight_offload: keeps the weights of the first layers in host memory between uses, or None.
    """

    recompute_chunk: int = 1
    activation_offload: ActivationOffload | None = None
    recomputes_stage: Callable[[Stage, int, int], bool] | None = None
    weight_offload: WeightOffload | None = None
    tensor_parallel: TensorParallel | None = None
    relay: Relay | None = None
    shard: SequenceShard | None = None

    def __init__(
        self,
        layers: Iterable[Layer],
        *,
        final_norm: LayerNorm | RMSNorm | None,
        rotary: RotaryEmbedding | XPosEmbedding | None = None,
        score_positions: ScoreBiasModule | None = None,
        fp32_residual: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.num_layers = len(self.layers)
        self.final_norm = final_norm
        self.rotary = rotary
        self.score_positions = score_positions
        self.fp32_residual = fp32_residual
        self._compiled_step: Callable[..., Tensor] | None = None
        self._compile: Callable[..., Any] | None = None
        self._has_dropout: bool | None = None
        self._graphs: list[LayerGraphs] = []

    def begin(
        self, embed: Callable[[], Tensor], tokens: Tensor, p: float, at: StageInput | None
    ) -> tuple[Tensor, StackDropout | None]:
        """Return the input of the layers, embeddings after dropout or what a later pipeline stage has received, and the
        `dropout` of `forward`.

        Args:
            embed: returns the embeddings, (batch, tokens, hidden_size).
            tokens: (batch, tokens) int64.
            p: dropout of the embeddings, in training.
            at: the pipeline stage, and what it receives; None: all.
        """
        if at is None or at.stage.begins:
            return self.drop_embeddings(embed(), p)
        return at.received[0], self.draw_dropout(tokens.shape, tokens.device, p)

    def drop_embeddings(self, embedded: Tensor, p: float) -> tuple[Tensor, StackDropout | None]:
        """Apply the dropout of the embeddings, and draw the keys of those of the layers.

        Args:
            embedded: (batch, tokens, hidden_size).
            p: dropout of the embeddings, in training.

        Returns:
            (batch, tokens, hidden_size), and the `dropout` of `forward`; None outside training or without dropout.
        """
        embedded = self._to_residual(embedded)
        dropout = self.draw_dropout(embedded.shape[:2], embedded.device, p)
        return dropout.of_embeddings().apply(embedded, p) if p and dropout is not None else embedded, dropout

    def _to_residual(self, hidden: Tensor) -> Tensor:
        return hidden.to(torch.promote_types(hidden.dtype, torch.float32)) if self.fp32_residual else hidden

    def compute_dtype(self, hidden: Tensor) -> torch.dtype:
        """Return the dtype of matmuls, of which the residual stream `hidden` may be wider."""
        return autocast_dtype(next(self.layers.parameters(), hidden) if self.fp32_residual else hidden)

    def draw_dropout(self, shape: Sequence[int], device: torch.device, p: float) -> StackDropout | None:
        """Draw the keys of the dropouts of embeddings and layers, those of all pipeline stages.

        Args:
            shape: (batch, tokens) of this rank.
            device: device of the tokens.
            p: dropout of the embeddings, in training.
        """
        if not self.training or not (p or self.draws_dropout):
            return None
        return StackDropout.draw(self.num_layers, token_places(shape, self.shard, device))

    @property
    def draws_dropout(self) -> bool:
        """True if layers draw dropout in training, of any pipeline stage if first read with all of them."""
        if self._has_dropout is None:
            self._has_dropout = any(getattr(module, "has_dropout", False) for module in self.modules())
        return self._has_dropout

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
        dropout: StackDropout | None = None,
        at: StageInput | None = None,
        shape: Sequence[int] | None = None,
    ) -> Tensor:
        """Run all layers, or those of a pipeline stage.

        Args:
            hidden: (batch, tokens, hidden_size), or the output of the stage before.
            kind: kind of call, which selects the attention backend.
            positions: position ids, int64 (batch, tokens); None counts each row from 0.
            packed: document boundaries of packed samples, for attention within documents.
            padding: bool (batch, tokens), True for real tokens, the only ones attended to; None: all are real. With
                `shard` those of whole sequences.
            routed: bool (batch, tokens of whole sequences), True for tokens that are routed to experts, possibly fewer
                than are attended to; None: those of `padding`.
            memory: encoder output for cross-attention; None in a stack without it.
            dropout: dropouts of this forward (`drop_embeddings`); None outside training or without dropout.
            at: the pipeline stage to run; None: all.
            shape: (batch, tokens) of this rank, for a stage that receives a share of them; otherwise those of `hidden`.

        Returns:
            (batch, tokens, hidden_size), after the final norm; of a stage that does not end the stack the residual
            stream, with sequence parallelism that of the rank's share of the tokens.
        """
        stage, hidden = None if at is None else at.stage, self._to_residual(hidden)
        rows, tokens = hidden.shape[:2] if shape is None or stage is None or stage.begins else shape
        whole = tokens
        if self.shard is not None:
            whole = self.shard.whole_length(tokens)
            positions = self.shard.positions(tokens, hidden.device) if positions is None else positions
        rotary = None if self.rotary is None else self.rotary(tokens if positions is None else positions)
        terms = None if self.score_positions is None else self.score_positions(whole, whole)
        ranks, batch = self.tensor_parallel, None
        stream_tokens = None if dropout is None else dropout.tokens
        if ranks is not None:
            ranks.shards_tokens = ranks.sequence and kind != "generation"
            if ranks.shards_tokens:
                batch = rows
                hidden = shard_tokens(hidden, ranks) if stage is None or stage.begins else hidden
                stream_tokens = None if stream_tokens is None else stream_tokens.chunk(ranks.size)[ranks.rank]
        context = LayerContext(kind, rotary, terms, packed, padding, routed, memory, batch=batch)
        if self.recomputes_stage is not None and at is not None and should_recompute(self):
            context = context._replace(recompute=self.recomputes_stage(at.stage, at.micro_batch, at.micro_batches))
        weights, activations = self.weight_offload, None
        if self.activation_offload is not None and should_recompute(self):
            activations = self.activation_offload.begin_forward(len(self.layers), context)
        chunk = self.recompute_chunk if self.is_recomputed else 1
        relay = self.relay
        run = range(self.num_layers) if stage is None else stage.layers
        if relay is not None:
            run, hidden = relay.layers(self.num_layers), relay.receive(hidden)
        for first in range(run.start, run.stop, chunk):
            numbers = range(first, min(first + chunk, run.stop))
            layers = [cast(Layer, self.layers.get_submodule(str(number))) for number in numbers]
            contexts = [context] * len(layers)
            if dropout is not None and stream_tokens is not None:
                contexts = [context._replace(dropout=dropout.of_layer(number, stream_tokens)) for number in numbers]
            if weights is not None:
                weights.pre_forward(numbers)
            with (
                contextlib.nullcontext() if activations is None else activations.offload_saved_tensors(numbers, layers)
            ):
                if self.is_recomputed:
                    hidden, sums = run_with_recompute(_run_layers, self.preserve_rng_state, layers, hidden, contexts)
                else:
                    hidden, sums = _run_layers(layers, hidden, contexts)
            for layer, layer_sums in zip(layers, sums, strict=True):
                layer.update_statistics(layer_sums)
            if weights is not None and should_recompute(self):
                weights.post_forward(numbers, hidden)
            if activations is not None:
                activations.post_forward(numbers, hidden)
        if stage is not None and not stage.ends:
            return hidden
        hidden = hidden if relay is None else relay.share(hidden)
        hidden = hidden if self.final_norm is None else self.final_norm(hidden)
        return hidden if ranks is None or batch is None else unshard_tokens(hidden, ranks, batch)

    def forward_cached(
        self,
        hidden: Tensor,
        caches: Sequence[LayerKVCache],
        *,
        positions: Tensor | None,
        terms: ScoreBias | None,
        memories: Sequence[CrossAttentionCache] | None = None,
        fused: bool = False,
    ) -> Tensor:
        """Run all layers with KV caches: prefill, or decode one token per sequence.

        Args:
            hidden: (rows, tokens, hidden_size); one token is a decode step, more are a prefill.
            caches: KV cache of each layer of this rank, whose lengths include these tokens.
            positions: position ids, int64 (rows, tokens), required for a decode step; None counts each row from 0.
            terms: position-dependent terms added to the attention scores.
            memories: cached cross-attention keys and values of each layer of this rank; None in a stack without it.
            fused: run a decode step with `fused_decode_step`, which must support the layers.

        Returns:
            (rows, tokens, hidden_size), after the final norm.
        """
        if self.tensor_parallel is not None:
            self.tensor_parallel.shards_tokens = False
        rotary = None if self.rotary is None else self.rotary(hidden.shape[1] if positions is None else positions)
        step = self._compiled_step if hidden.shape[1] == 1 and self._compiled_step is not None else _run_layer_cached
        step = fused_decode_step if fused else step
        hidden = self._to_residual(hidden)
        hidden = hidden if self.relay is None else self.relay.receive(hidden)
        for number, layer in enumerate(self.layers):  # numbers in the caches
            memory = None if memories is None else memories[number]
            context = LayerContext("generation", rotary, terms, memory=memory, cache=caches[number])
            hidden = step(cast(Layer, layer), hidden, context)
        hidden = hidden if self.relay is None else self.relay.share(hidden)
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def compile_decode_step(self) -> None:
        """Compile the decode step of a layer; equal layers share one compilation."""
        configure_dynamo()
        self._compiled_step = torch.compile(_run_layer_cached, fullgraph=True, dynamic=False)

    def compile_layers(self, *, fullgraph: bool = True) -> None:
        """Compile each layer and the final norm, without their hooks; equal layers share one compilation.

        Args:
            fullgraph: compile each module as a full graph; False allows a graph break at attention that cannot be
                traced.
        """
        exchanges = (layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, MoE))
        configure_dynamo(traces_counts=any(experts.ranks is not None for experts in exchanges))
        self._compile = partial(torch.compile, fullgraph=fullgraph, dynamic=False)
        for module in (*self.layers, *([] if self.final_norm is None else [self.final_norm])):
            module.forward = self._compile(module.forward)  # hooks wait for weights, or are FSDP2's

    def capture_layers(
        self,
        build_capture: Callable[[], Capture],
        on_failure: Callable[[Exception], None],
        in_flight: Mapping[range, int] | None = None,
        whole_weights: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
    ) -> None:
        """Run the layers by CUDA graphs in training, up to experts of which other ranks have some, see `LayerGraphs`.

        To be called once, after `compile_layers`.

        Args:
            build_capture: returns a function that captures graphs with memory in common.
            on_failure: see `LayerGraphs`.
            in_flight: the layers of each pipeline stage of this rank, with the forward passes that can be without their
                backward pass at a time; None: all layers, with one.
            whole_weights: returns a context in which a layer has whole weights, see `LayerPart`; None: it always has.
        """
        stages = {range(self.num_layers): 1} if in_flight is None else in_flight
        for numbers, passes in stages.items():
            layers = [cast(Layer, self.layers.get_submodule(str(number))) for number in numbers]
            parts = [_capturable_part(layer, self._compile, whole_weights) for layer in layers]
            graphs = LayerGraphs([part for _, part in parts], [build_capture() for _ in range(passes)], on_failure)
            self._graphs.append(graphs)
            for number, (layer, (name, part)) in enumerate(zip(layers, parts, strict=True)):
                setattr(layer, name, partial(_run_captured, graphs, number, layer, part.run))

    def release_graphs(self) -> None:
        """Free the graphs of `capture_layers`; the layers run without from then on."""
        for graphs in self._graphs:
            graphs.release()


def _capturable_part(
    layer: Layer,
    compile_: Callable[..., Any] | None,
    whole_weights: Callable[[nn.Module], AbstractContextManager[None]] | None,
) -> tuple[str, LayerPart]:
    """Return the method of a layer that has fixed shapes, by its name, and compiled as the layer is."""
    whole = contextlib.nullcontext if whole_weights is None else partial(whole_weights, layer)
    if _has_fixed_shapes(layer):
        return "forward", LayerPart(layer.forward, lambda: list(layer.parameters()), whole)
    if compile_ is not None:
        layer.__dict__.pop("forward")  # compiled as a whole
        layer.route, layer.run_experts = compile_(layer.route), compile_(layer.run_experts)

    def parameters() -> list[nn.Parameter]:
        others = "mlp.experts.", "mlp.shared.", "mlp_adapter."
        return [parameter for name, parameter in layer.named_parameters() if not name.startswith(others)]

    return "route", LayerPart(layer.route, parameters, whole)


def _has_fixed_shapes(layer: Layer) -> bool:
    """Return False if what a layer computes depends on how many tokens come from other ranks to its experts."""
    return not isinstance(layer.mlp, MoE) or layer.mlp.experts.ranks is None


def _run_captured(
    graphs: LayerGraphs, number: int, layer: Layer, run: Callable[..., Any], hidden: Tensor, context: LayerContext
) -> Any:
    if not should_recompute(layer):
        return run(hidden, context)
    return graphs.run(number, hidden, context)


def _run_layer_cached(layer: Layer, hidden: Tensor, context: LayerContext) -> Tensor:
    """Run one layer for prefill, or for a decode step."""
    return layer(hidden, context)[0]


def _run_layers(
    layers: Sequence[Layer], hidden: Tensor, contexts: Sequence[LayerContext]
) -> tuple[Tensor, list[Tensor | None]]:
    """Run consecutive layers; return the statistics for `Layer.update_statistics` too, since this may be recomputed."""
    collected: list[Tensor | None] = []
    for layer, context in zip(layers, contexts, strict=True):
        hidden, sums = layer(hidden, context)
        collected.append(sums)
    return hidden, collected


def build_stack(
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
    layers = (build_layer(stack, n, backends, cross_attention, cross_backends) for n in range(stack.num_layers))
    return Stack(
        layers,
        final_norm=None if stack.block == "post_ln" else build_norm(stack.norm, stack.hidden_size),
        rotary=build_rotary(stack.rotary),
        score_positions=build_score_bias(stack.attention),
        fp32_residual=stack.fp32_residual,
    )


# ---------------------------------------------------------------- cost


def layer_kinds(stack: StackSlice) -> dict[bool, int]:
    """Return the number of layers without (False) and with experts (True)."""
    sparse = 0 if stack.moe is None else sum(stack.moe.layers)
    return {False: stack.num_layers - sparse, True: sparse}


def count_stack(
    stack: StackSlice, cross: AttentionSlice | None = None, *, active: bool = False, expert_ranks: int = 1
) -> int:
    """Count the parameters of a stack with final norm and position bias; other arguments as in `layer_weights`."""
    count = norm_parameters(stack.norm, stack.hidden_size) if stack.ends and stack.block != "post_ln" else 0
    count += position_bias_parameters(stack.attention) if stack.num_layers else 0
    kinds = layer_kinds(stack).items()
    options: Any = {"active": active, "expert_ranks": expert_ranks}
    return count + sum(n * layer_weights(stack, cross, has_experts=kind, **options).numel for kind, n in kinds)


def final_norm_saved_bytes(inputs: StackInputs) -> int:
    """Return the bytes saved by the final norm of a stack: its input, in eager mode also fp32 copies."""
    if inputs.stack.block == "post_ln" or not inputs.stack.ends:
        return 0
    elements, s = inputs.residual_elements, inputs.widths.residual
    if inputs.compiled:
        return elements * s
    return elements * s * norm_saves_input(inputs.stack.norm, s) + norm_saved_bytes(inputs.stack.norm, elements, s)


def stack_traffic(inputs: StackInputs) -> tuple[Collective, ...]:
    """Return the traffic at the ends of a stack, whose layers share the tokens with sequence parallelism."""
    if inputs.residual_tokens == inputs.tokens:
        return ()
    whole, found = inputs.outer_elements * inputs.widths.residual, []
    if inputs.stack.begins:
        found.append(Collective("tensor", "all-gather", whole, "backward"))
    if inputs.stack.ends:
        found.append(Collective("tensor", "all-gather", whole, "forward"))
    return tuple(found)
