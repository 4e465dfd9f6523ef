"""Layout of the ranks of a run: which ranks share data, a sequence, a layer's weights or experts. Without torch.

Ranks are numbered with the tensor-parallel coordinate varying fastest, then context, data and pipeline, the order
`tp-cp-ep-dp-pp` of Megatron-LM (`parallel_state.py`): groups that send most often are on neighbouring devices. Experts
are distributed over consecutive ranks of the same pipeline stage, whatever these do for the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["pipeline", "data", "context", "tensor"]
AXES: tuple[Axis, ...] = ("pipeline", "data", "context", "tensor")
"""The axes of the mesh, from the one that varies slowest to the fastest."""


class Coordinates(NamedTuple):
    """Place of a rank on each axis of the mesh."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Number of ranks on each axis.

    Attributes:
        data: ranks with different samples (`world_size` divided by the other axes).
        tensor: ranks that share the heads and channels of each layer (`tensor_model_parallel_size`).
        context: ranks that share the tokens of each sequence in attention (`context_parallel_size`).
        pipeline: ranks that share the layers (`pipeline_model_parallel_size`).
        expert: ranks that share the experts of each layer (`expert_model_parallel_size`), out of those of the axes
            data, context and tensor.
        sequence: the residual stream is sharded over the tensor axis (`sequence_parallel`).
        overlap_gather: all-gathers of the tensor axis run beside the products that need them (`tp_comm_overlap_ag`).
        overlap_scatter: its reduce-scatters run beside the products that they sum (`tp_comm_overlap_rs`).
    """

    data: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence: bool = False
    overlap_gather: bool = False
    overlap_scatter: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.model_ranks * self.data

    @property
    def model_ranks(self) -> int:
        """Ranks that work on one sample."""
        return self.tensor * self.context * self.pipeline

    def size(self, axis: Axis) -> int:
        """Return the number of ranks on an axis."""
        return {"pipeline": self.pipeline, "data": self.data, "context": self.context, "tensor": self.tensor}[axis]

    def coordinates(self, rank: int) -> Coordinates:
        """Return the place of a rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"`rank` ({rank}) must be from 0 to {self.world_size - 1}.")
        place: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.size(axis))
        return Coordinates(**place)

    def place_text(self, rank: int) -> str:
        """Return the place of a rank on the axes with several ranks; empty without model parallelism."""
        if self.model_ranks == 1:
            return ""
        place = self.coordinates(rank)
        return ", ".join(f"{axis} {getattr(place, axis)}" for axis in AXES if self.size(axis) > 1)

    def rank(self, place: Coordinates) -> int:
        """Return the rank at a place, the inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.size(axis) + getattr(place, axis)
        return rank

    def groups(self, *axes: Axis) -> list[tuple[int, ...]]:
        """Return all groups of ranks that differ on these axes only, in the order of their first ranks."""
        others = [axis for axis in AXES if axis not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            found.setdefault(tuple(getattr(place, axis) for axis in others), []).append(rank)
        return sorted(tuple(group) for group in found.values())

    def group_of(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from a rank on these axes only, itself included."""
        return next(group for group in self.groups(*axes) if rank in group)

    def expert_groups(self) -> list[tuple[int, ...]]:
        """Return the groups of ranks that together hold the experts once: consecutive ranks of a pipeline stage."""
        return [tuple(range(first, first + self.expert)) for first in range(0, self.world_size, self.expert)]

    def expert_data_groups(self) -> list[tuple[int, ...]]:
        """Return the groups of ranks that hold the same experts, within a pipeline stage."""
        stage = self.world_size // self.pipeline
        return [
            tuple(range(start + place, start + stage, self.expert))
            for start in range(0, self.world_size, stage)
            for place in range(self.expert)
        ]

    @property
    def description(self) -> str:
        """Description of the axes with several ranks, for the log: `tensor 2 (sequence parallel), data 4`."""
        named: list[str] = []
        for axis in reversed(AXES):
            if self.size(axis) > 1:
                overlap = ", overlapped" if self.overlap_gather or self.overlap_scatter else ""
                detail = f" (sequence parallel{overlap})" if axis == "tensor" and self.sequence else ""
                named.append(f"{axis} {self.size(axis)}{detail}")
        if self.expert > 1:
            named.append(f"expert {self.expert}")
        return ", ".join(named) or "one rank"


ONE_RANK = ParallelLayout()
"""The layout without parallelism."""
