"""Memory timeline of a training step: memory at every moment that can be the peak.

A step is: forward through all layers, the loss, backward through all layers in reverse order, the update. Saved
activations grow during the forward pass and shrink during the backward pass, while gradients grow; so the peak is at
the loss, at the beginning of the backward pass, in a recomputed layer, or when all gradients exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from ...models.config.memory import OffloadSlice, RecomputeModule, RecomputeSlice
from ...models.layer import layer_memory
from ...models.layers.cost import LayerMemory, StackInputs
from ...models.lm_head import LossMemory, token_loss_memory
from ...models.memory.offload_activations import MIN_OFFLOAD_BYTES
from ...models.model_cost import (
    decoder_embedding_grad_is_separate,
    embedding_grad_is_sum,
    embedding_saved_bytes,
    head_saved_bytes,
)
from ...models.parallel.vocabulary_loss import vocabulary_loss_bytes
from ...models.stack import final_norm_saved_bytes
from ...models.t5 import encoder_output_bytes
from .run_inputs import RunInputs
from .state_memory import (
    PersistentState,
    accumulates_in_fp32,
    persistent_state,
    reduces_in_other_dtype,
    update_working_bytes,
)

_NO_RECOMPUTE = RecomputeSlice(chunk=1, layers=0, modules=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Device memory at one moment besides the held state, in bytes.

    Attributes:
        where: description of the moment.
        gradients: computed so far.
        activations: saved for the backward pass.
        recomputed: recomputed activations.
        logits: memory of the loss.
        working: all other memory of the operations at that moment.
        offloaded_weights: weights of the held state that are offloaded to the host.
    """

    where: str
    gradients: int = 0
    activations: int = 0
    recomputed: int = 0
    logits: int = 0
    working: int = 0
    offloaded_weights: int = 0

    @property
    def total(self) -> int:
        """Bytes in addition to the held state."""
        return self.gradients + self.activations + self.recomputed + self.logits + self.working - self.offloaded_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInStack:
    """A layer with this `memory` at the position `index` of its stack."""

    index: int
    memory: LayerMemory

    @property
    def stack(self) -> StackInputs:
        """Its stack."""
        return self.memory.inputs

    @property
    def name(self) -> str:
        """Description such as `layer 3 of the encoder`."""
        return f"layer {self.index}" + (f" of the {self.stack.name}" if self.stack.name else "")

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
    """Return the layers of all stacks in forward order."""
    found: list[LayerInStack] = []
    for stack in run.stacks:
        moe = stack.stack.moe
        kinds = {experts: layer_memory(stack, is_moe=experts) for experts in set(moe.layers if moe else (False,))}
        for number in range(stack.stack.num_layers):
            found.append(LayerInStack(index=number, memory=kinds[moe.layers[number] if moe else False]))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of a run on CUDA.

    Attributes:
        persistent: memory that exists during the whole run.
        peak: moment with the most memory.
        moments: all moments that can be the peak.
        layers: of all stacks.
    """

    persistent: PersistentState
    peak: Moment
    moments: tuple[Moment, ...]
    layers: tuple[LayerInStack, ...]

    @property
    def total(self) -> int:
        """Bytes allocated at the peak."""
        return self.persistent.total + self.peak.total


def memory_plan(run: RunInputs) -> MemoryPlan:
    """Estimate the memory of a run."""
    layers = layers_in_order(run)
    moments = tuple(_moments(run, layers))
    peak = max(moments, key=lambda moment: moment.total)
    return MemoryPlan(persistent=persistent_state(run), peak=peak, moments=moments, layers=layers)


def _moments(run: RunInputs, layers: tuple[LayerInStack, ...]) -> Iterator[Moment]:
    family, gradients, gathered = run.family, _Gradients(run), _gathered(run, layers)
    stacks = [_StackOnDevice([layer for layer in layers if layer.stack is stack]) for stack in run.stacks]
    encoder_output = encoder_output_bytes(run.stacks[0]) if len(stacks) > 1 else 0
    embeddings_saved = sum(embedding_saved_bytes(family, stack) for stack in run.stacks)
    norms_saved = [final_norm_saved_bytes(stack) for stack in run.stacks]
    loss = loss_memory(run)
    saved = embeddings_saved + encoder_output + sum(norms_saved) + sum(stack.after_forward for stack in stacks)
    for where, logits in (("the loss", loss.forward), ("the loss, backward", loss.backward)):
        yield Moment(
            where=where,
            gradients=gradients.before,
            activations=saved,
            logits=logits,
            working=gathered + head_saved_bytes(family, run.stacks[0]),
            offloaded_weights=sum(stack.offloaded_weights for stack in stacks),
        )
    gradients.compute(loss.num_parameters)
    entries = 0 if run.is_frozen else family.padded_vocab_size * run.stacks[0].stack.hidden_size
    embedding = entries * run.widths.weights
    # the head's part of a tied embedding's gradient is separate until the embedding's part exists; the computed
    # gradients count it, unless gradients are added to those of the micro batch before
    pending = embedding * (family.tied and gradients.adds_in_place)
    for number in reversed(range(len(stacks))):
        stack, below = stacks[number], stacks[:number]
        saved_below = embeddings_saved + sum(each.after_forward for each in below)
        saved_below += encoder_output + sum(norms_saved[:number]) if below else 0
        offloaded_below = sum(each.offloaded_weights for each in below)
        # the gradient of the encoder's output is accumulated over the cross-attentions
        working = gathered + pending + 2 * encoder_output * bool(below)
        yield from _backward_moments(stack, gradients, saved_below, offloaded_below, working)
        if below:
            yield Moment(
                where=f"the embeddings of the {stack.layers[0].stack.name}, backward",
                gradients=gradients.computed,
                activations=saved_below,
                working=embedding + pending + gathered + encoder_output,
                offloaded_weights=offloaded_below,
            )
            if decoder_embedding_grad_is_separate(family):
                pending = embedding
            elif not family.tied:
                gradients.compute(entries)
    working = embedding * embedding_grad_is_sum(family) + pending * gradients.adds_in_place
    working += gradients.reducing(entries) + layers[0].memory.input_bytes + gathered
    yield Moment(where="the embeddings, backward", gradients=gradients.all, working=working)
    yield Moment(where="the update", gradients=gradients.all, working=update_working_bytes(run))


def _backward_moments(
    stack: _StackOnDevice, gradients: _Gradients, saved_below: int, offloaded_below: int, working: int
) -> Iterator[Moment]:
    """Yield the moments of the backward pass of a stack, with these bytes saved, offloaded and needed outside of it."""
    for layer in reversed(stack.layers):
        if layer.skips_backward:
            continue
        parameters = layer.memory.num_parameters
        recomputed, own_working = layer.backward_peak
        yield Moment(
            where=f"{layer.name}, backward",
            gradients=gradients.computed,
            activations=saved_below + stack.during_backward(layer.index),
            recomputed=recomputed,
            working=working + own_working + gradients.adding(parameters) + gradients.reducing(parameters),
            offloaded_weights=offloaded_below + stack.offloaded_weights_at(layer.index),
        )
        gradients.compute(parameters)


def loss_memory(run: RunInputs) -> LossMemory:
    """Return the memory of the loss of one micro batch."""
    family, cuda = run.family, run.target.device == "cuda"
    hidden = run.stacks[-1].stack.hidden_size
    if run.tensor_parallel:
        rows, itemsize = family.padded_vocab_size, run.widths.compute
        forward, backward = vocabulary_loss_bytes(
            run.output_tokens, rows, hidden, itemsize, frozen=run.is_frozen, cuda=cuda
        )
        number = 0 if run.is_frozen else rows * hidden
        return LossMemory(forward=forward, backward=backward, num_parameters=number)
    return token_loss_memory(
        run.output_tokens, family.padded_vocab_size, hidden, run.widths, frozen=run.is_frozen, cuda=cuda
    )


class _StackOnDevice:
    """Device memory of the layers of a stack with CPU offloading.

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
        offload = layers[0].offload
        number = offload.layers if offload is not None else 0
        last = self._chunk_of(len(layers) - 1)
        self._offloaded = number if offload is not None and offload.activations else 0
        self._ahead = max(layers[0].recompute.chunk, len(layers) - number - 1)
        width = layers[0].stack.widths.weights
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


class _Gradients:
    """Gradient memory of a rank during a micro batch after the first.

    Attributes:
        before: bytes before the backward pass.
        all: bytes after the backward pass.
        adds_in_place: each gradient is added to that of the previous micro batches as soon as it is computed.
    """

    def __init__(self, run: RunInputs) -> None:
        self._width = run.widths.weights
        self._replicated = run.layout is None or run.layout.replicates_weights
        # ranks with replicated weights add a layer's gradients to the fp32 sums at once and free them
        self._freed_at_once = run.layout is not None and self._replicated and accumulates_in_fp32(run)
        self._sharded = run.sharded
        parameters = run.counts.total
        self._trained_fraction = run.counts.trainable / parameters
        # 16-bit gradients are added to fp32 sums at once (several ranks) or after the micro batch, and freed
        uses_fp32_sums = self._width < 4 and run.precision.main_weights
        self._reduce_copy_width = run.reduce_itemsize if reduces_in_other_dtype(run) else 0
        self.all = self.of(parameters)
        self.adds_in_place = run.micro_batches > 1 and not uses_fp32_sums
        self.before = self.all if self.adds_in_place else 0
        self._computed = 0

    @property
    def computed(self) -> int:
        """Bytes at this point of the backward pass."""
        return max(self.before, self._computed)

    def compute(self, parameters: int) -> None:
        """Add the gradients of `parameters`."""
        self._computed += self.of(parameters)

    def of(self, parameters: int) -> int:
        """Bytes of the gradients of `parameters`, of which only the trained fraction has any, once computed."""
        if self._freed_at_once:
            return 0
        size = int(parameters * self._trained_fraction) * self._width
        return size if self._replicated else self._sharded(size)

    def adding(self, parameters: int) -> int:
        """Bytes of the gradients of a layer while they are added to those of the previous micro batches."""
        return int(parameters * self._trained_fraction) * self._width if self.adds_in_place else 0

    def reducing(self, parameters: int) -> int:
        """Bytes of copies of a layer's gradients in the dtype of the reduction over ranks."""
        return int(parameters * self._trained_fraction) * self._reduce_copy_width


def _gathered(run: RunInputs, layers: tuple[LayerInStack, ...]) -> int:
    """Bytes of weights and gradients that FSDP2 holds unsharded temporarily: of all layers, or of two."""
    layout = run.layout
    if layout is None or layout.replicates_weights:
        return 0
    largest = max(layer.memory.num_parameters for layer in layers)
    unsharded = run.counts.total if not layout.reshard_after_forward else 2 * largest
    width = run.widths.weights
    return unsharded * width + largest * (width + run.reduce_itemsize)
