"""Recompute (activation checkpointing) and CPU offloading of a stack: keys, and what they resolve to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from .key_block import extension_field
from .moe import MoEKeys

Granularity = Literal["selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
RecomputeModule = Literal["core_attention", "mlp_activation", "norm", "moe"]

RECOMPUTED_INSTEAD_OF_OFFLOADED: frozenset[RecomputeModule] = frozenset({"norm", "mlp_activation", "core_attention"})
"""Modules that offloaded layers recompute, which is much faster than copying them to the host and back."""


class MemoryKeys(MoEKeys):
    """Recompute and CPU offloading (nemo_semantics 1.9, 1.10, 3 and 4)."""

    activations_checkpoint_granularity: Granularity | None = None
    """Recompute activations in the backward pass instead of saving them (arXiv 2205.05198): of whole layers (`full`),
    or of modules of each layer (`selective`), by default attention scores and softmax; see
    `activations_checkpoint_modules`. null: none, or those modules."""
    activations_checkpoint_method: RecomputeMethod | None = None
    """With `full`: recompute all layers, in chunks of which only the input is saved (`uniform`), or the first layers,
    each individually (`block`)."""
    activations_checkpoint_num_layers: int | None = Field(None, ge=0)
    """`uniform`: layers per chunk. `block`: number of first layers, of each stage of a pipeline. 0: none."""
    num_micro_batches_with_partial_activation_checkpoints: int | None = Field(None, ge=0)
    """With `block` in a pipeline: of the micro batches that a rank has in flight, as many recompute the first layers
    only, the others all layers; null: none does."""
    activations_checkpoint_layers_per_pipeline: float | None = Field(None, ge=0)
    """With `block` in a pipeline: rank r recomputes int(r times this) first layers fewer, since later ranks have fewer
    micro batches in flight; null: 0."""
    activations_checkpoint_modules: Annotated[list[RecomputeModule], Field(min_length=1)] | None = extension_field(None)
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
    supported with `fsdp`, unless `grad`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSlice:
    """Recompute (activation checkpointing) of a stack.

    Attributes:
        chunk: layers that are recomputed together; only the input of the first is saved.
        layers: number of first layers, of each stage of a pipeline, that are recomputed as a whole; 0 for none.
        modules: modules that are recomputed in each of the other layers.
        partial_micro_batches: in a pipeline, number of the micro batches in flight that recompute only these layers,
            while the others recompute all (`models/recompute/per_stage.py`); None: all recompute these.
        fewer_per_rank: rank r of a pipeline recomputes int(r * fewer_per_rank) layers fewer.
    """

    chunk: int
    layers: int
    modules: frozenset[RecomputeModule]
    partial_micro_batches: int | None = None
    fewer_per_rank: float = 0.0

    @property
    def description(self) -> str:
        """Human-readable description for logs."""
        return "; ".join(self._parts(self.layers, ""))

    def describe_stages(self, stage_layers: int) -> str:
        """Return the same description for a pipeline whose stages have up to `stage_layers` layers of the stack."""
        found = self._parts(min(self.layers, stage_layers), " of each stage")
        if self.fewer_per_rank:
            found.append(f"rank r int(r * {self.fewer_per_rank:g}) layers fewer")
        if self.partial_micro_batches is not None:
            found.append(f"all layers except in {self.partial_micro_batches} of the micro batches in flight")
        return "; ".join(found)

    def _parts(self, layers: int, of: str) -> list[str]:
        together = f" in chunks of {self.chunk}" if self.chunk > 1 else ""
        whole = [f"{layers} {'layers' if layers > 1 else 'layer'}{of}{together}"] if layers else []
        parts = join_module_names(self.modules)
        return [*whole, *([f"{parts} of {'the others' if whole else 'every layer'}"] if parts else [])]

    @property
    def recomputes_layers(self) -> bool:
        """True if some micro batches recompute some layers as a whole."""
        return bool(self.layers) or self.partial_micro_batches is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSlice:
    """CPU offloading of a stack of L layers; no effect without a GPU.

    Attributes:
        layers: number N of first layers that are offloaded, 1 to L - 1, without the recompute chunk that the backward
            starts with.
        activations: offload their saved activations; those of layer i have left the GPU before layer i + L - N runs.
        weights: offload their weights, from the forward of the next layer to the backward of the next layer.
    """

    layers: int
    activations: bool
    weights: bool

    @property
    def recomputed_modules(self) -> frozenset[RecomputeModule]:
        """Modules that these layers recompute instead of copying, where they have them."""
        return RECOMPUTED_INSTEAD_OF_OFFLOADED if self.activations else frozenset()


def recompute_slice(keys: MemoryKeys, *, with_experts: tuple[bool, ...]) -> RecomputeSlice | None:
    """Resolve the recompute keys; None if nothing is recomputed.

    Args:
        keys: keys of the stack, already validated by the rules.
        with_experts: True for each layer with experts; () for a dense stack.
    """
    chunk, layers = full_recompute_layers(keys)
    shared, (partial, fewer) = keys.moe_shared_expert_intermediate_size is not None, partial_recompute(keys)
    acting = effective_modules(
        with_experts if fewer else with_experts[layers:],
        shared_expert=shared,
        post_ln=keys.transformer_block_type == "post_ln",
    )
    modules = selected_modules(keys) & acting if layers < keys.num_layers or fewer else frozenset()
    found = RecomputeSlice(
        chunk=chunk, layers=layers, modules=modules, partial_micro_batches=partial, fewer_per_rank=fewer
    )
    return found if found.recomputes_layers or modules else None


def join_module_names(modules: frozenset[RecomputeModule]) -> str:
    """Join the names of these modules."""
    return ", ".join(sorted(modules)).replace("_", " ")


def effective_modules(
    with_experts: tuple[bool, ...], *, shared_expert: bool, post_ln: bool
) -> frozenset[RecomputeModule]:
    """Return the modules that some of the layers have and that can be recomputed.

    Args:
        with_experts: True for each layer with experts; () for a dense stack.
        shared_expert: MoE layers have a shared expert.
        post_ln: outputs of the norms are the residual stream, which is saved anyway.
    """
    parts: dict[RecomputeModule, bool] = {
        "core_attention": True,  # depends on the backend, which the keys do not determine
        "norm": not post_ln,
        "mlp_activation": shared_expert or not (with_experts and all(with_experts)),
        "moe": any(with_experts),
    }
    return frozenset(name for name, acts in parts.items() if acts)


def full_recompute_layers(keys: MemoryKeys) -> tuple[int, int]:
    """Return layers per chunk and the number of first layers that are recomputed as a whole (0 for none)."""
    number, method = keys.activations_checkpoint_num_layers, keys.activations_checkpoint_method
    if keys.activations_checkpoint_granularity != "full" or method is None or number is None:
        return 1, 0
    if method == "block" and keys.num_micro_batches_with_partial_activation_checkpoints == 0:
        return 1, keys.num_layers
    if number == 0:
        return 1, 0
    number = min(number, keys.num_layers)
    return (number, keys.num_layers) if method == "uniform" else (1, number)


def partial_recompute(keys: MemoryKeys) -> tuple[int | None, float]:
    """Return `partial_micro_batches` and `fewer_per_rank` of `RecomputeSlice`."""
    partial = keys.num_micro_batches_with_partial_activation_checkpoints
    if keys.activations_checkpoint_granularity != "full" or keys.activations_checkpoint_method != "block":
        return None, 0.0
    return (None, 0.0) if partial == 0 else (partial, keys.activations_checkpoint_layers_per_pipeline or 0.0)


def last_chunk_start(keys: MemoryKeys) -> int:
    """Return the first layer of the recompute chunk that the backward starts with; without chunks the last layer."""
    last, (chunk, _) = keys.num_layers - 1, full_recompute_layers(keys)
    return last - last % chunk


def selected_modules(keys: MemoryKeys) -> frozenset[RecomputeModule]:
    """Return the modules selected by the keys, whether or not the layers have them."""
    modules: set[RecomputeModule] = set(keys.activations_checkpoint_modules or ())
    if keys.activations_checkpoint_modules is None and keys.activations_checkpoint_granularity == "selective":
        modules.add("core_attention")
    if keys.moe_layer_recompute:
        modules.add("moe")
    return frozenset(modules)


def offload_slice(keys: MemoryKeys) -> OffloadSlice | None:
    """Resolve the offloading keys; None if nothing is offloaded.

    Args:
        keys: keys of the stack, already validated by the rules.
    """
    layers = min(num_offloaded_layers(keys), last_chunk_start(keys))
    if not layers:
        return None
    return OffloadSlice(layers=layers, activations=keys.cpu_offloading_activations, weights=keys.cpu_offloading_weights)


def num_offloaded_layers(keys: MemoryKeys) -> int:
    """Return the number of first layers that are offloaded; 0 for none."""
    if not keys.cpu_offloading:
        return 0
    return keys.num_layers - 1 if keys.cpu_offloading_num_layers is None else keys.cpu_offloading_num_layers
