"""Traffic that a rank sends to the others in a training step: bytes of each collective, and the links that carry them.

Parts of the model say what they send (`models.parallel.traffic`); this adds recomputation, the reduction of gradients
and the gathering of weights. Losses, norms and counts, a few numbers a step, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from ...models.layer_cost import layer_traffic
from ...models.layers.cost import StackInputs
from ...models.model_cost import outer_traffic, stage_traffic
from ...models.parallel.traffic import Collective, CollectiveKind, CommunicationAxis, Pass, bytes_by_collective
from ...models.stack import stack_traffic
from ...models.tensor_parallel import count_partial_gradients
from .data_exchange import exchange_of, gathered_slots, gradient_sums, num_data_ranks, uses_copy_engines
from .hardware import EFFICIENCY, GPUSpec
from .layers import LayerInStack, layers_in_order, without_shared_experts
from .run_inputs import RunInputs
from .state_memory import trained_fp8_weights

AXES: tuple[CommunicationAxis, ...] = get_args(CommunicationAxis)


def step_traffic(run: RunInputs, layers: Sequence[LayerInStack]) -> tuple[Collective, ...]:
    """Return all collectives of a step of a rank, with equal ones of a micro batch added up."""
    micro = [*_outer_traffic(run), *_sharded_data_traffic(run, layers)]
    step = [each.times(run.micro_batches) for each in micro]
    recomputed = {stage.number: len(run.fully_recomputed(place)) for place, stage in enumerate(run.stages)}
    step += _traffic_of_layers(run, layers, {number: run.micro_batches - n for number, n in recomputed.items()})
    if any(recomputed.values()):
        all_recomputed = run.with_all_recomputed
        step += _traffic_of_layers(all_recomputed, layers_in_order(all_recomputed), recomputed)
    step = [*_merged(step), *_update_traffic(run, layers)]
    return tuple(each for each in step if len(axis_ranks(run, each.axis)) > 1)


def _outer_traffic(run: RunInputs) -> Iterator[Collective]:
    """Yield the collectives outside of the layers in one micro batch."""
    if run.pipeline_rank is not None:
        yield from (each for stack in run.stacks for each in stage_traffic(stack))
    if run.mesh.tensor == run.mesh.context == run.mesh.expert == 1:
        return
    for stack in run.stacks:
        yield from stack_traffic(stack)
    yield from outer_traffic(run.family, run.stacks, run.batch_spec, cuda=run.target.device == "cuda")


def _traffic_of_layers(
    run: RunInputs, layers: Sequence[LayerInStack], micro_batches: Mapping[int, int]
) -> Iterator[Collective]:
    """Yield the collectives inside the layers, in so many micro batches of each stage."""
    if run.mesh.tensor == run.mesh.context == run.mesh.expert == 1:
        return
    numbers = {id(stack): micro_batches[stage.number] for stage, stack in zip(run.stages, run.stacks, strict=True)}
    for layer in layers:
        last_in_chunk = (layer.index + 1) % layer.recompute.chunk == 0
        found = layer_traffic(
            layer.stack,
            is_moe=layer.memory.has_experts,
            is_fp8=layer.memory.inputs.fp8 is not None,
            recomputes=layer.recomputed_modules,
            recomputed_layer=layer.is_recomputed,
            ends_recompute=last_in_chunk or layer.index + 1 == layer.stack.stack.num_layers,
        )
        number = numbers[id(layer.stack)]
        yield from (each.times(number) for each in found if each.during == "forward" or not layer.skips_backward)


def _sharded_data_traffic(run: RunInputs, layers: Sequence[LayerInStack]) -> Iterator[Collective]:
    """Yield what is communicated in every micro batch: sharded weights and gradients."""
    layout = run.layout
    if layout is None or (layout.replicates_weights and not layout.shards_gradients):
        return
    for axis, share in _parameter_shares(run):
        weights = round(run.counts.total * share) * run.widths.weights
        sent = gradient_sums(run, experts=axis == "expert data").sent
        gradients = round(run.counts.trainable * share) * sent
        units = max(1, len(layers))
        gather = Collective(axis, "all-gather", weights, "forward", number=units, overlaps=True)
        if not layout.replicates_weights:
            yield gather
            stays = _stays_gathered(run, layers) if axis == "data" else 0
            yield gather._replace(during="backward", num_bytes=weights - stays * run.widths.weights)
        yield Collective(axis, "reduce-scatter", gradients, "backward", number=units, overlaps=True)
        if layout.replicas > 1 and axis == "data":
            shard = gradients // layout.shards
            yield Collective("replicas", "all-reduce", shard, "backward", number=units, overlaps=True)


def _update_traffic(run: RunInputs, layers: Sequence[LayerInStack]) -> Iterator[Collective]:
    """Yield what is communicated once per step: partial gradients, replicated gradients, and updated weights."""
    mesh, layout, width = run.mesh, run.layout, gradient_sums(run).updated
    if mesh.tensor > 1 and not run.is_frozen:
        partial = run.sharded(count_partial_gradients(run.family, sequence=mesh.sequence, expert_ranks=mesh.expert))
        yield Collective("tensor", "all-reduce", partial * width, "update")
    for axis, elements, holders in run.shared_weights:
        if run.pipeline_rank in holders and not run.is_frozen:
            yield Collective(axis, "all-reduce", run.sharded(elements) * width, "update")
    if layout is None or not layout.replicates_weights:
        return
    units = max(1, len(layers))
    for axis, share in _parameter_shares(run):
        trained = round(run.counts.trainable * share)
        sums, engines = gradient_sums(run, experts=axis == "expert data"), axis == "data" and uses_copy_engines(run)
        # three ranks send as many bytes in one exchange of whole tensors
        in_two = engines and layout.shards == 1 and num_data_ranks(run) > 2
        kind: CollectiveKind = "reduce-scatter" if layout.shards > 1 or in_two else "all-reduce"
        if not sums.sharded:
            yield Collective(axis, kind, trained * sums.sent, "backward", number=units, overlaps=True)
        if in_two:
            yield Collective(axis, "all-gather", trained * sums.updated, "backward", number=units, overlaps=True)
        if layout.shards > 1:
            in_fp8 = trained_fp8_weights(run, axis)
            if in_fp8:
                amaxes = Collective(axis, "all-reduce", 4 * len(in_fp8), "update")
                yield amaxes
                if run.model_config.reduce_amax:
                    yield amaxes._replace(axis="tensor" if axis == "data" else "expert")
            size = trained * run.widths.weights - sum(in_fp8) * (run.widths.weights - 1)
            overlaps = run.run.overlaps_param_sync
            during: Pass = "forward" if overlaps else "update"
            number = units * (2 if in_fp8 else 1)
            yield Collective(axis, "all-gather", size, during, number=number, overlaps=overlaps)


def _stays_gathered(run: RunInputs, layers: Sequence[LayerInStack]) -> int:
    """Return how many parameters the backward pass of a micro batch, on average, finds gathered.

    They are those outside of the layers, and with copy engines those of the last layers in memory. In pipelines other
    passes come between; there FSDP2 gathers all of them again, copy engines what no other layer has overwritten.
    """
    outside = run.counts.total - sum(layer.memory.num_parameters for layer in layers)
    if not uses_copy_engines(run):
        return 0 if run.mesh.pipeline > 1 else outside
    sizes = without_shared_experts(run, layers)
    units: dict[int, list[int]] = {
        stage.number: [unit for unit, layer in enumerate(layers) if layer.stack is stack]
        for stage, stack in zip(run.stages, run.stacks, strict=True)
    }
    slots, in_slot, found = gathered_slots(run), dict[int, int](), 0
    for each in run.pass_order:
        own = units[each.stage]
        for unit in reversed(own) if each.is_backward else own:
            found += sizes[unit] if each.is_backward and in_slot.get(unit % slots) == unit else 0
            in_slot[unit % slots] = unit
    return outside + found // (1 if run.pipeline_rank is None else run.micro_batches)


def _parameter_shares(run: RunInputs) -> list[tuple[CommunicationAxis, float]]:
    """Return the fractions of a rank's parameters whose gradients are summed over each group of ranks."""
    experts = run.expert_parameters / run.counts.total
    return [("data", 1.0 - experts), *([("expert data", experts)] if experts else [])]


def _merged(collectives: Sequence[Collective]) -> Iterator[Collective]:
    found: dict[tuple[object, ...], Collective] = {}
    for each in collectives:
        key = (each.axis, each.kind, each.during, each.overlaps)
        before = found.get(key)
        if before is not None:
            each = each._replace(num_bytes=before.num_bytes + each.num_bytes, number=before.number + each.number)
        found[key] = each
    yield from (each for each in found.values() if each.num_bytes)


def planned_bytes(
    run: RunInputs, layers: Sequence[LayerInStack]
) -> dict[tuple[CommunicationAxis, CollectiveKind], int]:
    """Return the bytes of each axis and kind in a step of a rank: the whole tensor of each collective."""
    return bytes_by_collective(step_traffic(run, layers))


# ---------------------------------------------------------------- links


@dataclass(frozen=True, slots=True)
class Link:
    """Link that the ranks of an axis communicate over.

    Attributes:
        ranks: ranks of a group.
        in_node: these of them are on one node; all, if it is the link inside a node.
        bandwidth: bytes/s of a rank in one direction.
        latency: seconds until a message arrives.
    """

    ranks: int
    in_node: int
    bandwidth: float
    latency: float

    @property
    def name(self) -> str:
        """`node` or `network`."""
        return "node" if self.in_node == self.ranks else "network"

    def seconds(self, collective: Collective) -> float:
        """Return the time of a collective in a ring: of what is sent, of its steps, and of its launch."""
        steps = 1 if collective.kind == "send" else (self.ranks - 1) * (2 if collective.kind == "all-reduce" else 1)
        each = steps * self.latency + EFFICIENCY["nccl_seconds"]
        return collective.sent_bytes(self.ranks) / self.bandwidth + collective.number * each


def axis_link(run: RunInputs, axis: CommunicationAxis, gpu: GPUSpec) -> Link:
    """Return the link of an axis: that of the nodes for neighbouring ranks, otherwise the network between nodes, on
    which each rank of a node has its share of the messages of a group that has several ranks there.
    """
    members = axis_ranks(run, axis)
    if axis == "pipeline":
        own = members[run.pipeline_rank or 0]
        members = own, members[((run.pipeline_rank or 0) + 1) % len(members)]
    return link_between(run, members, gpu)


def link_between(run: RunInputs, members: Sequence[int], gpu: GPUSpec) -> Link:
    """Return the link of these ranks, as in `axis_link`."""
    node = members[0] // run.ranks_per_node
    in_node = sum(rank // run.ranks_per_node == node for rank in members)
    if in_node == len(members):
        return Link(len(members), in_node, gpu.peer_link, EFFICIENCY["peer_latency"])
    return Link(len(members), in_node, min(gpu.peer_link, in_node * gpu.network), EFFICIENCY["network_latency"])


def axis_ranks(run: RunInputs, axis: CommunicationAxis) -> tuple[int, ...]:
    """Return the group of rank 0 on an axis, or of the first rank with the stages of the pipeline rank."""
    mesh, stage, rank = run.mesh, run.mesh.world_size // run.mesh.pipeline, run.pipeline_rank or 0
    if axis == "pipeline":
        return tuple(range(0, mesh.world_size, stage))
    if axis in ("embeddings", "position biases"):
        holders = (found for name, _, found in run.shared_weights if name == axis and rank in found)
        return tuple(holder * stage for holder in next(holders, (rank,)))
    return tuple(rank * stage + each for each in _stage_ranks(run, axis, stage))


def _stage_ranks(run: RunInputs, axis: CommunicationAxis, stage: int) -> Sequence[int]:
    """Return the group of the first of the `stage` ranks with the same pipeline stages."""
    mesh, shards, split = run.mesh, run.shards, run.run.context_split
    context = tuple(range(0, mesh.context * mesh.tensor, mesh.tensor))
    match axis:
        case "tensor":
            return range(mesh.tensor)
        case "context":
            return context
        case "context heads":
            return context[: split.head_ranks if split else 1]
        case "context ring":
            return context[:: split.head_ranks if split else 1]
        case "expert":
            return range(mesh.expert)
        case "expert data":
            return range(0, stage, mesh.expert)
        case "replicas":
            return range(0, stage, shards * mesh.tensor)
        case _:
            ranks = range(0, stage, mesh.tensor)
            return ranks[:shards] if shards > 1 else ranks


def message_seconds(run: RunInputs, stack: StackInputs, gpu: GPUSpec) -> dict[str, float]:
    """Return the seconds of the messages of a pipeline stage, as in `StageTimes`; none without a pipeline."""
    if run.pipeline_rank is None:
        return {}
    ranks, rank, found = axis_ranks(run, "pipeline"), run.pipeline_rank, dict[str, float]()
    for each in stage_traffic(stack):
        name, step = ("send", 1) if each.during == "forward" else ("send_back", -1)
        link = link_between(run, (ranks[rank], ranks[(rank + step) % len(ranks)]), gpu)
        found[name] = link.seconds(each)
    return found


# ---------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """Traffic of a rank on an axis in a step.

    Attributes:
        axis: ranks that communicate.
        link: what carries it.
        collectives: bytes of each kind of collective, as in `planned_bytes`.
        sent: bytes that the rank sends.
        seconds: time of all collectives.
        exposed: part of it that does not overlap with computation, and what that loses by it; of a pipeline's messages
            0, since the simulation of its schedule has them.
        by: what runs the collectives of weights and gradients: `DataExchange.by`; empty for other ones.
    """

    axis: CommunicationAxis
    link: Link
    collectives: dict[CollectiveKind, int]
    sent: float
    seconds: float
    exposed: float
    by: str = ""


def axis_traffic(
    run: RunInputs,
    layers: Sequence[LayerInStack],
    gpu: GPUSpec,
    *,
    micro_batch_seconds: tuple[float, float],
    matmul_seconds: float,
    attention_seconds: float,
) -> tuple[AxisTraffic, ...]:
    """Return the traffic of a step of a rank by axis, and its time.

    Args:
        run: inputs of the estimate.
        layers: of all stacks.
        gpu: the GPU of a rank.
        micro_batch_seconds: computing time of the forward and of the backward pass of a micro batch.
        matmul_seconds: that of all matmuls of the step.
        attention_seconds: that of all attention of the step.
    """
    step = step_traffic(run, layers)
    replicated = run.layout is None or run.layout.replicates_weights
    _, backward = micro_batch_seconds
    data = backward if replicated else sum(micro_batch_seconds) * run.micro_batches
    if run.layout is not None and run.layout.shards_gradients:
        data = backward * run.micro_batches
    hides: dict[CommunicationAxis, float] = {
        # half of the matmuls are column-parallel, and communicate beside two of their three products
        "tensor": matmul_seconds / 3,
        "context": attention_seconds,
        "context heads": 0.0,
        "context ring": attention_seconds,
        "expert": 0.0,
        "pipeline": math.inf,  # what delays a pass is part of the bubble
        "data": data,
    }
    exchange, found = exchange_of(run), list[AxisTraffic]()
    for axis in AXES:
        own = [each for each in step if each.axis == axis]
        if not own:
            continue
        link = axis_link(run, axis, gpu)
        beside = [each for each in own if each.overlaps]
        hidden = sum(map(link.seconds, beside))
        # the first or last message has nothing to overlap with
        alone = max((link.seconds(each) / each.number for each in beside), default=0.0)
        total = sum(map(link.seconds, own))
        exposed = total - hidden + max(0.0 if axis == "pipeline" else alone, hidden - hides.get(axis, hides["data"]))
        by = ""
        if exchange is not None and axis in ("data", "expert data", "replicas"):
            by = exchange.experts if axis == "expert data" else exchange.by
            in_place = run.layout is not None and not run.layout.replicates_weights
            lost = sum(_lost_beside(each, link, by, gpu, in_place=in_place) for each in beside)
            exposed += lost * min(1.0, hides["data"] / max(hidden, 1e-12))
        elif axis == "tensor" and not (run.mesh.overlap_gather or run.mesh.overlap_scatter):
            lost = sum(_lost_beside(each, link, "NCCL", gpu) for each in beside)
            exposed += lost * min(1.0, hides["tensor"] / max(hidden, 1e-12))
        sizes: dict[CollectiveKind, int] = {kind: size for (_, kind), size in bytes_by_collective(own).items()}
        found.append(AxisTraffic(axis, link, sizes, sum(e.sent_bytes(link.ranks) for e in own), total, exposed, by))
    return tuple(found)


def _lost_beside(each: Collective, link: Link, by: str, gpu: GPUSpec, *, in_place: bool = False) -> float:
    """Return the seconds that computation loses by a collective beside it; `in_place`: weights are gathered in place.

    Copy engines and the local sums need bandwidth of the memory. The kernels of these sums, and those of NCCL, take
    multiprocessors from matmuls besides; the latter is measured between GPUs of a machine only.
    """
    if by == "copy engines":
        sent = each.sent_bytes(link.ranks)  # read, written into inboxes, then summed or copied from there
        last, taken = 2 * (each.num_bytes / link.ranks if in_place else sent), 0.0
        if each.kind == "reduce-scatter":
            last = each.num_bytes * (1 + 2 / link.ranks)
        elif each.kind == "all-reduce":  # of two ranks, which send each other all
            last = each.num_bytes * (2 + 2)
        if each.kind != "all-gather":
            taken = EFFICIENCY["sums_beside_matmuls"] * sent / link.bandwidth
        return (2 * sent + last) / gpu.pointwise_bandwidth + taken
    return EFFICIENCY["nccl_beside_matmuls"] * link.seconds(each) if link.name == "node" else 0.0
