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

JOINED_BYTES = 2 << 20
"""Tensors of which a rank has fewer bytes are joined: that takes the GPU less time than copying each takes the host."""

JOINED_ELEMENTS = 8
"""The elements of these are a multiple of it, so that each begins at a multiple of 16 bytes."""


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
            self._arrays[operations] = (_MemoryOperation * len(operations))(
                *(_MemoryOperation(*each) for each in operations)
            )
        array = self._arrays[operations]
        for operation in array:
            operation.value = value
        function = "cuStreamBatchMemOp_v2"
        code = _driver_function(function)(self._stream, len(array), ctypes.addressof(array), 0)
        if code:
            raise RuntimeError(f"{function} failed with CUDA error {code}; set {cure}")

    def allocate(self, num_bytes: int) -> PeerMemory:
        """Return more memory of the same ranks, see `Memory`."""
        return PeerMemory(self._ranks, self._device, num_bytes)

    @property
    def _stream(self) -> int:
        """The current stream; it is asked for some hundred times in a step."""
        return torch._C._cuda_getCurrentRawStream(self._index)  # pyright: ignore[reportAttributeAccessIssue]


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
    """Return a function of the CUDA driver for a batch of stream memory operations; it returns an error code."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_uint,
    ]  # stream, number, address, flags
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


class _Joining(NamedTuple):
    """Which of some tensors are joined into one.

    Attributes:
        sizes: elements of each.
        groups: numbers of those in each joined tensor; of a tensor alone just its own.
    """

    sizes: list[int]
    groups: list[list[int]]

    @staticmethod
    def of(sizes: list[int], itemsize: int) -> _Joining:
        """Join the small ones of tensors of these sizes."""
        joined = [n for n, size in enumerate(sizes) if size * itemsize < JOINED_BYTES and size % JOINED_ELEMENTS == 0]
        alone = [[number] for number in range(len(sizes)) if number not in joined]
        return _Joining(sizes, [joined, *alone] if joined else alone)

    @property
    def joined(self) -> list[int]:
        """The numbers of those that are not alone."""
        return [number for group in self.groups if len(group) > 1 for number in group]

    def join(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the joined tensors, along the last dimension."""
        return [
            rows[group[0]] if len(group) == 1 else torch.cat([rows[number] for number in group], dim=-1)
            for group in self.groups
        ]

    def split(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of joined tensors."""
        found: dict[int, Tensor] = {}
        for group, whole in zip(self.groups, joined, strict=True):
            found.update(zip(group, whole.split([self.sizes[number] for number in group], dim=-1), strict=True))
        return [found[number] for number in range(len(self.sizes))]


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
        if outputs is not None:
            self._sum(shares, outputs[0].dtype, [output.view(-1) for output in outputs])
            return list(outputs)
        sums = self._sum(shares, dtype or torch.promote_types(tensors[0].dtype, torch.float32))
        return [total.view(-1, *tensor.shape[1:]) for total, tensor in zip(sums, tensors, strict=True)]

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
        shares = [tensor.view(1, -1) for tensor in tensors]
        self._sum(shares, outputs[0].dtype, [output.view(-1) for output in outputs])

    def _sum(
        self, shares: Sequence[Tensor], dtype: torch.dtype, outputs: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]:
        """Return what all ranks together have for this one, (elements,) each.

        Args:
            shares: (ranks, elements) each, what this rank has for every one; a single row for all of them.
            dtype: dtype of the sums.
            outputs: tensors for the sums; None: new ones, which may share memory.
        """
        joining = _Joining.of([share.shape[1] for share in shares], shares[0].itemsize)
        rows = [row.expand(self.size, -1) for row in joining.join(shares)]
        sums = [
            row.new_empty(row.shape[1], dtype=dtype) if outputs is None or len(group) > 1 else outputs[group[0]]
            for group, row in zip(joining.groups, rows, strict=True)
        ]
        for piece, inbox in self._exchange([[row[rank] for row in rows] for rank in range(self.size)]):
            for segment in piece:
                own, place = rows[segment.tensor][self._rank], slice(segment.start, segment.stop)
                sum_over_ranks(own[place], inbox[:, segment.place], self._rank, sums[segment.tensor][place])
        parts = joining.split(sums)
        if outputs is None:
            return parts
        if joining.joined:
            _copy([outputs[number] for number in joining.joined], [parts[number] for number in joining.joined])
        return outputs

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
        joining = _Joining.of([part.numel() for part in mine], mine[0].itemsize)
        sent = joining.join(mine)
        rows = [
            shares[group[0]] if len(group) == 1 else part.new_empty(self.size, part.numel())
            for group, part in zip(joining.groups, sent, strict=True)
        ]
        for piece, inbox in self._exchange([sent] * self.size):
            places = [(rank, segment) for rank in self._others for segment in piece]
            into = [rows[segment.tensor][rank, segment.start : segment.stop] for rank, segment in places]
            _copy(into, [inbox[rank, segment.place] for rank, segment in places])
        if joining.joined:
            found = joining.split(rows)
            pairs = [(rank, number) for rank in self._others for number in joining.joined]
            _copy([shares[number][rank] for rank, number in pairs], [found[number][rank] for rank, number in pairs])

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
        if number >= SLOTS:
            self.memory.wait([self._used(rank) for rank in self._others], number - SLOTS + 1)
        for rank in self._others:
            inbox = self._inbox(rank, number, piece, sent[rank][0].dtype)[self._rank]
            for segment in piece:
                values = sent[rank][segment.tensor][segment.start : segment.stop]
                inbox[segment.place].copy_(values, non_blocking=True)
        self.memory.write(self._others, self._arrived(self._rank), number + 1)
        return number

    def _receive(
        self, piece: list[_Segment], number: int, dtype: torch.dtype
    ) -> Iterator[tuple[list[_Segment], Tensor]]:
        self.memory.wait([self._arrived(rank) for rank in self._others], number + 1)
        yield piece, self._inbox(self._rank, number, piece, dtype)
        self.memory.write(self._others, self._used(self._rank), number + 1)

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


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    torch._foreach_copy_(into, values)  # pyright: ignore[reportPrivateImportUsage]


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
