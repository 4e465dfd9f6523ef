"""Memory that forked ranks share, in place of that of GPUs which read each other's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stoker.models.parallel.peer_memory import COUNTER_BYTES


class HostMemory:
    """A file of each rank mapped by all; waiting is polling. See `models.parallel.peer_memory.Memory`."""

    def __init__(self, directory: Path, rank: int, size: int, num_bytes: int) -> None:
        self.rank = rank
        self._directory, self._size, self._made = directory, size, 0
        paths = [directory / f"memory{each}" for each in range(size)]
        self.of_rank: list[Tensor] = [
            torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths
        ]

    def allocate(self, num_bytes: int) -> HostMemory:
        self._made += 1
        directory = self._directory / f"more{self._made}"
        directory.mkdir(exist_ok=True)
        return HostMemory(directory, self.rank, self._size, num_bytes)

    def write(self, ranks: Sequence[int], offset: int, value: int) -> None:
        for rank in ranks:
            self.of_rank[rank][offset : offset + 4].view(torch.int32).fill_(value)

    def wait(self, offsets: Sequence[int], value: int) -> None:
        for offset in offsets:
            counter = self.of_rank[self.rank][offset : offset + 4].view(torch.int32)
            while int(counter) < value:
                time.sleep(1e-4)

    def meet(self, value: int) -> None:
        others = [rank for rank in range(self._size) if rank != self.rank]
        self.write(others, self.rank * COUNTER_BYTES, value)
        self.wait([rank * COUNTER_BYTES for rank in others], value)
