"""Memory of the GPUs of one host that all their ranks write, with counters that streams wait for."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from ...models.parallel.overlap import devices_share_memory
from ...models.parallel.peer_memory import COUNTER_BYTES, Memory
from .process_group import DistributedContext


class PeerMemory:
    """Symmetric memory of the GPUs of a group, see `Memory`; a collective of its ranks.

    Args:
        ranks: the ranks, on one host.
        device: device of this rank.
        num_bytes: bytes of each rank.
    """

    def __init__(self, ranks: DistributedContext, device: torch.device, num_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        group = ranks.group or dist.group.WORLD
        assert group is not None
        self.rank = ranks.rank
        self._ranks = ranks
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        own.zero_()
        torch.cuda.synchronize(device)
        handle = symmetric_memory.rendezvous(own, group.group_name)
        self._own = own
        self._pointers = list(handle.buffer_ptrs)
        self.of_rank = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(ranks.world_size)]
        self._arrays: dict[tuple[tuple[int, int], ...], Any] = {}
        dist.barrier(group=group, device_ids=[device.index or 0])  # all are zeroed before one writes

    def write(self, ranks: Sequence[int], offset: int, value: int) -> None:
        """Write a counter, see `Memory`."""
        self._run(self._writes(ranks, offset), value)

    def wait(self, offsets: Sequence[int], value: int) -> None:
        """Make the current stream wait for counters, see `Memory`."""
        self._run(self._waits(offsets), value)

    def meet(self, value: int) -> None:
        """Make the current stream wait for all ranks, see `Memory`."""
        others = [rank for rank in range(len(self._pointers)) if rank != self.rank]
        awaited = self._waits([rank * COUNTER_BYTES for rank in others])
        cure = "model.moe_token_dispatcher_type=alltoall"
        self._run((*self._writes(others, self.rank * COUNTER_BYTES), *awaited), value, cure)

    def _writes(self, ranks: Sequence[int], offset: int) -> tuple[tuple[int, int], ...]:
        return tuple((_WRITE_VALUE_32, self._pointers[rank] + offset) for rank in ranks)

    def _waits(self, offsets: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return tuple((_WAIT_VALUE_32, self._pointers[self.rank] + offset) for offset in offsets)

    def _run(
        self, operations: tuple[tuple[int, int], ...], value: int, cure: str = "model.copy_engine_collectives=False"
    ) -> None:
        """Enqueue operations at these addresses in this order: one call of the driver is less work of the host."""
        if operations not in self._arrays:
            items = (_MemoryOperation(*each) for each in operations)
            self._arrays[operations] = (_MemoryOperation * len(operations))(*items)
        array = self._arrays[operations]
        for operation in array:
            operation.value = value
        code = _batch_function()(self._stream, len(array), ctypes.addressof(array), 0)
        if code:
            raise RuntimeError(f"cuStreamBatchMemOp_v2 failed with CUDA error {code}; set {cure}")

    def allocate(self, num_bytes: int) -> PeerMemory:
        """Return more memory of the same ranks, see `Memory`."""
        return PeerMemory(self._ranks, self._device, num_bytes)

    @property
    def _stream(self) -> int:
        """The current stream; it is asked for some hundred times in a step."""
        return torch._C._cuda_getCurrentRawStream(self._index)


_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32."""


class _MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of these; flags 0: waits for a greater or equal value."""

    _fields_ = (
        ("operation", ctypes.c_uint64),  # of 32 bits and 32 of padding
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("padding", ctypes.c_uint64 * 2),
    )


@cache
def _batch_function() -> Any:
    """Return the CUDA driver's function for memory operations of a stream; it returns an error code."""
    function = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2
    # stream, number of operations, their address, flags
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    return function


def find_peer_memory(ranks: DistributedContext, device: torch.device) -> Callable[[int], Memory] | None:
    """Return what allocates memory of these ranks, of so many bytes each; None where their GPUs are not on one host and
    read each other's memory. A collective of the ranks, like the allocation.
    """
    places = [text.rsplit(" ", 1) for text in ranks.all_gather_text(f"{socket.gethostname()} {device.index or 0}")]
    devices = [int(index) for _, index in places]
    one_host = len({host for host, _ in places}) == 1 and len(set(devices)) == len(devices)
    if device.type == "cuda" and one_host and devices_share_memory(devices):
        return partial(PeerMemory, ranks, device)
    return None
