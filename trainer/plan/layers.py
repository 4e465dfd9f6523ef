"""Layers of a rank, their memory, and what of it is on the device with recomputation and CPU offloading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...models.config.memory import OffloadSlice, RecomputeModule, RecomputeSlice
from ...models.layer_cost import layer_memory
from ...models.layers.cost import LayerMemory, StackInputs
from ...models.memory.offload_activations import MIN_OFFLOAD_BYTES
from .run_inputs import RunInputs

_NO_RECOMPUTE = RecomputeSlice(chunk=1, layers=0, modules=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInStack:
    """Layer `number` of its `stack`, with this `memory`; `index` is its position in the stack or its pipeline stage."""

    index: int
    number: int
    stack: StackInputs
    memory: LayerMemory

    @property
    def name(self) -> str:
        """Description such as `layer 3 of the encoder`."""
        return f"layer {self.number}" + (f" of the {self.stack.name}" if self.stack.name else "")

    @property
    def recompute(self) -> RecomputeSlice:
        """Activation checkpointing of its stack."""
        return self.stack.stack.recompute or _NO_RECOMPUTE

    @property
    def skips_backward(self) -> bool:
        """True if it has no backward pass: neither its parameters nor any before it are trained.

        Layers recomputed as one chunk either all have a backward pass or none has.
        """
        first = self.stack.first_trained_layer
        return self.index < first - first % (self.recompute.chunk if first < self.recompute.layers else 1)

    @property
    def is_recomputed(self) -> bool:
        """True if the whole layer is recomputed."""
        return self.index < self.recompute.layers and not self.skips_backward

    @property
    def offload(self) -> OffloadSlice | None:
        """CPU offloading of its stack; None without it."""
        return self.stack.stack.offload if self.on_cuda else None

    @property
    def recomputed_modules(self) -> frozenset[RecomputeModule]:
        """Modules that its backward pass recomputes; empty if the whole layer is recomputed."""
        return self.stack.stack.recomputed_modules(self.index, offloading=self.on_cuda)

    @property
    def begins_chunk(self) -> bool:
        """True if it is the first layer of a recomputed chunk."""
        return self.is_recomputed and self.index % self.recompute.chunk == 0

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for its backward pass, including its input."""
        if self.skips_backward:
            return 0
        if self.is_recomputed:
            return self.memory.input_bytes if self.begins_chunk else 0
        own = self.memory.input_bytes if self.memory.saves_input else 0
        return own + self.memory.saved_bytes_with(self.recomputed_modules)

    @property
    def not_offloaded_bytes(self) -> int:
        """Bytes of its saved tensors that are too small to be offloaded."""
        if self.skips_backward:
            return 0
        if self.is_recomputed:
            return self.saved_bytes if self.saved_bytes < MIN_OFFLOAD_BYTES else 0
        modules = self.recomputed_modules
        kept = (each.num_bytes for each in self.memory.saved if not each.is_recomputed(modules))
        return sum(size for size in kept if size < MIN_OFFLOAD_BYTES)

    @property
    def on_cuda(self) -> bool:
        """True if the run is on a GPU; otherwise nothing is offloaded."""
        return self.stack.attention.call.device == "cuda"

    @property
    def backward_peak(self) -> tuple[int, int]:
        """Recomputed bytes and working bytes at the peak of its backward pass.

        If it is recomputed in a chunk, the activations of the earlier layers of that chunk exist as well.
        """
        if not self.is_recomputed:
            return self.memory.backward_peak(self.recomputed_modules)
        own, working = self.memory.full_recompute_backward_peak()
        own_input = self.memory.input_bytes if self.memory.saves_input else 0
        before = self.index % self.recompute.chunk
        return own + before * (self.memory.saved_bytes + own_input), working


def layers_in_order(run: RunInputs) -> tuple[LayerInStack, ...]:
    """Return the layers of all stacks, or pipeline stages of the rank, in forward order."""
    found: list[LayerInStack] = []
    for stage, stack in zip(run.stages, run.stacks, strict=True):
        moe, fp8 = stack.stack.moe, stack.stack.fp8
        kinds: dict[tuple[bool, bool], LayerMemory] = {}
        for index, number in enumerate(stage.layers):
            kind = moe is not None and moe.layers[index], fp8 is not None and fp8.layers[index]
            if kind not in kinds:
                kinds[kind] = layer_memory(stack, is_moe=kind[0], is_fp8=kind[1])
            found.append(LayerInStack(index=index, number=number, stack=stack, memory=kinds[kind]))
    return tuple(found)


def without_shared_experts(run: RunInputs, layers: Sequence[LayerInStack]) -> list[int]:
    """Return the parameters of each layer of a rank, without experts that ranks share."""
    with_experts = sum(layer.memory.has_experts for layer in layers)
    return [
        layer.memory.num_parameters - (run.expert_parameters // with_experts if layer.memory.has_experts else 0)
        for layer in layers
    ]


class StackOnDevice:
    """Device memory of the layers of a stack, perhaps none, with CPU offloading.

    The first N of L layers are offloaded; `offload_activations.py` and `offload_weights.py`
    in `models/memory/` define when they are copied.

    Args:
        layers: all layers in forward order.

    Attributes:
        layers: all layers in forward order.
        after_forward: bytes of activations on the device at the end of the forward pass.
        offloaded_weights: bytes of weights on the host at the end of the forward pass.
    """

    def __init__(self, layers: list[LayerInStack]) -> None:
        self.layers = layers
        offload = layers[0].offload if layers else None
        number = offload.layers if offload is not None else 0
        last = self._chunk_of(len(layers) - 1) if layers else range(0)
        self._offloaded = number if offload is not None and offload.activations else 0
        self._ahead = max(layers[0].recompute.chunk if layers else 1, len(layers) - number - 1)
        width = layers[0].stack.widths.weights if layers else 0
        on_host = offload.layers if offload is not None and offload.weights else 0
        self._weights = [
            layer.memory.num_parameters * width if layer.index < on_host else 0
            for layer in layers
        ]  # fmt: skip
        self._num_weights_offloaded = max(0, min(last.start, last.stop - max(2, len(layers) - number) + 1))
        self.offloaded_weights = sum(self._weights[: self._num_weights_offloaded])
        self._saved = [0, *accumulate(layer.saved_bytes for layer in layers)]
        self._not_offloaded = [0, *accumulate(layer.not_offloaded_bytes for layer in layers[: self._offloaded])]
        self.after_forward = self._on_device(len(layers), self._offloaded)

    def during_backward(self, number: int) -> int:
        """Bytes of activations on the device when the backward pass of layer `number` begins."""
        first = self._chunk_of(number).start
        return self._on_device(number + 1, max(0, min(self._offloaded, first - self._ahead)))

    def offloaded_weights_at(self, number: int) -> int:
        """Bytes of weights on the host when the backward pass of layer `number` begins."""
        chunk = self._chunk_of(number)  # its weights have been copied back, and those of the chunk before it
        return sum(self._weights[: max(min(self._num_weights_offloaded, chunk.start - len(chunk)), 0)])

    def _chunk_of(self, number: int) -> range:
        """Return the layers recomputed together with layer `number`: its chunk, or it alone."""
        layer = self.layers[number]
        if not layer.is_recomputed:
            return range(number, number + 1)
        start = number - number % layer.recompute.chunk
        return range(start, min(start + layer.recompute.chunk, len(self.layers)))

    def _on_device(self, layers: int, away: int) -> int:
        """Bytes the first `layers` layers save on the device if the first `away` of them are offloaded."""
        return self._not_offloaded[away] + self._saved[layers] - self._saved[away]
