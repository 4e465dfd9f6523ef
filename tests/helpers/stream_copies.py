"""Fake device-host copies with one stream per direction, which expose missing waits, for tests of optimizer offload."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GARBAGE = 0x7F  # a large number in any float dtype


@dataclass(eq=False)
class PendingCopy:
    """A copy in progress: its target holds garbage, its source has not been read yet."""

    name: str
    number: int
    source: Tensor
    target: Tensor


class StreamCopies:
    """Copies that fill their target with garbage when started, and read their source when waited for.

    So overwriting, reading or changing memory too early gives wrong results. Waiting for a copy waits for all earlier
    ones in the same direction, as with a stream, and for none in the other direction.

    Attributes:
        events: (`send` or `fetch`, number in this direction) when a copy starts, (`sent` or `fetched`, number) when it
            has been waited for.
        reserved: total bytes of allocated device memory.
        host_sizes: sizes of the allocated host buffers.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.events: list[tuple[str, int]] = []
        self.reserved = 0
        self.host_sizes: list[int] = []
        self._streams: dict[str, list[PendingCopy]] = {"send": [], "fetch": []}
        self._started = {"send": 0, "fetch": 0}

    def use_current_stream(self) -> None:
        assert not self.under_way, "the last update has not waited for all copies"

    @property
    def under_way(self) -> int:
        return sum(map(len, self._streams.values()))

    def allocate_host(self, size: int) -> Tensor:
        self.host_sizes.append(size)
        return torch.full((size,), GARBAGE, dtype=torch.uint8)

    def release_host(self, host: Tensor) -> None:
        raise AssertionError("host buffers of optimizer state are never freed")

    def allocate_device(self, size: int) -> Tensor:
        self.reserved += size
        return torch.full((size,), GARBAGE, dtype=torch.uint8)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        raise AssertionError("device memory of the optimizer is never resized")

    def copy_to_host(self, memory: Tensor, host: Tensor) -> PendingCopy:
        return self._start("send", memory, host)

    def copy_to_device(self, host: Tensor, memory: Tensor) -> PendingCopy:
        return self._start("fetch", host, memory)

    def _start(self, name: str, source: Tensor, target: Tensor) -> PendingCopy:
        assert source.numel() == target.numel()
        target.fill_(GARBAGE)
        move = PendingCopy(name, self._started[name], source, target)
        self._started[name] += 1
        self._streams[name].append(move)
        self.events.append((name, move.number))
        return move

    def wait(self, event: PendingCopy) -> None:
        stream = self._streams[event.name]
        while event in stream:
            move = stream.pop(0)
            move.target.copy_(move.source)
            self.events.append(({"send": "sent", "fetch": "fetched"}[move.name], move.number))
