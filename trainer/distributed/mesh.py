"""Process groups of a run: the ranks that share one replica of the model, and those whose gradients add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...models.dispatch.context_calls import ContextSplit
from ...models.parallel.collectives import TensorParallel
from ...models.parallel.context import ContextParallel
from ...models.parallel.expert import ExpertParallel
from ...models.parallel.layout import ParallelLayout
from ...models.parallel.overlap import devices_share_memory
from ...models.parallel.pipeline import PipelineParallel, RankStages
from ...models.parallel.stages import PipelineSplit
from .process_group import DistributedContext


@dataclass(frozen=True)
class Mesh:
    """Groups of ranks that this rank belongs to.

    Attributes:
        layout: number of ranks on each axis.
        data: ranks with other samples; its rank and size number the micro batches.
        replicas: ranks that hold the same part of the model: their gradients add up.
        losses: ranks whose losses add up: `replicas`, and the stages of their pipelines.
        tensor: ranks that share each layer; None for one.
        context: ranks that share the tokens of each sequence; None for one.
        expert: ranks that share the experts of each layer; None if every rank has all.
        expert_replicas: ranks that hold the same experts; None likewise.
        pipeline: ranks that share the layers; None for one.
        stages: process group of those.
        experts: process group of `expert`; None likewise.
    """

    layout: ParallelLayout
    data: DistributedContext
    replicas: DistributedContext
    losses: DistributedContext
    tensor: TensorParallel | None = None
    context: ContextParallel | None = None
    expert: ExpertParallel | None = None
    expert_replicas: DistributedContext | None = None
    pipeline: PipelineParallel | None = None
    stages: DistributedContext = field(default_factory=DistributedContext)
    experts: DistributedContext | None = None

    @property
    def counts_targets(self) -> bool:
        """True on one of the ranks that have the same samples."""
        return (self.context is None or self.context.rank == 0) and self.stages.rank == 0


def build_mesh(
    layout: ParallelLayout,
    split: ContextSplit | None,
    ranks: DistributedContext,
    pipeline_split: PipelineSplit | None = None,
) -> Mesh:
    """Create the process groups of a layout; a collective of all ranks.

    Args:
        layout: number of ranks on each axis.
        split: how context-parallel ranks share attention; None for one.
        ranks: all ranks.
        pipeline_split: how the ranks of a pipeline share the layers; None for one.
    """
    if layout.data == layout.world_size and layout.expert == 1:
        return Mesh(layout, ranks, ranks, ranks)
    place = layout.coordinates(ranks.rank)
    data = ranks if layout.data == layout.world_size else _subgroup(layout.groups("data"), ranks)
    replicas = data if layout.context == 1 else _subgroup(layout.groups("data", "context"), ranks)
    tensor = None
    if layout.tensor > 1:
        tensor = TensorParallel(
            place.tensor,
            layout.tensor,
            _group_name(layout.groups("tensor"), ranks),
            sequence=layout.sequence,
            overlap_gather=layout.overlap_gather,
            overlap_scatter=layout.overlap_scatter,
            data_rank=replicas.rank,
            data_ranks=replicas.world_size,
        )
    context = None if split is None else _context_parallel(layout, split, place.context, ranks)
    pipeline, stages, losses = None, DistributedContext(), replicas
    if pipeline_split is not None:
        pipeline = PipelineParallel(place.pipeline, pipeline_split, replicas.rank, replicas.world_size)
        stages = _subgroup(layout.groups("pipeline"), ranks)
        losses = _subgroup(layout.groups("pipeline", "data", "context"), ranks)
    if layout.expert == 1:
        return Mesh(layout, data, replicas, losses, tensor, context, pipeline=pipeline, stages=stages)
    expert_replicas = _subgroup(layout.expert_data_groups(), ranks)
    experts = _subgroup(layout.expert_groups(), ranks)
    group: Any = experts.group
    expert = ExpertParallel(
        ranks.rank % layout.expert,
        layout.expert,
        group.group_name,
        expert_replicas.rank,
        expert_replicas.world_size,
    )
    return Mesh(layout, data, replicas, losses, tensor, context, expert, expert_replicas, pipeline, stages, experts)


class SharedParameters:
    """Sums the gradients of parameters that several stages of a pipeline hold; a collective of all ranks.

    Args:
        mesh: the process groups.
        stages: stages of this rank.
        ranks: all ranks.
    """

    def __init__(self, mesh: Mesh, stages: RankStages, ranks: DistributedContext) -> None:
        self._shared = stages.shared
        self._groups: dict[tuple[int, ...], DistributedContext] = {}
        pipelines = mesh.layout.groups("pipeline")
        for holders in stages.groups:
            groups = [tuple(pipeline[stage] for stage in holders) for pipeline in pipelines]
            if mesh.stages.rank in holders:
                self._groups[holders] = _subgroup(groups, ranks)
            else:
                for members in groups:
                    dist.new_group(list(members), timeout=ranks.timeout)

    def reduce(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum gradients over the stages that have the parameter, in place.

        Args:
            gradients: local gradients by name of the parameter; those of others are left alone.
        """
        for holders, group in self._groups.items():
            for name in sorted(gradients):
                if self._shared.get(name) == holders:
                    group.all_reduce_(gradients[name])


def layout_on(device: torch.device, layout: ParallelLayout, ranks: DistributedContext) -> tuple[ParallelLayout, str]:
    """Return the layout as it acts on a device: without overlap where it is not possible, which the text then says."""
    if not (layout.overlap_gather or layout.overlap_scatter):
        return layout, ""
    first = ranks.local_rank - layout.coordinates(ranks.rank).tensor
    if device.type == "cuda" and devices_share_memory(range(first, first + layout.tensor)):
        return layout, ""
    return replace(layout, overlap_gather=False, overlap_scatter=False), (
        "`model.ub_tp_comm_overlap` (True) has no effect: the devices of the tensor-parallel ranks do not read each "
        "other's memory (~model.ub_tp_comm_overlap)"
    )


def _context_parallel(
    layout: ParallelLayout, split: ContextSplit, rank: int, ranks: DistributedContext
) -> ContextParallel:
    groups = layout.groups("context")
    name = _group_name(groups, ranks)
    if split.exchange != "a2a+p2p":
        return ContextParallel(rank, split, name)
    heads = [
        group[first : first + split.neighbours] for group in groups for first in range(0, split.size, split.neighbours)
    ]
    rings = [group[first :: split.neighbours] for group in groups for first in range(split.neighbours)]
    return ContextParallel(rank, split, name, _group_name(heads, ranks), _group_name(rings, ranks))


def _subgroup(groups: Sequence[tuple[int, ...]], ranks: DistributedContext) -> DistributedContext:
    """Create these groups of ranks; return this rank's."""
    own = next(members for members in groups if ranks.rank in members)
    group: Any = None
    if len(own) > 1:
        created = {members: dist.new_group(list(members), timeout=ranks.timeout) for members in groups}
        group = created[own]
    return DistributedContext(own.index(ranks.rank), len(own), ranks.local_rank, ranks.timeout, group)


def _group_name(groups: Sequence[tuple[int, ...]], ranks: DistributedContext) -> str:
    """Create these groups of several ranks; return the name of this rank's, for functional collectives."""
    group: Any = _subgroup(groups, ranks).group
    return group.group_name
