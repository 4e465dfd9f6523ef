"""Copies between a device and host memory that run beside the work of the device."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Any, NamedTuple, Protocol

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
    """Buffers of host memory, cut from large slabs, which are kept.

    A buffer comes from the smallest free piece that holds it, and what is left of the piece stays free. Once it is
    back, it becomes one piece with its free neighbours. So a slab that nobody uses is whole again whatever it was cut
    into, and where each step needs other sizes (experts that run one after the other) the pool stays as large as the
    largest step needs, but for what buffers of more than a third of a slab leave unused.

    One thread at a time takes buffers, but any may give one back at any moment.

    Args:
        pinned: a device can copy from and to them without the host.

    Attributes:
        size: bytes of all slabs.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: dict[int, Tensor] = {}
        self._free: list[_Piece] = []  # in order, and no two of them touch
        self._back: deque[_Piece] = deque()
        self.size = 0

    def take(self, size: int) -> Tensor:
        """A buffer of `size` bytes, uint8.

        Raises:
            HostMemoryError: the system does not give that much.
        """
        while self._back:
            self._merge(self._back.popleft())
        room = _rounded_up(size)
        fitting = [(stop - start, place) for place, (_, start, stop) in enumerate(self._free) if stop - start >= room]
        place = min(fitting)[1] if fitting else self._add_slab(room)
        slab, start, stop = self._free[place]
        self._free[place : place + 1] = [_Piece(slab, start + room, stop)] if start + room < stop else []
        return self._slabs[slab][start : start + size]

    def give_back(self, buffer: Tensor) -> None:
        """Keep a buffer of `take` for others."""
        # the next `take` merges it: this may be the garbage collector, on another thread or in the midst of a `take`
        start = int(buffer.storage_offset())
        self._back.append(_Piece(buffer.untyped_storage().data_ptr(), start, start + _rounded_up(buffer.numel())))

    def _merge(self, piece: _Piece) -> None:
        """Add a piece to the free ones, as one with those it touches."""
        first = last = bisect_left(self._free, piece)
        if last < len(self._free) and piece.touches(self._free[last]):
            piece = piece._replace(stop=self._free[last].stop)
            last += 1
        if first and self._free[first - 1].touches(piece):
            first -= 1
            piece = piece._replace(start=self._free[first].start)
        self._free[first:last] = [piece]

    def _add_slab(self, room: int) -> int:
        """The place among the free pieces of a new slab, which has room for so many bytes."""
        size = max(SLAB if self._pinned else 0, 1 << (room - 1).bit_length())
        try:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            raise HostMemoryError(
                f"`cpu_offloading` (True) has {self.size / 2**30:,.1f} GiB of host memory, and the system does not "
                f"give {size / 2**30:,.1f} GiB more; use a smaller cpu_offloading_num_layers, "
                "cpu_offloading_weights=false, or cpu_offloading_activations=false."
            ) from error
        self.size += size
        piece = _Piece(memory.data_ptr(), 0, size)
        place = bisect_left(self._free, piece)
        self._free.insert(place, piece)
        self._slabs[piece.slab] = memory
        return place


class _Piece(NamedTuple):
    """Bytes of a slab, by its address: from `start` to `stop`, both multiples of `ALIGNMENT`."""

    slab: int
    start: int
    stop: int

    def touches(self, later: _Piece) -> bool:
        """Whether the other begins where this one ends; slabs that lie side by side are still two."""
        return self.slab == later.slab and self.stop == later.start


def _rounded_up(size: int) -> int:
    """To a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
