"""Configuration keys of recompute (activation checkpointing) and CPU offloading of one stack."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .key_block import Block, own

Granularity = Literal["selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
RecomputeModule = Literal["core_attention", "mlp_activation", "norm", "moe"]


class MemoryKeys(Block):
    """Recompute and CPU offloading (nemo_semantics 1.9, 1.10, 3 and 4)."""

    activations_checkpoint_granularity: Granularity | None = None
    """Recompute activations in the backward pass instead of saving them (arXiv 2205.05198): of whole layers (`full`),
    or of modules of each layer (`selective`), by default attention scores and softmax; see
    `activations_checkpoint_modules`. null: none, or those modules."""
    activations_checkpoint_method: RecomputeMethod | None = None
    """With `full`: recompute all layers, in chunks of which only the input is saved (`uniform`), or the first layers,
    each individually (`block`)."""
    activations_checkpoint_num_layers: int | None = Field(None, ge=0)
    """`uniform`: layers per chunk. `block`: number of first layers. 0: none."""
    activations_checkpoint_modules: Annotated[list[RecomputeModule], Field(min_length=1)] | None = own(None)
    """Modules to recompute in each layer that is not recomputed as a whole: `norm` and `mlp_activation` (cheap: no
    GEMM runs twice), `core_attention`, `moe` (same as `moe_layer_recompute`)."""

    cpu_offloading: bool = False
    """Keep activations and weights of the first layers in host memory while the GPU does not need them. No effect
    without a GPU."""
    cpu_offloading_num_layers: int | None = Field(None, ge=0)
    """Number of first layers to offload, less than `num_layers`; null: all but one. Copies overlap with the computation
    of the other layers, so offloading few layers costs no time."""
    cpu_offloading_activations: bool = True
    """With `cpu_offloading`: copy the saved activations of these layers to the host and back, except norms, MLP
    activations and attention scores, which are recomputed."""
    cpu_offloading_weights: bool = True
    """With `cpu_offloading`: keep the weights of these layers on the host between their forward and backward. Not
    supported with `fsdp`."""
