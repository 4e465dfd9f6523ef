"""Local shards of parameters and optimizer state.

Data parallelism shards tensors along the first dimension, in equal chunks except for the last (FSDP2: DTensor,
`Shard(0)`). Under tensor and expert parallelism such a tensor is itself a part of the parameter: some of its rows, for
a fused weight of each projection, or a range of its columns (`models.parallel.partition`). A checkpoint records the
rows and columns of each file, so it loads on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ...models.parallel.partition import RankPart, partitions_of


class RowRange(NamedTuple):
    """Consecutive rows of the full tensor, consecutive in the local tensor too.

    Attributes:
        first: first row in the full tensor.
        size: number of rows.
        is_saved: False if another rank saves them, one that does not hold all of the same rows.
    """

    first: int
    size: int
    is_saved: bool = True


class ColumnRange(NamedTuple):
    """First local column, and number of columns of the full tensor."""

    first: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Local shard: rows, or some columns of them, of a tensor of `num_rows` rows.

    Attributes:
        local: local rows; a scalar is not sharded.
        rows: ranges of the local rows, ascending; one, except for fused weights under tensor parallelism.
        num_rows: rows of the full tensor; 1 for a scalar.
        replica: index of this rank among those with the same rows and columns.
        num_replicas: number of ranks with the same rows and columns.
        columns: columns of the local tensor; None for all.
    """

    local: Tensor
    rows: tuple[RowRange, ...]
    num_rows: int
    replica: int = 0
    num_replicas: int = 1
    columns: ColumnRange | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        if not self.local.ndim:
            return ()
        if self.columns is None:
            return (self.num_rows, *self.local.shape[1:])
        return (self.num_rows, self.columns.num_columns, *self.local.shape[2:])

    def with_local(self, local: Tensor) -> LocalShard:
        """Return a shard with the same rows and columns of another, equally sharded tensor."""
        return replace(self, local=local)

    def local_ranges(self) -> Iterator[tuple[int, RowRange]]:
        """Yield each range of rows after its first row in the local tensor."""
        start = 0
        for rows in self.rows:
            yield start, rows
            start += rows.size

    def copy_from_full(self, full: Tensor) -> None:
        """Copy the local part of a full tensor, converting its dtype."""
        if not self.local.ndim:
            self.local.copy_(full)
            return
        if self.columns is not None:
            full = full[:, self.columns.first : self.columns.first + self.local.shape[1]]
        for start, rows in self.local_ranges():
            self.local[start : start + rows.size].copy_(full[rows.first : rows.first + rows.size])

    def part_to_save(self) -> LocalShard:
        """Return the part of the rows that this rank saves, so that replicas together save every element once.

        Replicas of the whole shard share its rows; of rows that only some of them hold, the first rank saves all.
        """
        if not self.local.ndim:
            return self if self.replica == 0 else whole_shard(self.local.new_empty(0))
        first, count = chunk_bounds(self.local.shape[0], self.num_replicas, self.replica)
        share = self.narrow(first, count)
        if all(rows.is_saved for rows in share.rows):
            return share
        saved = [(start, rows) for start, rows in share.local_ranges() if rows.is_saved]
        parts = [share.local[start : start + rows.size] for start, rows in saved]
        local = parts[0] if len(parts) == 1 else torch.cat([share.local[:0], *parts])
        return replace(share, local=local, rows=tuple(rows for _, rows in saved) or (RowRange(0, 0),))

    def narrow(self, first: int, count: int) -> LocalShard:
        """Return `count` of the local rows, without replicas."""
        return replace(
            self,
            local=self.local[first : first + count],
            rows=_narrow(self.rows, first, count),
            replica=0,
            num_replicas=1,
        )


def whole_shard(tensor: Tensor, replica: int = 0, num_replicas: int = 1) -> LocalShard:
    """Return the shard that is a full tensor, or one of several replicas."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return LocalShard(tensor, (RowRange(0, rows),), rows, replica, num_replicas)


def row_shard(
    local: Tensor,
    first_row: int,
    num_rows: int,
    part: RankPart | None = None,
    replica: int = 0,
    num_replicas: int = 1,
) -> LocalShard:
    """Return the shard of some rows of this rank's part of a parameter.

    Args:
        local: local rows.
        first_row: first of them in the part.
        num_rows: rows of the part.
        part: this rank's part of the parameter; None for all of it.
        replica, num_replicas: this rank, and the number of ranks, with the same rows of the same part.

    Raises:
        ValueError: the part is of another size.
    """
    own = (RowRange(first_row, local.shape[0] if local.ndim else num_rows),)
    if part is None:
        return LocalShard(local, own, num_rows, replica, num_replicas)
    full = part.full_shape((num_rows, *local.shape[1:]) if local.ndim else ())
    ranges = part.ranges()
    replica, num_replicas = replica * part.holders + part.holder, num_replicas * part.holders
    # Ranks with the same part are replicas of it; ranks with some of its rows only, as of [q | k | v] with fewer key
    # groups than ranks, are not.
    copies = {(each.replica, each.num_replicas) for each in ranges} or {(part.rank, part.ranks)}
    shares = len(copies) == 1
    if shares:
        copy, num_copies = copies.pop()
        replica, num_replicas = replica * num_copies + copy, num_replicas * num_copies
    if part.partition is None:
        return LocalShard(local, own, num_rows, replica, num_replicas)
    if part.partition.dim == 1:
        return LocalShard(local, own, num_rows, replica, num_replicas, ColumnRange(ranges[0].start, full[1]))
    held = [RowRange(each.start, each.size, shares or each.replica == 0) for each in ranges]
    return LocalShard(local, _narrow(held, first_row, local.shape[0]), full[0], replica, num_replicas)


def local_shard(tensor: Tensor, part: RankPart | None = None) -> LocalShard:
    """Return the local shard of a parameter: the local rows of a DTensor, or all rows of a plain, replicated tensor.

    Args:
        tensor: this rank's part of the parameter.
        part: which part it is; None for all of it.

    Raises:
        ValueError: a DTensor sharded along a dimension other than the first, or a part of another size.
    """
    local = local_tensor(tensor)
    rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        copy, copies = (part.replica, part.num_replicas) if part else rank_and_world_size()
        return row_shard(local, 0, rows, part, copy, copies)
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
    return row_shard(local, start, rows, part, copy, copies)


class ShardOf(Protocol):
    """Function like `local_shard`."""

    def __call__(self, tensor: Tensor, part: RankPart | None = None, /) -> LocalShard:
        """Return the local shard of a parameter, or of its gradient."""
        ...


def local_shards(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, LocalShard]:
    """Return the local shards of parameters or buffers of a model, by name."""
    parts = partitions_of(model)
    return {name: local_shard(tensor, parts.get(name)) for name, tensor in tensors.items()}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local plain tensor, which shares memory with `tensor`."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def rank_and_world_size() -> tuple[int, int]:
    """Return (rank, world size); (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def chunk_bounds(rows: int, parts: int, part: int) -> tuple[int, int]:
    """Return first row and number of rows of a chunk, as split by `torch.chunk`: the last ones may be smaller."""
    size = -(-rows // parts)
    first = min(part * size, rows)
    return first, min(size, rows - first)


def _narrow(ranges: Sequence[RowRange], first: int, count: int) -> tuple[RowRange, ...]:
    """Return the ranges of `count` of the rows; neighbours are joined, and there is at least one, maybe empty."""
    if len(ranges) == 1:
        return (ranges[0]._replace(first=ranges[0].first + first, size=count),)
    found: list[RowRange] = []
    for rows in ranges:
        skipped = min(first, rows.size)
        taken = min(count, rows.size - skipped)
        first, count = first - skipped, count - taken
        last = found[-1] if found else None
        if last and last.first + last.size == rows.first + skipped and last.is_saved == rows.is_saved:
            found[-1] = last._replace(size=last.size + taken)
        elif taken:
            found.append(RowRange(rows.first + skipped, taken, rows.is_saved))
    return tuple(found) or (RowRange(0, 0),)
