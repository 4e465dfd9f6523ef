"""The memory of a step at the moments where it may be highest, from which the peak follows.

A step is: forward through all layers, the loss, backward through all layers in reverse order, the update. What layers
keep grows during the forward pass and shrinks during the backward, while gradients grow; so the peak is at the loss, at
the beginning of the backward pass, in a layer that is recomputed, or where all gradients are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from ...models.config.memory import RecomputeModule
from ...models.config.memory_slice import OffloadSlice, RecomputeSlice
from ...models.memory.offload_activations import LEAST_SIZE
from .embeddings_and_loss import (
    decoder_table_waits,
    embedding_kept,
    final_norm_kept,
    loss_memory,
    memory_kept,
    table_is_read_twice,
    transform_kept,
)
from .inputs import RunFacts, StackFacts
from .layer_memory import LayerMemory, layer_memory
from .state_memory import HeldState, adds_up, held_state, parameters_of, summed_apart, trained_of, update_working

_NOTHING = RecomputeSlice(chunk=1, layers=0, modules=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What there is on the device at one moment besides the held state, in bytes.

    Attributes:
        where: the moment in words.
        gradients: that have been calculated.
        activations: kept for the backward pass.
        recomputed: activations that were made again.
        logits: what the loss needs.
        working: everything else that the operations of the moment need.
        away: bytes of weights, of those that are held, which are on the host.
    """

    where: str
    gradients: int = 0
    activations: int = 0
    recomputed: int = 0
    logits: int = 0
    working: int = 0
    away: int = 0

    @property
    def total(self) -> int:
        """What it adds to the held state."""
        return self.gradients + self.activations + self.recomputed + self.logits + self.working - self.away


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayer:
    """A layer in its stack.

    Attributes:
        name: in words.
        stack: the stack.
        number: of the layer.
        memory: what it needs.
        recompute: what its stack recomputes.
    """

    name: str
    stack: StackFacts
    number: int
    memory: LayerMemory
    recompute: RecomputeSlice

    @property
    def is_idle(self) -> bool:
        """In the backward pass, which ends behind it: neither it nor what it reads is trained.

        Layers that are recomputed together all have a backward pass, or none has.
        """
        begins = self.stack.begins
        return self.number < begins - begins % (self.recompute.chunk if begins < self.recompute.layers else 1)

    @property
    def is_recomputed(self) -> bool:
        """As a whole."""
        return self.number < self.recompute.layers and not self.is_idle

    @property
    def offload(self) -> OffloadSlice | None:
        """What its stack keeps in host memory, if anything."""
        return self.stack.stack.offload if self.on_cuda else None

    @property
    def modules(self) -> frozenset[RecomputeModule]:
        """The parts that its backward makes again; none where it is recomputed as a whole."""
        return self.stack.stack.made_again(self.number, offloads=self.on_cuda)

    @property
    def begins_chunk(self) -> bool:
        """Whether it is the first of those that are recomputed together."""
        return self.is_recomputed and self.number % self.recompute.chunk == 0

    @property
    def kept(self) -> int:
        """Bytes it keeps from its forward to its backward pass, its input included."""
        if self.is_idle:
            return 0
        if self.is_recomputed:
            return self.memory.boundary if self.begins_chunk else 0
        own = self.memory.boundary if self.memory.keeps_boundary else 0
        return own + self.memory.kept_with(self.modules)

    @property
    def stays(self) -> int:
        """Bytes of what it keeps that are too small to be offloaded."""
        if self.is_idle:
            return 0
        if self.is_recomputed:
            return self.kept if self.kept < LEAST_SIZE else 0
        modules = self.modules
        kept = (each.size for each in self.memory.kept if not each.is_made_again(modules))
        return sum(size for size in kept if size < LEAST_SIZE)

    @property
    def on_cuda(self) -> bool:
        """Whether it runs on a GPU, without which nothing is offloaded."""
        return self.stack.attention.call.device == "cuda"

    @property
    def in_backward(self) -> tuple[int, int]:
        """What its backward pass makes again, and what it needs besides, in bytes, when they are most together.

        Of layers that are recomputed together, those before it are there again too.
        """
        if not self.is_recomputed:
            return self.memory.in_backward(self.modules)
        again, working = self.memory.whole_in_backward()
        own_input = self.memory.boundary if self.memory.keeps_boundary else 0
        before = self.number % self.recompute.chunk
        return again + before * (self.memory.all_kept + own_input), working


def placed_layers(facts: RunFacts) -> tuple[PlacedLayer, ...]:
    """All layers, in the order data goes through them."""
    found: list[PlacedLayer] = []
    for stack in facts.stacks:
        moe = stack.stack.moe
        kinds = {experts: layer_memory(stack, experts=experts) for experts in set(moe.layers if moe else (False,))}
        for number in range(stack.stack.num_layers):
            memory = kinds[moe.layers[number] if moe else False]
            name = f"layer {number}" + (f" of the {stack.name}" if stack.name else "")
            recompute = stack.stack.recompute or _NOTHING
            found.append(PlacedLayer(name=name, stack=stack, number=number, memory=memory, recompute=recompute))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of a run on CUDA.

    Attributes:
        held: what is there all the time.
        peak: the moment at which there is most.
        moments: all that were looked at.
        layers: of the model.
    """

    held: HeldState
    peak: Moment
    moments: tuple[Moment, ...]
    layers: tuple[PlacedLayer, ...]

    @property
    def total(self) -> int:
        """Bytes that the allocator has given out at the peak."""
        return self.held.total + self.peak.total


def memory_plan(facts: RunFacts) -> MemoryPlan:
    """The memory of a run."""
    layers = placed_layers(facts)
    moments = tuple(_moments(facts, layers))
    peak = max(moments, key=lambda moment: moment.total)
    return MemoryPlan(held=held_state(facts), peak=peak, moments=moments, layers=layers)


def _moments(facts: RunFacts, layers: tuple[PlacedLayer, ...]) -> Iterator[Moment]:
    gradients, loss = _Gradients(facts), loss_memory(facts)
    gathered, memory = _gathered(facts, layers), memory_kept(facts)
    stacks = [_StackOnDevice([layer for layer in layers if layer.stack is stack]) for stack in facts.stacks]
    around = sum(embedding_kept(facts, stack) for stack in facts.stacks)
    after = [final_norm_kept(stack) for stack in facts.stacks]
    everything = around + memory + sum(after) + sum(stack.after_forward for stack in stacks)
    away = sum(stack.weights_away for stack in stacks)
    for where, logits in (("the loss", loss.forward), ("the loss, backward", loss.backward)):
        yield Moment(
            where=where,
            gradients=gradients.before,
            activations=everything,
            logits=logits,
            working=gathered + transform_kept(facts),
            away=away,
        )
    have = gradients.of(loss.parameters)
    entries = 0 if facts.keys.peft.is_on else facts.family.padded_vocab_size * layers[0].stack.stack.hidden_size
    table = entries * facts.widths.weights
    # a gradient of a table that is read twice waits for the other, which `have` counts but for what is there before
    waiting = table * (facts.family.tied and gradients.adds_in_place)
    for number in reversed(range(len(stacks))):
        stack, below = stacks[number], stacks[:number]
        reads_memory = number > 0
        under = around + sum(each.after_forward for each in below) + (memory + sum(after[:number]) if below else 0)
        away_below = sum(each.weights_away for each in below)
        for layer in reversed(stack.layers):
            if layer.is_idle:
                continue
            parameters = layer.memory.parameters
            again, working = layer.in_backward
            yield Moment(
                where=f"{layer.name}, backward",
                gradients=max(gradients.before, have),
                activations=under + stack.during_backward(layer.number),
                recomputed=again,
                # the gradient of what cross-attention reads is added up over the layers
                working=working
                + gathered
                + gradients.adding(parameters)
                + gradients.summing(parameters)
                + 2 * memory * reads_memory
                + waiting,
                away=away_below + stack.weights_away_at(layer.number),
            )
            have += gradients.of(parameters)
        if below:
            yield Moment(
                where=f"the embeddings of the {stack.layers[0].stack.name}, backward",
                gradients=max(gradients.before, have),
                activations=under,
                working=table + waiting + gathered + memory,
                away=away_below,
            )
            if decoder_table_waits(facts):
                waiting = table
            elif not facts.family.tied:
                have += gradients.of(entries)
    yield Moment(
        where="the embeddings, backward",
        gradients=gradients.all,
        working=table * table_is_read_twice(facts)
        + waiting * gradients.adds_in_place
        + gradients.summing(entries)
        + layers[0].memory.boundary
        + gathered,
    )
    yield Moment(where="the update", gradients=gradients.all, working=update_working(facts))


class _StackOnDevice:
    """The layers of a stack and what of them is on the device, where some are offloaded.

    Of L layers the first N are: see `models.offload` and `models.offload_weights` for when they leave and come back.

    Args:
        layers: all of them, in order.

    Attributes:
        layers: the same.
        after_forward: bytes kept on the device when the forward pass has ended.
        weights_away: bytes of weights that are on the host then.
    """

    def __init__(self, layers: list[PlacedLayer]) -> None:
        self.layers = layers
        offload = layers[0].offload
        number = offload.layers if offload is not None else 0
        last = self._together(len(layers) - 1)
        self._offloaded = number if offload is not None and offload.activations else 0
        self._ahead = max(layers[0].recompute.chunk, len(layers) - number - 1)
        width = layers[0].stack.widths.weights
        self._weights = [
            layer.memory.parameters * width if offload is not None and offload.weights and layer.number < offload.layers
            else 0
            for layer in layers
        ]  # fmt: skip
        self._left = max(0, min(last.start, last.stop - max(2, len(layers) - number) + 1))
        self.weights_away = sum(self._weights[: self._left])
        self._kept = [0, *accumulate(layer.kept for layer in layers)]
        self._stays = [0, *accumulate(layer.stays for layer in layers[: self._offloaded])]
        self.after_forward = self._on_device(len(layers), self._offloaded)

    def during_backward(self, number: int) -> int:
        """Bytes kept on the device when the backward pass of layer `number` begins."""
        first = self._together(number).start
        return self._on_device(number + 1, max(0, min(self._offloaded, first - self._ahead)))

    def weights_away_at(self, number: int) -> int:
        """Bytes of weights on the host when the backward pass of layer `number` begins."""
        together = self._together(number)  # theirs have come back, and those of as many layers before them
        return sum(self._weights[: max(min(self._left, together.start - len(together)), 0)])

    def _together(self, number: int) -> range:
        """The layers that run together with layer `number`: its chunk, or it alone."""
        layer = self.layers[number]
        if not layer.is_recomputed:
            return range(number, number + 1)
        start = number - number % layer.recompute.chunk
        return range(start, min(start + layer.recompute.chunk, len(self.layers)))

    def _on_device(self, layers: int, away: int) -> int:
        """What the first layers keep on the device, of which the first `away` have sent what is large enough."""
        return self._stays[away] + self._kept[layers] - self._kept[away]


class _Gradients:
    """The gradients of a rank during a micro batch after the first.

    Attributes:
        before: bytes there are before the backward pass.
        all: bytes there are after it.
        adds_in_place: whether those of a micro batch are added to those before it as soon as they are there.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._width = facts.widths.weights
        self._kept = facts.layout is None or facts.layout.whole_weights
        # ranks with whole weights add a layer's gradients to the sums as soon as they are there
        self._leave = facts.layout is not None and self._kept and adds_up(facts)
        self._shards = facts.shards
        parameters = parameters_of(facts)
        self._trained = trained_of(facts) / parameters
        # narrow gradients are added to the sums at once (ranks) or after the micro batch, and dropped
        narrow = self._width < 4 and facts.precision.main_weights
        accumulates = facts.micro_batches > 1
        self._summed_in = facts.reduce_width if summed_apart(facts) else 0
        self.all = self.of(parameters)
        self.adds_in_place = accumulates and not narrow
        self.before = self.all if self.adds_in_place else 0

    def of(self, parameters: int) -> int:
        """Bytes that the gradients of some parameters stay, once they are calculated; of a frozen model their part."""
        if self._leave:
            return 0
        return int(parameters * self._trained) * self._width // (1 if self._kept else self._shards)

    def adding(self, parameters: int) -> int:
        """Bytes of the gradients of a layer while they are added to those of the micro batch before."""
        return int(parameters * self._trained) * self._width if self.adds_in_place else 0

    def summing(self, parameters: int) -> int:
        """Bytes of copies of the gradients of a layer in which they are summed over ranks."""
        return int(parameters * self._trained) * self._summed_in


def _gathered(facts: RunFacts, layers: tuple[PlacedLayer, ...]) -> int:
    """Bytes of whole weights and whole gradients that FSDP2 makes for a while: of all layers, or of two."""
    layout = facts.layout
    if layout is None or layout.whole_weights:
        return 0
    largest = max(layer.memory.parameters for layer in layers)
    whole = parameters_of(facts) if not layout.reshard_after_forward else 2 * largest
    width = facts.widths.weights
    return whole * width + largest * (width + facts.reduce_width)
