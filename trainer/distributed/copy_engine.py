"""Collectives among the GPUs of one host by their copy engines, which leave all multiprocessors to the model.

NCCL's kernels take multiprocessors from the matrix products beside them, whose persistent blocks then run in two waves:
hidden behind the backward pass, they cost as much as alone. Here a rank copies its data into the memory of the others,
which a copy engine does; streams wait for it by memory operations, and the only kernels are the local sums. What is
sent in bf16 is summed in fp32, in the order of the ranks, so that a sum has half the traffic of fp32 and its accuracy.

Data goes through an inbox of every rank in pieces, so that memory does not depend on the model: while one piece is
summed, the next one arrives. Each rank counts the pieces that it has sent to and used of every other.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.sum_over_ranks import sum_over_ranks
from ...models.parallel.overlap import devices_share_memory
from ...models.parallel.peer_memory import COUNTER_BYTES, Memory
from ..utils.errors import UserError
from .process_group import DistributedContext

SLOTS = 2
"""Pieces in flight."""

SLOT_BYTES = 128 << 20
"""Bytes of a piece from all ranks: the weights of a layer of 67 million parameters in bf16."""


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
        self._meeting = self._operations_of_meet()
        dist.barrier(group=group, device_ids=[device.index or 0])  # all are zeroed before one writes

    def write(self, rank: int, offset: int, value: int) -> None:
        """Write a counter, see `Memory`."""
        self._run("cuStreamWriteValue32_v2", rank, offset, value)

    def wait(self, offset: int, value: int) -> None:
        """Make the current stream wait for a counter, see `Memory`."""
        self._run("cuStreamWaitValue32_v2", self.rank, offset, value)  # flags 0: greater or equal

    def meet(self, value: int) -> None:
        """Make the current stream wait for all ranks, see `Memory`: one call of the driver is less work of the host."""
        for operation in self._meeting:
            operation.value = value
        function, address = "cuStreamBatchMemOp_v2", ctypes.addressof(self._meeting)
        code = _driver_function(function)(self._stream, len(self._meeting), address, 0)
        self._check(function, code, cure="model.moe_token_dispatcher_type=alltoall")

    def _operations_of_meet(self) -> Any:
        others = [rank for rank in range(len(self._pointers)) if rank != self.rank]
        written = [(_WRITE_VALUE_32, self._pointers[rank] + self.rank * COUNTER_BYTES) for rank in others]
        awaited = [(_WAIT_VALUE_32, self._pointers[self.rank] + rank * COUNTER_BYTES) for rank in others]
        return (_MemoryOperation * (2 * len(others)))(*(_MemoryOperation(*each) for each in (*written, *awaited)))

    def allocate(self, num_bytes: int) -> PeerMemory:
        """Return more memory of the same ranks, see `Memory`."""
        return PeerMemory(self._ranks, self._device, num_bytes)

    def _run(self, function: str, rank: int, offset: int, value: int) -> None:
        self._check(function, _driver_function(function)(self._stream, self._pointers[rank] + offset, value, 0))

    @property
    def _stream(self) -> int:
        """The current stream; it is asked for some hundred times in a step."""
        return torch._C._cuda_getCurrentRawStream(self._index)  # pyright: ignore[reportAttributeAccessIssue]

    @staticmethod
    def _check(function: str, code: int, cure: str = "model.copy_engine_collectives=False") -> None:
        if code:
            raise RuntimeError(f"{function} failed with CUDA error {code}; set {cure}")


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
def _driver_function(name: str) -> Any:
    """Return a function of the CUDA driver for one or a batch of stream memory operations; it returns an error code."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    several = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]  # stream, number, address, flags
    one = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]  # stream, address, value, flags
    function.argtypes = several if "Batch" in name else one
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


def build_collectives(
    ranks: DistributedContext, device: torch.device, asked: bool | None
) -> CopyEngineCollectives | None:
    """Build the collectives of these ranks, or None where their GPUs are not on one host and read each other's memory;
    a collective of the ranks.

    Args:
        ranks: the ranks.
        device: device of this rank.
        asked: `model.copy_engine_collectives`.

    Raises:
        UserError: they are asked for and not possible.
    """
    if asked is False or ranks.world_size == 1:
        return None
    memory = find_peer_memory(ranks, device)
    if memory is not None:
        return CopyEngineCollectives(memory(CopyEngineCollectives.inbox_bytes(ranks.world_size)))
    if asked:
        raise UserError(
            "`model.copy_engine_collectives` (True) needs ranks with a GPU each, on one host, that read each other's "
            "memory; set model.copy_engine_collectives=null"
        )
    return None


class _Segment(NamedTuple):
    """Part of a tensor (by number) in a piece: elements `start` to `stop` of a rank's share, at `offset` in it."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.stop - self.start)


class CopyEngineCollectives:
    """Reduce-scatter and all-gather on the current stream; every rank calls the same ones in the same order.

    Args:
        memory: memory of each rank, of `inbox_bytes`.

    Attributes:
        size: number of ranks.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._rank, self.size = memory.rank, len(memory.of_rank)
        # every rank begins with another one, so that no GPU receives from all at once
        self._others = [(self._rank + step) % self.size for step in range(1, self.size)]
        self._pieces = 0

    @staticmethod
    def inbox_bytes(ranks: int) -> int:
        """Return the bytes of memory of each rank: the slots, then two counters for each rank."""
        return SLOTS * SLOT_BYTES + 2 * ranks * COUNTER_BYTES

    def reduce_scatter(
        self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None, outputs: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return this rank's rows of the sum of each tensor over the ranks, summed in at least fp32.

        Args:
            tensors: contiguous and of one dtype; the rows are a multiple of the ranks.
            dtype: dtype of the result; None: fp32, or fp64 for fp64.
            outputs: contiguous tensors for the result; None: new ones.

        Returns:
            (rows / ranks, ...) each.
        """
        shares = [tensor.view(self.size, -1) for tensor in tensors]
        if outputs is None:
            dtype = dtype or torch.promote_types(tensors[0].dtype, torch.float32)
            outputs = [
                tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]), dtype=dtype) for tensor in tensors
            ]
        sums = [output.view(-1) for output in outputs]
        for piece, inbox in self._exchange([[share[rank] for share in shares] for rank in range(self.size)]):
            for segment in piece:
                own, place = shares[segment.tensor][self._rank], slice(segment.start, segment.stop)
                sum_over_ranks(own[place], inbox[:, segment.place], self._rank, sums[segment.tensor][place])
        return list(outputs)

    def all_reduce(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Write the sum of each tensor over the ranks, summed in at least fp32.

        A few ranks send each other the whole tensors, where that is no more than a reduce-scatter and an all-gather of
        the sums, which may be in a wider dtype: none waits for the sums of others, or copies them.

        Args:
            tensors: contiguous and of one dtype; the rows are a multiple of the ranks.
            outputs: contiguous tensors of the same shapes and of one dtype; may be `tensors`.
        """
        if self.size > 1 + outputs[0].itemsize // tensors[0].itemsize:
            wholes = [output.view(self.size, -1) for output in outputs]
            sums = [whole[self._rank] for whole in wholes]
            self.all_gather(self.reduce_scatter(tensors, outputs=sums), outputs)
            return
        flat = [tensor.view(-1) for tensor in tensors]
        sums = [output.view(-1) for output in outputs]
        for piece, inbox in self._exchange([flat] * self.size):
            for segment in piece:
                place = slice(segment.start, segment.stop)
                own = flat[segment.tensor][place]
                sum_over_ranks(own, inbox[:, segment.place], self._rank, sums[segment.tensor][place])

    def all_gather(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Write the rows of all ranks into each whole tensor.

        Args:
            parts: this rank's rows of each tensor, contiguous and of one dtype; may be views of `wholes`.
            wholes: contiguous tensors of all rows, of the same dtype.
        """
        shares = [whole.view(self.size, -1) for whole in wholes]
        mine = [part.view(-1) for part in parts]
        for share, part in zip(shares, mine, strict=True):
            if share[self._rank].data_ptr() != part.data_ptr():
                share[self._rank].copy_(part)
        for piece, inbox in self._exchange([mine] * self.size):
            for rank in self._others:
                into = [shares[segment.tensor][rank, segment.start : segment.stop] for segment in piece]
                values = [inbox[rank, segment.place] for segment in piece]
                torch._foreach_copy_(into, values)  # pyright: ignore[reportPrivateImportUsage]

    def _exchange(self, sent: Sequence[Sequence[Tensor]]) -> Iterator[tuple[list[_Segment], Tensor]]:
        """Send every rank its flat tensors, and yield the pieces of all others as they arrive: (ranks, elements)."""
        before: tuple[list[_Segment], int] | None = None
        pieces = _pieces([tensor.numel() for tensor in sent[0]], self._piece_elements(sent[0][0].dtype))
        for piece in pieces:
            number = self._send(piece, sent)
            if before is not None:
                yield from self._receive(*before, sent[0][0].dtype)
            before = piece, number
        if before is not None:
            yield from self._receive(*before, sent[0][0].dtype)

    def _piece_elements(self, dtype: torch.dtype) -> int:
        """Return the elements of one rank in a piece, a multiple of 256 bytes."""
        return SLOT_BYTES // self.size // 256 * 256 // dtype.itemsize

    def _send(self, piece: list[_Segment], sent: Sequence[Sequence[Tensor]]) -> int:
        """Copy a piece into the inbox of every other rank; return its number."""
        number = self._pieces
        self._pieces += 1
        for rank in self._others:
            if number >= SLOTS:
                self.memory.wait(self._used(rank), number - SLOTS + 1)
            inbox = self._inbox(rank, number, piece, sent[rank][0].dtype)[self._rank]
            for segment in piece:
                values = sent[rank][segment.tensor][segment.start : segment.stop]
                inbox[segment.place].copy_(values, non_blocking=True)
            self.memory.write(rank, self._arrived(self._rank), number + 1)
        return number

    def _receive(
        self, piece: list[_Segment], number: int, dtype: torch.dtype
    ) -> Iterator[tuple[list[_Segment], Tensor]]:
        for rank in self._others:
            self.memory.wait(self._arrived(rank), number + 1)
        yield piece, self._inbox(self._rank, number, piece, dtype)
        for rank in self._others:
            self.memory.write(rank, self._used(self._rank), number + 1)

    def _inbox(self, rank: int, number: int, piece: list[_Segment], dtype: torch.dtype) -> Tensor:
        """Return the slot of a piece in the memory of a rank, (ranks, elements), by the rank that it is from."""
        first = number % SLOTS * SLOT_BYTES
        slot = self.memory.of_rank[rank][first : first + SLOT_BYTES // (self.size * 256) * (self.size * 256)]
        return slot.view(dtype).view(self.size, -1)[:, : piece[-1].place.stop]

    def _arrived(self, source: int) -> int:
        """Return the offset of the counter of pieces that a rank has sent to the owner of the memory."""
        return SLOTS * SLOT_BYTES + 2 * source * COUNTER_BYTES

    def _used(self, reader: int) -> int:
        """Return the offset of the counter of pieces of the owner of the memory that a rank has used."""
        return self._arrived(reader) + COUNTER_BYTES


def _pieces(sizes: Sequence[int], elements: int) -> Iterator[list[_Segment]]:
    """Cut tensors of these sizes, one after the other, into pieces of so many elements."""
    piece: list[_Segment] = []
    filled = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + elements - filled)
            piece.append(_Segment(index, start, stop, filled))
            filled += stop - start
            start = stop
            if filled == elements:
                yield piece
                piece, filled = [], 0
    if piece:
        yield piece
