"""Copies between a device and host memory that run beside the work of the device."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

import torch
from torch import Tensor

SLAB = 1 << 30
"""Bytes of host memory that are pinned at once: pinning is slow, and PyTorch rounds it up to a power of two."""
ALIGNMENT = 512
"""Of a buffer within a slab, in bytes: what a copy engine likes, and every dtype."""


class HostMemoryError(RuntimeError):
    """The host has no memory left to offload to; what would mend a device that is full does not mend this."""


class Copies(Protocol):
    """What offloading needs of a device: memory, copies that run beside the work, and a way to wait for them.

    Nothing here makes the host wait. `Any` is a mark: what `wait` needs to know of a copy.
    """

    @property
    def device(self) -> torch.device:
        """Whose work goes on meanwhile."""
        ...

    @property
    def host_bytes(self) -> int:
        """Host memory that was taken so far, which is kept."""
        ...

    def begin(self) -> None:
        """The work that copies run beside is the one the caller submits from now on."""
        ...

    def host(self, size: int) -> Tensor:
        """A buffer of so many bytes in host memory, uint8 (size,).

        Raises:
            HostMemoryError: there is none left.
        """
        ...

    def give_back(self, host: Tensor) -> None:
        """Another copy may have this buffer; all copies to and from it have been waited for."""
        ...

    def new(self, size: int) -> Tensor:
        """Memory of the device, uint8 (size,)."""
        ...

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Give up the memory of a storage (size 0), or give it some, for work that is submitted from now on."""
        ...

    def send(self, memory: Tensor, host: Tensor) -> Any:
        """Begin to copy to the host what the work so far has written; `memory` is kept until the mark is waited for."""
        ...

    def fetch(self, host: Tensor, memory: Tensor) -> Any:
        """Begin to copy to the device, after the work so far; `memory` is kept until the mark is waited for."""
        ...

    def wait(self, mark: Any) -> None:
        """Work that is submitted from now on begins after this copy."""
        ...


class CudaCopies:
    """Copies of a CUDA device: a stream for each direction, which the device can use at once, and pinned buffers.

    The buffers are kept for the next step. Memory of the device is taken from the pool of the stream of the work and
    given back there, always after that stream has waited for the copy: what the pool gives out next is then in order
    with it, without `record_stream`, which gives memory back only when the host happens to look.

    Args:
        device: a CUDA device.
        pool: its host memory, which copies beside the same work may share; None for one of its own.
    """

    def __init__(self, device: torch.device, pool: HostPool | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._work = torch.cuda.current_stream(device)
        self._pool = HostPool(pinned=True) if pool is None else pool

    @property
    def host_bytes(self) -> int:
        """Host memory that is pinned."""
        return self._pool.size

    def begin(self) -> None:
        """The stream of the work is the current one."""
        self._work = torch.cuda.current_stream(self.device)

    def host(self, size: int) -> Tensor:
        """See `Copies`."""
        return self._pool.take(size)

    def give_back(self, host: Tensor) -> None:
        """See `Copies`."""
        self._pool.give_back(host)

    def new(self, size: int) -> Tensor:
        """See `Copies`."""
        with torch.cuda.stream(self._work):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """See `Copies`."""
        with torch.cuda.stream(self._work):
            storage.resize_(size)

    def send(self, memory: Tensor, host: Tensor) -> torch.Event:
        """See `Copies`."""
        return self._copy(self._out, memory, host)

    def fetch(self, host: Tensor, memory: Tensor) -> torch.Event:
        """See `Copies`."""
        return self._copy(self._back, host, memory)

    def wait(self, mark: torch.Event) -> None:
        """See `Copies`."""
        self._work.wait_event(mark)

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> torch.Event:
        stream.wait_stream(self._work)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def bytes_of(storage: torch.UntypedStorage, start: int, stop: int) -> Tensor:
    """Some bytes of a storage as a tensor, uint8, which shares no version counter with other tensors there."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (stop - start,), (1,))


class HostPool:
    """Buffers of host memory, cut from large slabs and kept for the next who needs about as many bytes.

    A step needs the same sizes as the one before, so buffers are given out again whole and never merged. Where sizes
    change (experts that run one after the other), they are rounded up by an eighth at most, so there are few.

    Args:
        pinned: a device can copy from and to them without the host.

    Attributes:
        size: bytes of all slabs.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._rests: list[Tensor] = []
        self.size = 0

    def take(self, size: int) -> Tensor:
        """A buffer of `size` bytes, uint8.

        Raises:
            HostMemoryError: the system does not give that much.
        """
        room = _rounded_up(size)
        buffer = self._free[room].pop() if self._free[room] else self._cut(room)
        return buffer[:size]

    def give_back(self, buffer: Tensor) -> None:
        """Keep a buffer of `take` for another."""
        start, room = int(buffer.storage_offset()), _rounded_up(buffer.numel())
        self._free[room].append(bytes_of(buffer.untyped_storage(), start, start + room))

    def _cut(self, room: int) -> Tensor:
        """A new buffer, from the first slab that has so much left, or from a new slab."""
        place = next((place for place, rest in enumerate(self._rests) if rest.numel() >= room), None)
        if place is None:
            slab = max(SLAB, 1 << (room - 1).bit_length()) if self._pinned else room
            try:
                memory = torch.empty(slab, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError as error:
                raise HostMemoryError(
                    f"`cpu_offloading` (True) has {self.size / 2**30:,.1f} GiB of host memory, and the system does not "
                    f"give {slab / 2**30:,.1f} GiB more; use a smaller cpu_offloading_num_layers, "
                    "cpu_offloading_weights=false, or cpu_offloading_activations=false."
                ) from error
            self.size += slab
            place = len(self._rests)
            self._rests.append(memory)
        buffer, rest = self._rests[place][:room], self._rests[place][room:]
        self._rests[place] = rest
        return buffer


def _rounded_up(size: int) -> int:
    """To a multiple of its power of two's eighth, and of `ALIGNMENT`."""
    grain = max(ALIGNMENT, 1 << max(size.bit_length() - 4, 0))
    return -(-size // grain) * grain
