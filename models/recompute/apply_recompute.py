"""Enable recompute in the parts of a stack that its slice selects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from ...kernels.attention.dispatch import BackendSelection
from ..config.memory import RecomputeModule
from ..config.stack import StackSlice
from ..layer import Layer
from ..memory.recompute import RecomputableModule
from ..moe.moe_layer import MoE
from ..stack import Stack


def apply_recompute(
    stack: Stack,
    stack_slice: StackSlice,
    decisions: Mapping[str, BackendSelection],
    self_attention: str,
    cross_attention: str | None = None,
    *,
    offloads: bool,
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
    """
    recompute = stack_slice.recompute
    if recompute is not None and recompute.chunk > 1:  # chunks cover all layers
        stack.recompute_chunk = recompute.chunk
        stack.enable_recompute()
    saves_scores = {label for label, decision in decisions.items() if decision.saves_scores}
    with_scores = self_attention in saves_scores, cross_attention in saves_scores
    for name, module in stack.layers.named_children():
        number, layer = int(name), cast(Layer, module)
        if recompute is not None and recompute.chunk == 1 and number < recompute.layers:
            layer.enable_recompute()
        for kind in stack_slice.recomputed_modules(number, offloading=offloads):
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
