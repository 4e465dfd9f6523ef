"""Copies between a pretended device and the host that are as late as they may be, for tests of offloading."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.models import build
from stoker.models.memory.host_copies import HostPool, bytes_of
from stoker.models.memory.offload_activations import ActivationOffload
from stoker.models.memory.offload_weights import WeightOffload

RUBBISH = 0x7F  # as bf16 or fp32 a large number, as an index one that is out of range


@dataclass
class Copy:
    """One that has begun."""

    source: weakref.ref[Tensor]
    target: weakref.ref[Tensor]
    buffer: int
    done: bool = False


class LateCopies:
    """A copy happens when it is waited for, and until then its target holds rubbish.

    So whoever reads without waiting reads rubbish, and whoever gives up memory or a buffer without waiting is caught.

    Attributes:
        events: what was done, in order: (`send`, bytes), (`fetch`, bytes), (`wait`, bytes).
        held: memory of the device that copies were made from or to, and is still alive.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.pool = HostPool(pinned=False)
        self.events: list[tuple[str, int]] = []
        self.given: dict[int, int] = {}
        self._begun: list[Copy] = []
        self._memory: list[weakref.ref[Tensor]] = []

    @property
    def host_bytes(self) -> int:
        return self.pool.size

    @property
    def held(self) -> int:
        """Bytes of the device's memory that offloaded tensors take."""
        return sum(memory.untyped_storage().nbytes() and memory.numel() for memory in self._alive())

    def _alive(self) -> Iterator[Tensor]:
        alive = (reference() for reference in self._memory)
        return (memory for memory in {id(memory): memory for memory in alive if memory is not None}.values())

    def begin(self) -> None:
        pass

    def host(self, size: int) -> Tensor:
        buffer = self.pool.take(size)
        self.given[buffer.data_ptr()] = size
        return buffer

    def give_back(self, host: Tensor) -> None:
        assert all(copy.done or copy.buffer != host.data_ptr() for copy in self._begun), "given back during a copy"
        del self.given[host.data_ptr()]
        self.pool.give_back(host)

    def new(self, size: int) -> Tensor:
        return torch.full((size,), RUBBISH, dtype=torch.uint8)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage.resizable():
            storage.resize_(size)
        bytes_of(storage, 0, storage.nbytes()).fill_(RUBBISH)  # whom numpy has seen stays as large as it is

    def send(self, memory: Tensor, host: Tensor) -> Copy:
        host.fill_(RUBBISH)
        self._memory.append(weakref.ref(memory))
        return self._begin("send", memory, host, host)

    def fetch(self, host: Tensor, memory: Tensor) -> Copy:
        self._memory.append(weakref.ref(memory))
        return self._begin("fetch", host, memory, host)

    def _begin(self, name: str, source: Tensor, target: Tensor, buffer: Tensor) -> Copy:
        self.events.append((name, source.numel()))
        self._begun.append(Copy(weakref.ref(source), weakref.ref(target), buffer.data_ptr()))
        return self._begun[-1]

    def wait(self, mark: Copy) -> None:
        for copy in self._begun:  # those before it are done too: they share a stream
            if not copy.done:
                self._finish(copy)
            if copy is mark:
                return

    def _finish(self, copy: Copy) -> None:
        source, target = copy.source(), copy.target()
        assert source is not None, "memory was given up during its copy"
        assert target is not None, "memory was given up during its copy"
        assert source.untyped_storage().nbytes(), "memory was given up during its copy"
        target.copy_(source)
        copy.done = True
        self.events.append(("wait", source.numel()))

    def check_nothing_is_left(self) -> None:
        """After a backward: no copy under way, no memory, no buffer that somebody has."""
        assert all(copy.done for copy in self._begun)
        assert not self.held
        assert not self.given


def install(patch: Any = None) -> None:
    """Pretend that the CPU is a device with memory of its own, and offload small tensors too.

    Args:
        patch: a `pytest.MonkeyPatch` that undoes it; None: for the rest of the process.
    """
    least_size = 512
    replace, change = (setattr, operator.setitem) if patch is None else (patch.setattr, patch.setitem)
    replace(build, "copies_of", lambda device: LateCopies)
    for part in (ActivationOffload, WeightOffload):
        defaults: Any = part.__init__.__kwdefaults__
        change(defaults, "least_size", least_size)
