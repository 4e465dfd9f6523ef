"""Copies between a pretended device and the host, one lane for each direction, that show every wait that is missing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RUBBISH = 0x7F  # in any float dtype a large number


@dataclass(eq=False)
class Move:
    """A copy that has begun: its target holds rubbish, its source is still to be read."""

    name: str
    number: int
    source: Tensor
    target: Tensor


class LaneCopies:
    """A copy writes rubbish over its target when it begins, and reads its source when it is waited for.

    So it spoils what it overwrites too early, and what is read or changed too early. To wait for a copy is to wait for
    those before it in its direction, as with a stream, and for none in the other.

    Attributes:
        events: (`send` or `fetch`, its number in this direction) when it begins, (`sent` or `fetched`, number) when it
            has been waited for.
        reserved: bytes of all device memory that was asked for.
        host_sizes: of the buffers that were asked for.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.events: list[tuple[str, int]] = []
        self.reserved = 0
        self.host_sizes: list[int] = []
        self._lanes: dict[str, list[Move]] = {"send": [], "fetch": []}
        self._begun = {"send": 0, "fetch": 0}

    def begin(self) -> None:
        assert not self.under_way, "the last update has left copies under way"

    @property
    def under_way(self) -> int:
        return sum(map(len, self._lanes.values()))

    def host(self, size: int) -> Tensor:
        self.host_sizes.append(size)
        return torch.full((size,), RUBBISH, dtype=torch.uint8)

    def give_back(self, host: Tensor) -> None:
        raise AssertionError("the state of an optimizer stays")

    def new(self, size: int) -> Tensor:
        self.reserved += size
        return torch.full((size,), RUBBISH, dtype=torch.uint8)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        raise AssertionError("the memory of the optimizer is its own")

    def send(self, memory: Tensor, host: Tensor) -> Move:
        return self._begin("send", memory, host)

    def fetch(self, host: Tensor, memory: Tensor) -> Move:
        return self._begin("fetch", host, memory)

    def _begin(self, name: str, source: Tensor, target: Tensor) -> Move:
        assert source.numel() == target.numel()
        target.fill_(RUBBISH)
        move = Move(name, self._begun[name], source, target)
        self._begun[name] += 1
        self._lanes[name].append(move)
        self.events.append((name, move.number))
        return move

    def wait(self, mark: Move) -> None:
        lane = self._lanes[mark.name]
        while mark in lane:
            move = lane.pop(0)
            move.target.copy_(move.source)
            self.events.append(({"send": "sent", "fetch": "fetched"}[move.name], move.number))
