"""Memory that the ranks of a group write to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

COUNTER_BYTES = 64
"""Distance of two counters, so that no two writers share a sector of memory."""


class Memory(Protocol):
    """Memory of every rank of a group that all of them can write.

    Attributes:
        rank: rank in the group.
        of_rank: memory of each rank, uint8.
    """

    rank: int
    of_rank: list[Tensor]

    def write(self, ranks: Sequence[int], offset: int, value: int) -> None:
        """Write a counter (int32) into the memory of ranks after what the current stream has written there."""
        ...

    def wait(self, offsets: Sequence[int], value: int) -> None:
        """Make the current stream wait until all these counters in the memory of this rank have reached a value."""
        ...

    def meet(self, value: int) -> None:
        """Make the current stream wait for all ranks to have come here, with what they have written before.

        Each writes the counter at its rank times `COUNTER_BYTES` of the others, larger every time.
        """
        ...

    def allocate(self, num_bytes: int) -> Memory:
        """Return more memory of the same ranks, zeroed; a collective of these."""
        ...
