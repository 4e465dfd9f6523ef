"""Collectives of weights and gradients of data-parallel ranks, and the memory that they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...models.layers.cost import StackInputs
from ...models.parallel.peer_exchange import memory_parts
from ..distributed.copy_engine import CopyEngineCollectives
from ..distributed.gathered_weights import GatheredWeights, num_slots
from .exchange_kind import DataExchange, data_exchange
from .run_inputs import RunInputs

COMMUNICATOR_BYTES = 720 << 20
"""Bytes of a communicator of NCCL on a rank: what is in use on 2 H100 (NCCL 2.28.9, multicast off), neither reserved
nor of the context, is 0.70 to 0.85 GiB for each in ten layouts (scripts/bench/plan_check.py)."""


def exchange_of(run: RunInputs) -> DataExchange | None:
    """Return the collectives of a rank, see `data_exchange`."""
    return data_exchange(run.run, run.target, run.pipeline_rank or 0)


def uses_copy_engines(run: RunInputs) -> bool:
    """True if weights and gradients, but those of experts that ranks share, are exchanged by copy engines."""
    exchange = exchange_of(run)
    return exchange is not None and exchange.by == "copy engines"


def num_data_ranks(run: RunInputs) -> int:
    """Number of ranks with the same part of the model, but its experts."""
    return run.mesh.world_size // run.mesh.pipeline // run.mesh.tensor


def gathered_slots(run: RunInputs) -> int:
    """Number of layers whose gathered weights have memory at a time, see `GatheredWeights`."""
    recomputed = (each.stack.recompute for each in run.stacks)
    return num_slots(max((each.chunk for each in recomputed if each is not None), default=1))


def symmetric_memory_bytes(run: RunInputs, layers: Sequence[int]) -> int:
    """Bytes of memory that other ranks read or write, outside of torch's allocator: the inbox of copy engines, weights
    that FSDP2 gathers by them, the tokens of experts with the dispatcher `flex`, and the buffers of `parallel.overlap`.

    Args:
        run: inputs of the estimate.
        layers: parameters of each layer, without experts that ranks share.
    """
    layout, mesh, num_bytes = run.layout, run.mesh, 0
    if layout is not None and uses_copy_engines(run):
        ranks, width = num_data_ranks(run), run.widths.weights
        num_bytes = CopyEngineCollectives.inbox_bytes(ranks)
        if not layout.replicates_weights:
            others = run.counts.total - run.expert_parameters - sum(layers)
            in_turn, slots = [each * width for each in layers], gathered_slots(run)
            num_bytes += GatheredWeights.num_bytes(in_turn, [others * width], ranks, slots)
    if mesh.expert > 1:
        flex = (each for each in run.stacks if each.stack.moe is not None and each.stack.moe.dispatcher == "flex")
        num_bytes += max((_flex_bytes(each) for each in flex), default=0)
    # a rank's share of the tokens, which others copy; two parts of a sum
    buffers = 2 if mesh.overlap_scatter else int(mesh.overlap_gather)
    return num_bytes + buffers * max(stack.residual_elements for stack in run.stacks) * run.widths.compute


def _flex_bytes(inputs: StackInputs) -> int:
    """Bytes of `PeerExchange`."""
    moe, row = inputs.stack.moe, inputs.stack.hidden_size * inputs.widths.compute
    assert moe is not None
    return sum(memory_parts(inputs.mesh.expert, inputs.residual_tokens, moe.topk, moe.experts, row))


def nccl_bytes(run: RunInputs) -> int:
    """Bytes of NCCL's communicators, outside of torch's allocator: one of each axis, on a pipeline one each way."""
    mesh = run.mesh
    communicators = sum(size > 1 for size in (mesh.tensor, mesh.context, mesh.expert, mesh.pipeline, mesh.pipeline))
    return (communicators + (run.layout is not None)) * COMMUNICATOR_BYTES


class GradientSums(NamedTuple):
    """Bytes per element of the gradients of a rank.

    Attributes:
        accumulated: of the fp32 accumulators, which exist during the whole run, or from the first micro batch on; 0
            without. With `sharded` of all ranks together, as with FSDP2.
        gradient: of the gradients that are kept until the update; 0 if they are added to the accumulators at once.
        sent: of what is sent to other ranks.
        copied: of copies of a layer's gradients in the dtype in which they are sent, and of sums that are added to
            others; 0 without.
        summed: of the sums over ranks, in new memory of the stream of communication; 0 if they overwrite the gradients.
        updated: of the gradients that the update reads.
        sharded: gradients are summed in every micro batch, and only the sums of a rank's own rows are kept.
    """

    accumulated: int
    gradient: float
    sent: int
    copied: float
    summed: float
    updated: int
    sharded: bool = False


def gradient_sums(run: RunInputs, *, experts: bool = False) -> GradientSums:
    """Return how the gradients of a rank are accumulated and summed over ranks; `experts`: those that ranks share."""
    width, main, layout, reduced = run.widths.weights, run.precision.main_weights, run.layout, run.reduce_itemsize
    engines = not experts and uses_copy_engines(run)
    if layout is None:
        accumulated = 4 if main and run.micro_batches > 1 else 0
        return GradientSums(accumulated, width, reduced, 0, 0.0, accumulated or width)
    shards = num_data_ranks(run) * run.mesh.tensor // run.mesh.expert if experts else layout.shards
    if layout.shards_gradients or not layout.replicates_weights:
        return _sharded_sums(run, shards, engines=engines, is_captured=run.uses_cuda_graph and not experts)
    wider = not engines and reduced > width  # accumulated for the reduction
    accumulated = 4 if main and (run.micro_batches > 1 or wider) else 0
    held = accumulated or width
    # a layer's gradients are added to the accumulators at once and freed, unless graphs of the layers keep them
    is_captured = run.uses_cuda_graph and not experts
    gradient = 0 if accumulated and not is_captured else width
    if not engines:
        return GradientSums(accumulated, gradient, reduced, reduced if reduced != held else 0, 0.0, held)
    sent, total = min(reduced, held), reduced if main else held
    if layout.shards > 1:
        return GradientSums(accumulated, gradient, sent, sent if sent != held else 0, total / layout.shards, total)
    # a copy in the dtype of the sum is overwritten by it
    copied, summed = sent if sent not in (held, total) else 0, total if sent != held or total != sent else 0
    return GradientSums(accumulated, gradient, sent, copied, float(summed), total)


def _sharded_sums(run: RunInputs, shards: int, *, engines: bool, is_captured: bool) -> GradientSums:
    """Return the sums of gradients whose other rows a rank does not keep: those of FSDP `grad`, `full` and `hybrid`.

    But graphs of the layers (`is_captured`) keep the memory of the whole gradients.
    """
    width, main, layout, reduced = run.widths.weights, run.precision.main_weights, run.layout, run.reduce_itemsize
    assert layout is not None
    accumulated = 4 if main and run.micro_batches > 1 else 0
    if not layout.replicates_weights and not engines:  # FSDP2 copies sums to `.grad`
        return GradientSums(accumulated, width / shards, reduced, 0, 0.0, accumulated or width)
    sent = min(reduced, width) if engines else reduced
    total = reduced if main and layout.shards_gradients else width
    copied = sent if sent != width else 0
    if run.micro_batches > 1:
        copied += total / shards
    kept, summed = width if is_captured else 0, 0.0 if accumulated else total / shards
    return GradientSums(accumulated, kept, sent, copied, summed, accumulated or total, sharded=True)
