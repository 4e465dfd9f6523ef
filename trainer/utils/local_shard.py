"""Local shards of parameters and optimizer state.

Tensors are sharded along the first dimension, in equal chunks except for the last (FSDP2: DTensor, `Shard(0)`). A
checkpoint records the rows of each file, so it loads on any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Local shard: rows `first_row` to `first_row + len(local)` of a tensor of `num_rows` rows.

    Attributes:
        local: local rows; a scalar is not sharded.
        first_row: first local row.
        num_rows: rows of the full tensor; 1 for a scalar.
        replica: index of this rank among those with the same rows.
        num_replicas: number of ranks with the same rows.
    """

    local: Tensor
    first_row: int = 0
    num_rows: int = 1
    replica: int = 0
    num_replicas: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return (self.num_rows, *self.local.shape[1:]) if self.local.ndim else ()

    def with_local(self, local: Tensor) -> LocalShard:
        """Return a shard with the same rows of another, equally sharded tensor."""
        return LocalShard(local, self.first_row, self.num_rows, self.replica, self.num_replicas)

    def copy_from_full(self, full: Tensor) -> None:
        """Copy the local rows of a full tensor, converting its dtype."""
        self.local.copy_(full[self.first_row : self.first_row + len(self.local)] if self.local.ndim else full)

    def part_to_save(self) -> LocalShard:
        """Return the part of the rows that this rank saves, so that replicas together save every row once."""
        if not self.local.ndim:
            return self if self.replica == 0 else LocalShard(self.local.new_empty(0), 0, 0)
        first, count = chunk_bounds(self.local.shape[0], self.num_replicas, self.replica)
        return LocalShard(self.local[first : first + count], self.first_row + first, self.num_rows)


def local_shard(tensor: Tensor) -> LocalShard:
    """Return the local shard of a parameter: the local rows of a DTensor, or all rows of a plain, replicated tensor.

    Raises:
        ValueError: a DTensor sharded along a dimension other than the first.
    """
    local = local_tensor(tensor)
    rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return LocalShard(local, 0, rows, *rank_and_world_size())
    mesh, start = tensor.device_mesh, 0
    copy, copies = 0, 1
    for axis, placement in enumerate(tensor.placements):
        size, place = mesh.size(axis), mesh.get_local_rank(axis)
        if placement.is_replicate():
            copy, copies = copy * size + place, copies * size
        elif isinstance(placement, Shard) and placement.dim == 0:
            start, _ = chunk_bounds(rows, size, place)
        else:
            raise ValueError(f"`tensor` ({placement}) must be sharded along its first dimension only")
    return LocalShard(local, start, rows, copy, copies)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local plain tensor, which shares memory with `tensor`."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def chunk_bounds(rows: int, parts: int, part: int) -> tuple[int, int]:
    """Return first row and number of rows of a chunk, as split by `torch.chunk`: the last ones may be smaller."""
    size = -(-rows // parts)
    first = min(part * size, rows)
    return first, min(size, rows - first)
