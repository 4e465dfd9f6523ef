"""Process groups of a run: the ranks that share one replica of the model, and those whose gradients add up."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...models.parallel.collectives import TensorParallel
from ...models.parallel.layout import Axis, ParallelLayout
from .process_group import DistributedContext


@dataclass(frozen=True)
class Mesh:
    """Groups of ranks that this rank belongs to.

    Attributes:
        layout: number of ranks on each axis.
        data: ranks with other samples; its rank and size number the micro batches.
        replicas: ranks that hold the same part of the model: their losses and gradients add up.
        tensor: ranks that share each layer; None for one.
        expert_replicas: ranks that hold the same experts; None if every rank has all.
    """

    layout: ParallelLayout
    data: DistributedContext
    replicas: DistributedContext
    tensor: TensorParallel | None = None
    expert_replicas: DistributedContext | None = None


def build_mesh(layout: ParallelLayout, ranks: DistributedContext) -> Mesh:
    """Create the process groups of a layout; a collective of all ranks."""
    if layout.data == layout.world_size:
        return Mesh(layout, ranks, ranks)
    place = layout.coordinates(ranks.rank)
    data = _subgroup(layout, ranks, "data")
    replicas = data if layout.context == 1 else _subgroup(layout, ranks, "data", "context")
    tensor = None
    if layout.tensor > 1:
        group: Any = _subgroup(layout, ranks, "tensor").group
        tensor = TensorParallel(
            place.tensor,
            layout.tensor,
            group.group_name,
            sequence=layout.sequence,
            data_rank=replicas.rank,
            data_ranks=replicas.world_size,
        )
    return Mesh(layout, data, replicas, tensor)


def _subgroup(layout: ParallelLayout, ranks: DistributedContext, *axes: Axis) -> DistributedContext:
    """Create the groups of ranks that differ on these axes only; return this rank's."""
    own = layout.group_of(ranks.rank, *axes)
    group: Any = None
    if len(own) > 1:
        created = {members: _new_group(members, ranks.timeout) for members in layout.groups(*axes)}
        group = created[own]
    return DistributedContext(own.index(ranks.rank), len(own), ranks.local_rank, ranks.timeout, group)


def _new_group(members: tuple[int, ...], timeout: timedelta | None) -> Any:
    return dist.new_group(list(members), timeout=timeout)
