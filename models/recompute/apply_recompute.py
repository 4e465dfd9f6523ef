"""Enable recompute in the parts of a stack that its slice selects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from ...kernels.attention.dispatch import BackendSelection
from ..config.memory import RecomputeModule
from ..config.stack import StackSlice
from ..layer import Layer
from ..memory.recompute import RecomputableModule, uses_rng
from ..moe.moe_layer import MoE
from ..parallel.pipeline import PipelineParallel
from ..parallel.stages import Stage
from ..stack import Stack
from .per_stage import StageRecompute


def apply_recompute(
    stack: Stack,
    stack_slice: StackSlice,
    decisions: Mapping[str, BackendSelection],
    self_attention: str,
    cross_attention: str | None = None,
    *,
    offloads: bool,
    stages: Sequence[Stage] = (),
    pipeline: PipelineParallel | None = None,
) -> None:
    """Enable the recompute of a stack that has not run yet.

    With chunks of one layer, recomputation is inside the compiled graph of the layer: the compiler fuses it into the
    backward and drops what is not needed, above all the last matmul.

    Args:
        stack: built from `stack_slice`, with its PEFT modules.
        stack_slice: slice of the stack.
        decisions: attention backends of the model by label.
        self_attention: label of the stack's self-attention in training.
        cross_attention: label of its cross-attention in training; None without.
        offloads: CPU offloading is active, which requires a GPU.
        stages: pipeline stages of this rank with layers of the stack.
        pipeline: the pipeline ranks; None for one.
    """
    recompute = stack_slice.recompute
    rank = None
    if recompute is not None and pipeline is not None:
        rank = StageRecompute(recompute, pipeline.split, pipeline.rank)
        stack.recomputes_stage = rank.covers_stage if recompute.partial_micro_batches is not None else None
    whole = set(range(recompute.layers)) if recompute is not None else set[int]()
    if rank is not None:
        whole = {number for stage in stages for number in stage.layers[: rank.first_layers(stage)]}
    if recompute is not None and recompute.chunk > 1:  # chunks cover all layers
        stack.recompute_chunk = recompute.chunk
        stack.enable_recompute()
    saves_scores = {label for label, decision in decisions.items() if decision.saves_scores}
    with_scores = self_attention in saves_scores, cross_attention in saves_scores
    for name, module in stack.layers.named_children():
        number, layer = int(name), cast(Layer, module)
        if recompute is not None and recompute.chunk == 1 and number in whole:
            layer.enable_recompute()
        elif stack.recomputes_stage is not None:
            layer.preserve_rng_state = uses_rng(layer)
        for kind in stack_slice.recomputed_modules(number, offloading=offloads, whole=number in whole):
            for part in _parts(layer, kind, *with_scores):
                part.enable_recompute()


def _parts(
    layer: Layer, name: RecomputeModule, self_attention: bool, cross_attention: bool
) -> Iterator[RecomputableModule]:
    """Yield the parts of a layer that `name` stands for; of attention, those whose backend saves scores."""
    mlp = layer.mlp
    match name:
        case "norm":
            yield layer.attention_norm
            yield layer.mlp_norm
            if layer.cross_attention_norm is not None:
                yield layer.cross_attention_norm
        case "mlp_activation":
            dense = mlp.shared if isinstance(mlp, MoE) else mlp
            if dense is not None:
                yield dense
        case "moe":
            if isinstance(mlp, MoE):
                yield mlp
        case "core_attention":  # selective recomputation, arXiv 2205.05198
            if self_attention:
                yield layer.attention
            if cross_attention and layer.cross_attention is not None:
                yield layer.cross_attention
