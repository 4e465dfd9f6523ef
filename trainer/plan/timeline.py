"""Memory timeline of a training step: memory at every moment that can be the peak.

A step is: forward through all layers, the loss, backward through all layers in reverse order, the update. Saved
activations grow during the forward pass and shrink during the backward pass, while gradients grow; so the peak is at
the loss, at the beginning of the backward pass, in a recomputed layer, or when all gradients exist. On a rank of a
pipeline the same holds for each of its stages, while other micro batches are in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...models.lm_head import LossMemory, token_loss_memory
from ...models.model_cost import (
    decoder_embedding_grad_is_separate,
    embedding_grad_is_sum,
    embedding_saved_bytes,
    head_saved_bytes,
    stage_traffic,
)
from ...models.parallel.schedule import most_held
from ...models.stack import final_norm_saved_bytes
from ...models.t5 import encoder_output_bytes
from .data_exchange import gradient_sums, uses_copy_engines
from .layers import LayerInStack, StackOnDevice, layers_in_order, without_shared_experts
from .run_inputs import RunInputs
from .state_memory import PersistentState, persistent_state, update_working_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Device memory at one moment besides the held state, in bytes.

    Attributes:
        where: description of the moment.
        gradients: computed so far.
        sums: of them over ranks, on the stream of communication.
        activations: saved for the backward pass.
        recomputed: recomputed activations.
        logits: memory of the loss.
        working: all other memory of the operations at that moment.
        offloaded_weights: weights of the held state that are offloaded to the host.
    """

    where: str
    gradients: int = 0
    sums: int = 0
    activations: int = 0
    recomputed: int = 0
    logits: int = 0
    working: int = 0
    offloaded_weights: int = 0

    @property
    def total(self) -> int:
        """Bytes in addition to the held state."""
        held = self.gradients + self.sums + self.activations + self.recomputed
        return held + self.logits + self.working - self.offloaded_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of a run on CUDA.

    Attributes:
        persistent: memory that exists during the whole run.
        peak: moment with the most memory.
        moments: all moments that can be the peak.
        layers: of all stacks; of a pipeline those in micro batches that do not recompute all of them.
        in_flight: most passes of micro batches through stages of the rank whose backward pass is still to come.
    """

    persistent: PersistentState
    peak: Moment
    moments: tuple[Moment, ...]
    layers: tuple[LayerInStack, ...]
    in_flight: int

    @property
    def total(self) -> int:
        """Bytes allocated at the peak."""
        return self.persistent.total + self.peak.total

    @property
    def reserved(self) -> int:
        """Bytes held by the allocator at the peak, without fragments: it gives memory of a stream to no other one."""
        sums = max(moment.sums for moment in self.moments)
        return self.persistent.total + sums + max(moment.total - moment.sums for moment in self.moments)


def memory_plan(run: RunInputs) -> MemoryPlan:
    """Estimate the memory of a rank of a run."""
    layers, all_recomputed = layers_in_order(run), run.with_all_recomputed
    stages = _stage_memories(run, layers)
    recomputed = stages if all_recomputed is run else _stage_memories(all_recomputed)
    in_flight = _hold_others(run, stages, recomputed)
    moments = [*_moments(run, stages, layers)]
    if all_recomputed is not run:
        moments += _moments(all_recomputed, recomputed, layers)
    peak = max(moments, key=lambda moment: moment.total)
    held = persistent_state(run, without_shared_experts(run, layers))
    return MemoryPlan(persistent=held, peak=peak, moments=tuple(moments), layers=layers, in_flight=in_flight)


def _stage_memories(run: RunInputs, layers: Sequence[LayerInStack] = ()) -> list[StageMemory]:
    layers = layers or layers_in_order(run)
    return [StageMemory(run, number, layers) for number in range(len(run.stages))]


class StageMemory:
    """Activations of a pipeline stage, or of a stack without a pipeline, for one micro batch.

    Args:
        run: the rank.
        number: of the stage among those of the rank.
        layers: layers of all of them.

    Attributes:
        stage: the stage.
        inputs: its layers.
        layers: memory of these on the device.
        ends: bytes saved outside of the layers up to the backward pass of the first of them.
        saved: bytes saved between forward and backward pass.
        loss_kept: those of them that head and loss save, on a rank of a pipeline, where other passes may come between.
        others: bytes of other passes in flight, at most, when the backward pass runs; set by `_hold_others`.
        offloaded_below: offloaded weights of the stacks before it.
    """

    def __init__(self, run: RunInputs, number: int, layers: Sequence[LayerInStack]) -> None:
        self.stage, self.inputs = run.stages[number], run.stacks[number]
        own = [layer for layer in layers if layer.stack is self.inputs]
        self.layers = StackOnDevice(own)
        self.ends = embedding_saved_bytes(run.family, self.inputs)
        self.saved = self.ends + self.layers.after_forward + final_norm_saved_bytes(self.inputs)
        self.others = self.offloaded_below = self.loss_kept = 0
        if run.pipeline_rank is not None:
            held = self._held_messages(own)
            self.ends += held
            if self.stage.last:
                self.loss_kept = loss_memory(run).kept + head_saved_bytes(run.family, self.inputs)
            self.saved += held + self.loss_kept
        elif not self.stage.last:
            self.saved += encoder_output_bytes(self.inputs)

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream."""
        return self.inputs.residual_elements * self.inputs.widths.residual

    @property
    def reads_encoder(self) -> bool:
        """True if its layers have cross-attention."""
        return self.inputs.cross is not None

    def _held_messages(self, own: Sequence[LayerInStack]) -> int:
        """Bytes that torch's pipelining holds from the forward to the backward pass of a stage: input and output."""
        first_saves_input = own and (own[0].is_recomputed or own[0].memory.saves_input) and own[0].saved_bytes > 0
        held = 0 if self.stage.begins or first_saves_input else self.stream_bytes
        held += encoder_output_bytes(self.inputs) if self.reads_encoder else 0  # which is passed on
        if self.stage.last:
            return held
        whole = self.inputs.outer_elements * self.inputs.widths.residual
        return held + (whole if self.stage.ends else self.stream_bytes)


def _hold_others(run: RunInputs, stages: Sequence[StageMemory], recomputed: Sequence[StageMemory]) -> int:
    """Set what other passes hold during the backward pass of each stage, and of those that recompute all layers; return
    the most passes in flight.
    """
    by_number = {each.stage.number: place for place, each in enumerate(stages)}
    all_recomputed = [run.fully_recomputed(place) for place in by_number.values()]
    held = 0
    for number, micro_batch, is_backward in run.pass_order:
        place = by_number[number]
        each = (recomputed if micro_batch in all_recomputed[place] else stages)[place]
        held += -each.saved if is_backward else each.saved
        if is_backward:
            each.others = max(each.others, held)
    for below, each in pairwise(stages):
        each.offloaded_below = below.offloaded_below + below.layers.offloaded_weights
    return most_held(run.pass_order, dict.fromkeys(by_number, 1))


def _moments(run: RunInputs, stages: Sequence[StageMemory], layers: tuple[LayerInStack, ...]) -> Iterator[Moment]:
    family, gradients, gathered = run.family, _Gradients(run), _gathered(run, layers)
    unsharded = gathered + _unreduced(run, layers)
    entries = 0 if run.is_frozen else family.padded_vocab_size * run.stacks[0].stack.hidden_size
    embedding = entries * run.widths.weights
    pending = 0
    for number in reversed(range(len(stages))):
        each = stages[number]
        if run.pipeline_rank is not None:
            gradients.begin_stage()
        if each.stage.last:
            loss = loss_memory(run)
            for where, logits in (("the loss", loss.forward), ("the loss, backward", loss.backward)):
                yield Moment(
                    where=where,
                    gradients=gradients.before,
                    sums=gradients.sums,
                    activations=each.others + each.saved - each.loss_kept,
                    logits=logits,
                    working=gathered + head_saved_bytes(family, each.inputs),
                    offloaded_weights=each.offloaded_below + each.layers.offloaded_weights,
                )
            gradients.compute(loss.num_parameters)
            # the head's part of a tied embedding's gradient is separate until the embedding's part exists; the computed
            # gradients count it, unless gradients are added to those of the micro batch before
            pending = embedding * (family.tied and family.stacks[-1].begins and gradients.adds_in_place)
        # the gradient of the encoder's output is accumulated over the cross-attentions
        encoded = encoder_output_bytes(each.inputs) if each.reads_encoder else 0
        yield from _backward_moments(each, gradients, unsharded + pending + 2 * encoded + _in_transit(run, each))
        if not each.stage.begins:
            continue
        if each.stage.starts:
            working = embedding * embedding_grad_is_sum(family) + pending * gradients.adds_in_place
            working += gradients.reducing(entries) + each.stream_bytes + unsharded
            yield Moment(
                where="the embeddings, backward",
                gradients=gradients.all,
                sums=gradients.sums,
                activations=each.others,
                working=working,
            )
            continue
        yield Moment(
            where=f"the embeddings of the {each.inputs.name}, backward",
            gradients=gradients.computed,
            sums=gradients.sums,
            activations=each.others,
            working=embedding + pending + unsharded + encoded,
            offloaded_weights=each.offloaded_below,
        )
        if decoder_embedding_grad_is_separate(family):
            pending = embedding
        elif not family.tied:
            gradients.compute(entries)
    yield Moment(
        where="the update",
        gradients=gradients.at_update,
        sums=gradients.all_sums,
        working=update_working_bytes(run),
    )


def _in_transit(run: RunInputs, each: StageMemory) -> int:
    """Bytes of messages between pipeline stages besides those that are saved: one arrives, one is on its way."""
    return 0 if run.pipeline_rank is None else sum(found.num_bytes for found in stage_traffic(each.inputs))


def _backward_moments(each: StageMemory, gradients: _Gradients, working: int) -> Iterator[Moment]:
    """Yield the moments of the backward pass of the layers of a stage; others need these bytes of working memory."""
    for layer in reversed(each.layers.layers):
        if layer.skips_backward:
            continue
        parameters = layer.memory.num_parameters
        recomputed, own_working = layer.backward_peak
        yield Moment(
            where=f"{layer.name}, backward",
            gradients=gradients.computed,
            sums=gradients.sums,
            activations=each.others + each.ends + each.layers.during_backward(layer.index),
            recomputed=recomputed,
            working=working + own_working + gradients.adding(parameters) + gradients.reducing(parameters),
            offloaded_weights=each.offloaded_below + each.layers.offloaded_weights_at(layer.index),
        )
        gradients.compute(parameters)


def loss_memory(run: RunInputs) -> LossMemory:
    """Return the memory of the loss of one micro batch."""
    family, cuda = run.family, run.target.device == "cuda"
    hidden = run.stacks[-1].stack.hidden_size
    return token_loss_memory(
        run.output_tokens,
        family.padded_vocab_size,
        hidden,
        run.widths,
        frozen=run.is_frozen,
        cuda=cuda,
        own=family.own_loss,
    )


class _Gradients:
    """Gradient memory of a rank during a micro batch after the first, or during the only one.

    Attributes:
        before: bytes before the backward pass.
        all: bytes after the backward pass.
        all_sums: bytes of sums over ranks after it, in memory of their own.
        at_update: bytes of gradients during the update.
        sums: bytes of those sums at this point of the backward pass.
        adds_in_place: each gradient is added to that of the previous micro batches as soon as it is computed.
    """

    def __init__(self, run: RunInputs) -> None:
        own, experts = gradient_sums(run), gradient_sums(run, experts=True)
        parameters, width = run.counts.total, run.widths.weights
        self._trained_fraction = run.counts.trainable / parameters
        shares = ((own, 1 - run.expert_parameters / parameters), (experts, run.expert_parameters / parameters))
        # 16-bit gradients are added to fp32 sums at once (several ranks) or after the micro batch, and freed
        self._width = sum(share * each.gradient for each, share in shares)
        self._sum_width = sum(share * each.summed for each, share in shares)
        self._reduce_copy_width = sum(share * each.copied for each, share in shares)
        uses_fp32_sums = width < 4 and run.precision.main_weights
        self.all, self.all_sums = self.of(parameters), self._sums_of(parameters)
        # a sum in new memory replaces its gradient
        self.at_update = 0 if self.all_sums else self.all
        self.adds_in_place = run.micro_batches > 1 and not uses_fp32_sums
        self.before = self.all if self.adds_in_place else 0
        self._adding_width = width
        self._computed = 0
        # sums of the rows of a rank are added to those of the micro batch before
        self._sums_before = self.adds_in_place and own.sharded
        self.sums = self.all_sums if self._sums_before else 0
        # passes of other micro batches of a pipeline have ended when gradients are summed over ranks
        self._sums_at_end = run.pipeline_rank is not None and not own.sharded

    @property
    def computed(self) -> int:
        """Bytes at this point of the backward pass."""
        return max(self.before, self._computed)

    def begin_stage(self) -> None:
        """Begin the backward pass of a pipeline stage, when those of other stages have been added up."""
        self._computed = 0

    def compute(self, parameters: int) -> None:
        """Add the gradients of `parameters`."""
        self._computed += self.of(parameters)
        self.sums += 0 if self._sums_at_end or self._sums_before else self._sums_of(parameters)

    def of(self, parameters: int) -> int:
        """Bytes of the gradients of `parameters`, of which only the trained fraction has any, once computed."""
        return int(int(parameters * self._trained_fraction) * self._width)

    def _sums_of(self, parameters: int) -> int:
        return int(int(parameters * self._trained_fraction) * self._sum_width)

    def adding(self, parameters: int) -> int:
        """Bytes of the gradients of a layer while they are added to those of the previous micro batches."""
        return int(parameters * self._trained_fraction) * self._adding_width if self.adds_in_place else 0

    def reducing(self, parameters: int) -> int:
        """Bytes of copies of a layer's gradients in the dtype of the reduction over ranks, and of their sums."""
        return int(int(parameters * self._trained_fraction) * self._reduce_copy_width)


def _gathered(run: RunInputs, layers: tuple[LayerInStack, ...]) -> int:
    """Bytes of weights and gradients that FSDP2 holds unsharded temporarily in torch's allocator: of two layers."""
    layout = run.layout
    if layout is None or layout.replicates_weights or uses_copy_engines(run):
        return 0
    parameters = [layer.memory.num_parameters for layer in layers]
    if run.mesh.expert > 1 and run.mesh.world_size // run.mesh.pipeline == run.mesh.expert:
        parameters = without_shared_experts(run, layers)  # no unit has experts that no other rank has
    largest, width = max(parameters, default=0), run.widths.weights
    return 2 * largest * width + largest * (width + gradient_sums(run).sent)


def _unreduced(run: RunInputs, layers: tuple[LayerInStack, ...]) -> int:
    """Bytes of the gradients of the last two layers, which are held while they are summed into a rank's rows."""
    sums = gradient_sums(run)
    if not sums.sharded or sums.gradient:  # whose gradients are all kept
        return 0
    trained = run.counts.trainable / run.counts.total
    return int(2 * max((layer.memory.num_parameters for layer in layers), default=0) * trained) * run.widths.weights
