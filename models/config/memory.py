"""The keys that trade time for memory in one stack: what the backward calculates again, what the host keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .key_block import Block, own

Granularity = Literal["selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
RecomputeModule = Literal["core_attention", "mlp_activation", "norm", "moe"]


class MemoryKeys(Block):
    """What a stack does to need less memory (nemo_semantics 1.9, 1.10, 3 and 4)."""

    activations_checkpoint_granularity: Granularity | None = None
    """What the backward pass calculates again instead of keeping it (arXiv 2205.05198): whole layers (`full`), or parts
    of each (`selective`), which are the attention's scores and softmax unless `activations_checkpoint_modules` names
    others. null: nothing, or those modules."""
    activations_checkpoint_method: RecomputeMethod | None = None
    """With `full`: all layers, in chunks of which only the input is kept (`uniform`), or the first ones, each by itself
    (`block`)."""
    activations_checkpoint_num_layers: int | None = Field(None, ge=0)
    """`uniform`: layers in a chunk. `block`: how many of the first layers. 0: none."""
    activations_checkpoint_modules: Annotated[list[RecomputeModule], Field(min_length=1)] | None = own(None)
    """Parts that are calculated again in each layer that is not as a whole: `norm` and `mlp_activation` (cheap: no
    matrix product runs twice), `core_attention`, `moe` (the same as `moe_layer_recompute`)."""

    cpu_offloading: bool = False
    """Keep activations and weights of the first layers in host memory while the GPU does not need them. Without a GPU
    nothing is done."""
    cpu_offloading_num_layers: int | None = Field(None, ge=0)
    """How many of the first layers, fewer than there are; null: all but one. Copies hide behind the work of the other
    layers, so those of few layers cost no time."""
    cpu_offloading_activations: bool = True
    """With `cpu_offloading`: what these layers save for the backward goes to the host and comes back, but for norms,
    MLP activations and scores of attention, which they calculate again."""
    cpu_offloading_weights: bool = True
    """With `cpu_offloading`: the weights of these layers are on the host from their forward to their backward. Not with
    `fsdp`."""
