"""What a stack does to need less memory, derived once from its keys."""

from __future__ import annotations

from dataclasses import dataclass

from .memory import RecomputeModule
from .stack import StackKeys

RATHER_THAN_A_COPY: frozenset[RecomputeModule] = frozenset({"norm", "mlp_activation", "core_attention"})
"""Parts that a GPU makes again in far less time than a copy of them needs on its way to the host and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSlice:
    """What the backward pass of a stack calculates again.

    Attributes:
        chunk: layers that are recomputed together; only the input of the first is kept.
        layers: the first so many layers are recomputed as a whole; 0 for none.
        modules: the parts that are recomputed in each of the other layers.
    """

    chunk: int
    layers: int
    modules: frozenset[RecomputeModule]

    @property
    def description(self) -> str:
        """In words, for the log."""
        together = f" in chunks of {self.chunk}" if self.chunk > 1 else ""
        whole = [f"{self.layers} {'layers' if self.layers > 1 else 'layer'}{together}"] if self.layers else []
        parts = named(self.modules)
        return "; ".join([*whole, *([f"{parts} of {'the others' if whole else 'every layer'}"] if parts else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSlice:
    """What a stack of L layers keeps in host memory where there is a GPU.

    Attributes:
        layers: the first so many layers N, from 1 to L - 1, none of a chunk of layers that the backward begins with.
        activations: what they save for the backward. It has left the GPU before layer i + L - N runs.
        weights: their weights, from the forward of the next layer to the backward of the next layer.
    """

    layers: int
    activations: bool
    weights: bool

    @property
    def made_again(self) -> frozenset[RecomputeModule]:
        """The parts that the backward of these layers makes again, if they have them, so that nothing of them moves."""
        return RATHER_THAN_A_COPY if self.activations else frozenset()


def recompute_slice(keys: StackKeys, *, with_experts: tuple[bool, ...]) -> RecomputeSlice | None:
    """What the keys recompute, None for nothing.

    Args:
        keys: of the stack; the rules have found no error in them.
        with_experts: for each layer of the stack, whether it has experts; () where none has.
    """
    chunk, layers = whole_layers(keys)
    shared = keys.moe_shared_expert_intermediate_size is not None
    acting = acting_modules(
        with_experts[layers:], shared_expert=shared, post_ln=keys.transformer_block_type == "post_ln"
    )
    modules = modules_of(keys) & acting if layers < keys.num_layers else frozenset()
    return RecomputeSlice(chunk=chunk, layers=layers, modules=modules) if layers or modules else None


def named(modules: frozenset[RecomputeModule]) -> str:
    """These parts in words."""
    return ", ".join(sorted(modules)).replace("_", " ")


def acting_modules(with_experts: tuple[bool, ...], *, shared_expert: bool, post_ln: bool) -> frozenset[RecomputeModule]:
    """The parts that some layers have and that the backward can calculate again.

    Args:
        with_experts: for each of the layers, whether it has experts; () where none has.
        shared_expert: beside the experts is an MLP that every token passes.
        post_ln: norms give the stream itself, which is kept.
    """
    parts: dict[RecomputeModule, bool] = {
        "core_attention": True,  # where its backend keeps scores, which the keys do not tell
        "norm": not post_ln,
        "mlp_activation": shared_expert or not (with_experts and all(with_experts)),
        "moe": any(with_experts),
    }
    return frozenset(name for name, acts in parts.items() if acts)


def whole_layers(keys: StackKeys) -> tuple[int, int]:
    """Layers in a chunk, and how many of the first layers are recomputed as a whole (0 for none)."""
    number, method = keys.activations_checkpoint_num_layers, keys.activations_checkpoint_method
    if keys.activations_checkpoint_granularity != "full" or method is None or not number:
        return 1, 0
    number = min(number, keys.num_layers)
    return (number, keys.num_layers) if method == "uniform" else (1, number)


def last_chunk(keys: StackKeys) -> int:
    """The first of the layers that the backward begins with: the last one, or the last chunk that is recomputed."""
    last, (chunk, _) = keys.num_layers - 1, whole_layers(keys)
    return last - last % chunk


def modules_of(keys: StackKeys) -> frozenset[RecomputeModule]:
    """The parts of a layer that the keys name, with experts or without."""
    named: set[RecomputeModule] = set(keys.activations_checkpoint_modules or ())
    if keys.activations_checkpoint_modules is None and keys.activations_checkpoint_granularity == "selective":
        named.add("core_attention")
    if keys.moe_layer_recompute:
        named.add("moe")
    return frozenset(named)


def offload_slice(keys: StackKeys) -> OffloadSlice | None:
    """What the keys keep in host memory, None for nothing.

    Args:
        keys: of the stack; the rules have found no error in them.
    """
    layers = min(offloaded_layers(keys), last_chunk(keys))
    if not layers:
        return None
    return OffloadSlice(layers=layers, activations=keys.cpu_offloading_activations, weights=keys.cpu_offloading_weights)


def offloaded_layers(keys: StackKeys) -> int:
    """How many of the first layers are offloaded; 0 for none."""
    if not keys.cpu_offloading:
        return 0
    return keys.num_layers - 1 if keys.cpu_offloading_num_layers is None else keys.cpu_offloading_num_layers
