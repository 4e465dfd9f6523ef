"""Partition of a parameter over tensor-parallel or expert-parallel ranks: which rows or columns each rank holds.

A module states how its own parameters and buffers are split in an attribute `partitions`, from name to `RankPart`; the
model states in an attribute `default_partition` which ranks replicate all others. Attributes of modules outlive
`fully_shard` and `to_empty`, which replace the parameters themselves. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class Section(NamedTuple):
    """Section of a fused parameter, split evenly: [q | k | v] has three, most parameters have one.

    Attributes:
        size: size along the partitioned dimension.
        parts: number of distinct parts; fewer than ranks if several ranks hold the same part (key groups).
    """

    size: int
    parts: int


class PartRange(NamedTuple):
    """Range of the partitioned dimension that a rank holds.

    Attributes:
        start: first index in the full parameter.
        size: number of indices.
        replica: index of this rank among those with the same range.
        num_replicas: number of ranks with the same range.
    """

    start: int
    size: int
    replica: int
    num_replicas: int


@dataclass(frozen=True, slots=True)
class Partition:
    """Split of one dimension of a parameter; each rank holds its part of every section, concatenated.

    Rank r of R holds part r * parts // R of a section.

    Attributes:
        dim: 0 (rows, or experts) or 1 (columns).
        sections: sections along the dimension; one for columns.

    Raises:
        ValueError: a section is not divisible by its parts, or columns have several sections.
    """

    dim: int
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        if self.dim not in (0, 1):
            raise ValueError(f"`dim` must be 0 or 1, but is {self.dim}")
        if not self.sections or (self.dim == 1 and len(self.sections) > 1):
            raise ValueError(f"`sections` ({len(self.sections)}) must be one for columns, and at least one for rows")
        for size, parts in self.sections:
            if parts < 1 or size < parts or size % parts:
                raise ValueError(f"`sections` must be divisible by their parts, but {size} is split into {parts}")

    @property
    def full_size(self) -> int:
        """Size of the full parameter along the dimension."""
        return sum(section.size for section in self.sections)

    def local_size(self) -> int:
        """Return the size along the dimension on each rank."""
        return sum(section.size // section.parts for section in self.sections)

    def ranges(self, rank: int, ranks: int) -> list[PartRange]:
        """Return the ranges of a rank, one for each section, in the order of its local tensor.

        Raises:
            ValueError: a section has more parts than there are ranks, so that no rank holds some of them.
        """
        found: list[PartRange] = []
        start = 0
        for size, parts in self.sections:
            if parts > ranks:
                raise ValueError(f"`sections` must not have more parts ({parts}) than there are ranks ({ranks})")
            part = rank * parts // ranks
            first_rank, end_rank = -(-part * ranks // parts), -(-(part + 1) * ranks // parts)
            length = size // parts
            found.append(PartRange(start + part * length, length, rank - first_rank, end_rank - first_rank))
            start += size
        return found


def even_partition(dim: int, ranks: int, *sizes: int) -> Partition:
    """Return the partition of sections of these sizes into one part for each rank."""
    return Partition(dim, tuple(Section(size, ranks) for size in sizes))


PartAxis = Literal["tensor", "expert"]
"""Ranks that hold the parts of a parameter."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a parameter that this rank holds, before data parallelism shards it further.

    Attributes:
        partition: how the parameter is split over the ranks; None: replicated on them.
        rank: rank of this process among those that hold the full parameter together.
        ranks: number of those.
        replica: data-parallel rank of this process, among the ranks with this part.
        num_replicas: number of data-parallel ranks.
        axis: the ranks share tensors, or experts; data-parallel ranks of experts are others than those of the rest.
        holder: index of this rank's pipeline stage among those that hold the parameter.
        holders: number of those; several hold tied embeddings and position biases.

    Raises:
        ValueError: the ranks do not fit, or a section has more parts than ranks.
    """

    partition: Partition | None
    rank: int
    ranks: int
    replica: int = 0
    num_replicas: int = 1
    axis: PartAxis = "tensor"
    holder: int = 0
    holders: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.ranks and 0 <= self.replica < self.num_replicas):
            raise ValueError(
                f"`rank` ({self.rank}) must be below `ranks` ({self.ranks}), "
                f"and `replica` ({self.replica}) below `num_replicas` ({self.num_replicas})"
            )
        self.ranges()

    def ranges(self) -> list[PartRange]:
        """Return the ranges of this rank along the partitioned dimension; empty if replicated."""
        return self.partition.ranges(self.rank, self.ranks) if self.partition else []

    def full_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the full parameter, given that of this rank's part.

        Raises:
            ValueError: the local shape is not that of a part.
        """
        shape = list(local_shape)
        if self.partition is None:
            return tuple(shape)
        dim, size = self.partition.dim, self.partition.local_size()
        if len(shape) <= dim or shape[dim] != size:
            raise ValueError(f"`local_shape` ({shape}) must have size {size} along dimension {dim}")
        shape[dim] = self.partition.full_size
        return tuple(shape)


def set_partitions(module: nn.Module, partitions: Mapping[str, RankPart], default: RankPart | None = None) -> None:
    """State how parameters and buffers of a module are split.

    Args:
        module: the module.
        partitions: the part of each of its own parameters and buffers, by name.
        default: the part of all others of the model; for a model only.
    """
    module.__dict__.update(partitions=dict(partitions), default_partition=default)


def names_elsewhere(model: nn.Module) -> Set[str]:
    """Return the names of the parameters and buffers that only other ranks of a pipeline have."""
    elsewhere: Any = getattr(model, "elsewhere", frozenset())
    return elsewhere


def partitions_of(model: nn.Module) -> dict[str, RankPart]:
    """Return the partitions of the parameters and buffers of a model by name; empty without model parallelism.

    Raises:
        ValueError: a module has a partition of a tensor that it does not have, or the model has no `default_partition`.
    """
    default = getattr(model, "default_partition", None)
    found: dict[str, RankPart] = {}
    for prefix, module in model.named_modules():
        own: Any = getattr(module, "partitions", {})
        names = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        if unknown := sorted(set(own).difference(names)):
            raise ValueError(f"`{prefix}.partitions` must name parameters or buffers, but names {unknown[0]}")
        if own and default is None:
            raise ValueError(f"`default_partition` of the model must be set, since `{prefix}` has partitions")
        for name in names:
            part = own.get(name, default)
            if part is not None:
                found[f"{prefix}.{name}" if prefix else name] = part
    return found
