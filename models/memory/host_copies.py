"""Asynchronous copies between device and pinned host memory, overlapped with compute."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

SLAB_BYTES = 1 << 30
"""Bytes of host memory pinned per allocation: pinning is slow, and PyTorch rounds up to a power of two."""
ALIGNMENT = 512
"""Alignment in bytes of a buffer within a slab, suitable for copy engines and every dtype."""


class HostMemoryError(RuntimeError):
    """Out of host memory for offloading; a remedy for a full device does not help here."""


class CopyEngine(Protocol):
    """Copy engine of a device: memory, asynchronous copies in both directions, and events to wait for them.

    No method blocks the host. The type of events is `Any`: whatever `wait` accepts.
    """

    @property
    def device(self) -> torch.device:
        """Device whose compute overlaps with the copies."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated so far; never returned to the system."""
        ...

    def use_current_stream(self) -> None:
        """Overlap copies with the work submitted from now on: use the current stream as the compute stream."""
        ...

    def allocate_host(self, size: int) -> Tensor:
        """Allocate a host buffer, uint8 (size,).

        Raises:
            HostMemoryError: out of host memory.
        """
        ...

    def release_host(self, host: Tensor) -> None:
        """Release a host buffer; all copies to and from it must have been waited for."""
        ...

    def allocate_device(self, size: int) -> Tensor:
        """Allocate device memory, uint8 (size,)."""
        ...

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Free the memory of a storage (size 0) or allocate it again, in order with the compute stream."""
        ...

    def copy_to_host(self, memory: Tensor, host: Tensor) -> Any:
        """Start a copy to the host after the work so far; keep `memory` alive until the event is waited for."""
        ...

    def copy_to_device(self, host: Tensor, memory: Tensor) -> Any:
        """Start a copy to the device after the work so far; keep `memory` alive until the event is waited for."""
        ...

    def wait(self, event: Any) -> None:
        """Make work submitted from now on wait for the copy of this event."""
        ...


class CudaCopyEngine:
    """Copy engine of a CUDA device: one stream per direction, so that both can run at once, and pinned buffers.

    The buffers are reused in the next step. Device memory is allocated and freed on the compute stream, always after
    that stream has waited for the copy, so the caching allocator can reuse it in stream order without `record_stream`,
    which would free memory only when the host polls the events.

    Args:
        device: CUDA device.
        pool: pinned host memory, which engines for the same compute stream may share; None for a pool of its own.
    """

    def __init__(self, device: torch.device, pool: PinnedMemoryPool | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._work = torch.cuda.current_stream(device)
        self._pool = PinnedMemoryPool(pinned=True) if pool is None else pool

    @property
    def host_bytes(self) -> int:
        """See `CopyEngine`."""
        return self._pool.size

    def use_current_stream(self) -> None:
        """See `CopyEngine`."""
        self._work = torch.cuda.current_stream(self.device)

    def allocate_host(self, size: int) -> Tensor:
        """See `CopyEngine`."""
        return self._pool.allocate(size)

    def release_host(self, host: Tensor) -> None:
        """See `CopyEngine`."""
        self._pool.release(host)

    def allocate_device(self, size: int) -> Tensor:
        """See `CopyEngine`."""
        with torch.cuda.stream(self._work):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """See `CopyEngine`."""
        with torch.cuda.stream(self._work):
            storage.resize_(size)

    def copy_to_host(self, memory: Tensor, host: Tensor) -> torch.Event:
        """See `CopyEngine`."""
        return self._copy(self._out, memory, host)

    def copy_to_device(self, host: Tensor, memory: Tensor) -> torch.Event:
        """See `CopyEngine`."""
        return self._copy(self._back, host, memory)

    def wait(self, event: torch.Event) -> None:
        """See `CopyEngine`."""
        self._work.wait_event(event)

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> torch.Event:
        stream.wait_stream(self._work)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def bytes_of(storage: torch.UntypedStorage, start: int, stop: int) -> Tensor:
    """Return bytes `start:stop` of a storage as a uint8 tensor with a version counter of its own."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (stop - start,), (1,))


class PinnedMemoryPool:
    """Best-fit allocator of host buffers from large slabs, which are never freed.

    A buffer is allocated from the smallest free block that holds it; the rest of the block stays free. A released
    buffer is merged with its free neighbours, so an unused slab is always one block. If each step needs other sizes
    (experts that run one after the other), the pool grows only to the largest step's needs, except for the waste of
    buffers of more than a third of a slab.

    `allocate` must be called by one thread at a time; `release` is safe from any thread at any time.

    Args:
        pinned: allocate page-locked memory, for copies that are asynchronous to the host.

    Attributes:
        size: bytes of all slabs.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: dict[int, Tensor] = {}
        self._free: list[_Block] = []  # sorted, no two adjacent
        self._released: deque[_Block] = deque()
        self.size = 0

    def allocate(self, size: int) -> Tensor:
        """Allocate a buffer of `size` bytes, uint8.

        Raises:
            HostMemoryError: out of host memory.
        """
        while self._released:
            self._merge(self._released.popleft())
        needed = _rounded_up(size)
        fitting = [(stop - start, index) for index, (_, start, stop) in enumerate(self._free) if stop - start >= needed]
        index = min(fitting)[1] if fitting else self._add_slab(needed)
        slab, start, stop = self._free[index]
        self._free[index : index + 1] = [_Block(slab, start + needed, stop)] if start + needed < stop else []
        return self._slabs[slab][start : start + size]

    def release(self, buffer: Tensor) -> None:
        """Release a buffer of `allocate`."""
        # Merged by the next `allocate`: the garbage collector may call this on another thread, or in the middle of one.
        start = int(buffer.storage_offset())
        self._released.append(_Block(buffer.untyped_storage().data_ptr(), start, start + _rounded_up(buffer.numel())))

    def _merge(self, block: _Block) -> None:
        """Add a block to the free list, merged with adjacent ones."""
        first = last = bisect_left(self._free, block)
        if last < len(self._free) and block.touches(self._free[last]):
            block = block._replace(stop=self._free[last].stop)
            last += 1
        if first and self._free[first - 1].touches(block):
            first -= 1
            block = block._replace(start=self._free[first].start)
        self._free[first:last] = [block]

    def _add_slab(self, needed: int) -> int:
        """Allocate a slab of at least `needed` bytes; return the index of its block in the free list."""
        size = max(SLAB_BYTES if self._pinned else 0, 1 << (needed - 1).bit_length())
        try:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            raise HostMemoryError(
                f"`cpu_offloading` (True) has {self.size / 2**30:,.1f} GiB of host memory and cannot allocate "
                f"{size / 2**30:,.1f} GiB more; use a smaller cpu_offloading_num_layers, "
                "cpu_offloading_weights=false, or cpu_offloading_activations=false."
            ) from error
        self.size += size
        block = _Block(memory.data_ptr(), 0, size)
        index = bisect_left(self._free, block)
        self._free.insert(index, block)
        self._slabs[block.slab] = memory
        return index


class _Block(NamedTuple):
    """Bytes `start:stop` of the slab at an address, both multiples of `ALIGNMENT`."""

    slab: int
    start: int
    stop: int

    def touches(self, later: _Block) -> bool:
        """Return True if the other block starts at the end of this one, in the same slab."""
        return self.slab == later.slab and self.stop == later.start


def _rounded_up(size: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
