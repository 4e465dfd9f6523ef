"""Fake device-host copies that happen as late as possible, for tests of offloading."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.models import build
from stoker.models.memory.host_copies import PinnedMemoryPool, bytes_of
from stoker.models.memory.offload_activations import ActivationOffload
from stoker.models.memory.offload_weights import WeightOffload

GARBAGE = 0x7F  # a large number in bf16 and fp32, an index out of range as an integer


@dataclass
class Copy:
    """A copy in progress."""

    source: weakref.ref[Tensor]
    target: weakref.ref[Tensor]
    buffer: int
    done: bool = False


class DeferredCopies:
    """Copies that are done when waited for; until then their target holds garbage.

    So reading without waiting reads garbage, and freeing memory or a buffer without waiting fails an assertion.

    Attributes:
        events: in order: (`send`, bytes), (`fetch`, bytes), (`wait`, bytes).
        given: bytes of each host buffer in use, by address.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.pool = PinnedMemoryPool(pinned=False)
        self.events: list[tuple[str, int]] = []
        self.given: dict[int, int] = {}
        self._started: list[Copy] = []
        self._memory: list[weakref.ref[Tensor]] = []

    @property
    def host_bytes(self) -> int:
        return self.pool.size

    @property
    def held(self) -> int:
        """Bytes of device memory that was copied from or to and is still alive."""
        return sum(memory.untyped_storage().nbytes() and memory.numel() for memory in self._alive())

    def _alive(self) -> Iterator[Tensor]:
        alive = (reference() for reference in self._memory)
        return (memory for memory in {id(memory): memory for memory in alive if memory is not None}.values())

    def use_current_stream(self) -> None:
        pass

    def allocate_host(self, size: int) -> Tensor:
        buffer = self.pool.allocate(size)
        self.given[buffer.data_ptr()] = size
        return buffer

    def release_host(self, host: Tensor) -> None:
        assert all(copy.done or copy.buffer != host.data_ptr() for copy in self._started), (
            "buffer was returned during a copy"
        )
        del self.given[host.data_ptr()]
        self.pool.release(host)

    def allocate_device(self, size: int) -> Tensor:
        return torch.full((size,), GARBAGE, dtype=torch.uint8)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage.resizable():
            storage.resize_(size)
        bytes_of(storage, 0, storage.nbytes()).fill_(GARBAGE)  # storages shared with numpy cannot be resized

    def copy_to_host(self, memory: Tensor, host: Tensor) -> Copy:
        host.fill_(GARBAGE)
        self._memory.append(weakref.ref(memory))
        return self._start("send", memory, host, host)

    def copy_to_device(self, host: Tensor, memory: Tensor) -> Copy:
        self._memory.append(weakref.ref(memory))
        return self._start("fetch", host, memory, host)

    def _start(self, name: str, source: Tensor, target: Tensor, buffer: Tensor) -> Copy:
        self.events.append((name, source.numel()))
        self._started.append(Copy(weakref.ref(source), weakref.ref(target), buffer.data_ptr()))
        return self._started[-1]

    def wait(self, event: Copy) -> None:
        for copy in self._started:  # earlier copies are done first, as on one stream
            if not copy.done:
                self._finish(copy)
            if copy is event:
                return

    def _finish(self, copy: Copy) -> None:
        source, target = copy.source(), copy.target()
        assert source is not None, "memory was freed during its copy"
        assert target is not None, "memory was freed during its copy"
        assert source.untyped_storage().nbytes(), "memory was freed during its copy"
        target.copy_(source)
        copy.done = True
        self.events.append(("wait", source.numel()))

    def check_all_freed(self) -> None:
        """Check after a backward pass that no copy is in progress and no memory or buffer is in use."""
        assert all(copy.done for copy in self._started)
        assert not self.held
        assert not self.given


def install(patch: Any = None) -> None:
    """Treat the CPU as a device with its own memory, and offload small tensors too.

    Args:
        patch: `pytest.MonkeyPatch` that undoes it; None to keep it for the rest of the process.
    """
    least_size = 512
    replace, change = (setattr, operator.setitem) if patch is None else (patch.setattr, patch.setitem)
    replace(build, "copy_engine_factory", lambda device: DeferredCopies)
    for part in (ActivationOffload, WeightOffload):
        defaults: Any = part.__init__.__kwdefaults__
        change(defaults, "least_size", least_size)
