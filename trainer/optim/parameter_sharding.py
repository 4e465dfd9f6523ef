"""Sharding of an optimizer's parameters: which elements this rank updates, and sums over all elements of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...models.parallel.partition import PartAxis, RankPart
from ..utils.local_shard import LocalShard, ShardOf, local_shard, rank_and_world_size
from .gradient_clipping import global_norm, no_reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSharding:
    """Shards and parts of the parameters that this rank holds, and collectives with the ranks that hold the others.

    Attributes:
        sum_over_shards: all-reduce (sum) of a tensor, in place, over the ranks with the other shards of the parameters.
        sum_over_expert_shards: the same for the shards of experts that ranks share.
        gather_rows: all-gather of a tensor sharded like a parameter: from the local rows and the total number of rows
            to the full tensor. Collective: all ranks call it for the same tensors in the same order; some may have no
            rows.
        shard_of: returns the local shard of a parameter; given this rank's part of it, with its place in the full
            parameter.
        local_rows: returns the rows of a gradient (or its local shard) that this rank updates, given its part.
        parts: this rank's part of each parameter under tensor or expert parallelism, by name.
        sum_over_parts: all-reduce (sum) of a tensor over the ranks with the other parts.
        sum_over_experts: the same for parts that are experts.
        sum_over_stages: all-reduce (sum) of a tensor, in place, over the stages of a pipeline.
    """

    sum_over_shards: Callable[[Tensor], Tensor] = no_reduce
    sum_over_expert_shards: Callable[[Tensor], Tensor] = no_reduce
    gather_rows: Callable[[Tensor, int], Tensor] = lambda local, rows: local
    shard_of: ShardOf = local_shard
    local_rows: Callable[[Tensor, RankPart | None], Tensor] = lambda gradient, part: gradient
    parts: Mapping[str, RankPart] = field(default_factory=dict)
    sum_over_parts: Callable[[Tensor], Tensor] = no_reduce
    sum_over_experts: Callable[[Tensor], Tensor] = no_reduce
    sum_over_stages: Callable[[Tensor], Tensor] = no_reduce

    def placed_shard(self, name: str, parameter: nn.Parameter) -> LocalShard:
        """Return the local shard of a parameter, with its place in the full parameter."""
        return self.shard_of(parameter, self.parts.get(name))

    def axis_of(self, name: str) -> PartAxis:
        """Return which ranks have the other parts of a parameter."""
        part = self.parts.get(name)
        return part.axis if part else "tensor"

    def counted(self, name: str, parameter: nn.Parameter, tensor: Tensor, first: int = 0) -> list[Tensor]:
        """Return what this rank adds to a sum over all elements: of what several ranks hold, the first one counts it.

        Args:
            name: name of the parameter.
            parameter: the parameter.
            tensor: its local shard, or another tensor of the same shape, or some rows of it.
            first: first of these rows.
        """
        part = self.parts.get(name)
        if part is None:
            return [tensor]
        replicas = {each.replica for each in part.ranges()} or {part.rank}
        if len(replicas) == 1:
            return [tensor] if replicas == {0} else []
        ranges = [(start - first, rows) for start, rows in self.placed_shard(name, parameter).local_ranges()]
        return [tensor[max(start, 0) : max(start + rows.size, 0)] for start, rows in ranges if rows.is_saved]

    def sum_over_ranks(self, tensor: Tensor, axis: PartAxis) -> Tensor:
        """Sum over the ranks with other shards of a parameter, and over those with other parts of it."""
        if axis == "expert":
            return self.sum_over_experts(self.sum_over_expert_shards(tensor))
        return self.sum_over_parts(self.sum_over_shards(tensor))

    def global_norm(self, names: Mapping[nn.Parameter, str], gradients: list[Tensor]) -> Tensor:
        """Return the norm of all gradients, of which parts and experts are on different ranks.

        Args:
            names: name of each parameter.
            gradients: local shard of the gradient of each, in the same order.
        """
        if not self.parts:
            return global_norm(gradients, self.sum_over_shards)
        counted: dict[PartAxis, list[Tensor]] = {"tensor": [], "expert": []}
        has_experts = False
        for (parameter, name), gradient in zip(names.items(), gradients, strict=True):
            axis, part = self.axis_of(name), self.parts.get(name)
            has_experts |= axis == "expert"
            if part is None or part.holder == 0:  # of several stages with the parameter the first one counts it
                counted[axis] += self.counted(name, parameter, gradient)
        zero = gradients[0].new_zeros(1)
        norm = global_norm(counted["tensor"] or [zero], lambda total: self.sum_over_ranks(total, "tensor"))
        if has_experts:
            experts = global_norm(counted["expert"] or [zero], lambda total: self.sum_over_ranks(total, "expert"))
            norm = torch.hypot(norm, experts)
        return norm if self.sum_over_stages is no_reduce else self.sum_over_stages(norm.square()).sqrt()


def replica_of(part: RankPart | None) -> tuple[int, int]:
    """Return index and number of the ranks that hold a parameter, whatever their parts of it."""
    if part is None:
        return rank_and_world_size()
    replica = (part.replica * part.ranks + part.rank) * part.holders + part.holder
    return replica, part.num_replicas * part.ranks * part.holders
