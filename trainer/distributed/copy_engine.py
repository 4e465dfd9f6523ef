"""Collectives among the GPUs of one host by their copy engines, which leave all multiprocessors to the model.

NCCL's kernels take multiprocessors from the matrix products beside them, whose persistent blocks then run in two waves:
hidden behind the backward pass, they cost as much as alone. Here a rank copies its data into the memory of the others,
which a copy engine does; streams wait for it by memory operations, and the only kernels are the local sums. What is
sent in bf16 is summed in fp32, in the order of the ranks, so that a sum has half the traffic of fp32 and its accuracy.

Data goes through an inbox of every rank in pieces, so that memory does not depend on the model: while one piece is
summed, the next one arrives. Each rank counts the pieces that it has sent to and used of every other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.sum_over_ranks import sum_over_ranks
from ...models.parallel.peer_memory import COUNTER_BYTES, Memory
from ..utils.errors import UserError
from .process_group import DistributedContext
from .symmetric_memory import find_peer_memory

SLOTS = 2
"""Pieces in flight."""

SLOT_BYTES = 128 << 20
"""Bytes of a piece from all ranks: the weights of a layer of 67 million parameters in bf16."""

JOINED_BYTES = 2 << 20
"""Tensors of which a rank has fewer bytes are joined: that takes the GPU less time than copying each takes the host."""

JOINED_ELEMENTS = 8
"""The elements of these are a multiple of it, so that each in 16 or 32 bits begins at a multiple of 16 bytes."""


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

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a flat tensor."""
        whole = self.start == 0 and self.stop == tensor.numel()
        return tensor if whole else tensor[self.start : self.stop]


class _Piece(NamedTuple):
    """Tensors, or parts of them, that are sent at once.

    Attributes:
        sent: parts of joined tensors.
        parts: those of the tensors, in the same places.
    """

    sent: list[_Segment]
    parts: list[_Segment]


class _Places(NamedTuple):
    """Where a piece is in the memory of the ranks.

    Attributes:
        outgoing: that of each segment that is sent, by the number of the other rank.
        inbox: what all ranks send to this one, (ranks, elements).
        incoming: that of each segment, (ranks, elements).
    """

    outgoing: dict[int, list[Tensor]]
    inbox: Tensor
    incoming: list[Tensor]


class _Layout:
    """How tensors are sent: small ones joined, and all of them cut into pieces.

    Args:
        sizes: elements of each for one rank.
        dtype: their dtype.
        elements: elements of a piece for one rank.

    Attributes:
        joined: numbers of the tensors that are joined.
        groups: numbers of those in each joined tensor: several, or the one that is alone.
        pieces: the pieces.
        places: where each piece is, by its index and its slot.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, elements: int) -> None:
        is_joined = [size * dtype.itemsize < JOINED_BYTES and size % JOINED_ELEMENTS == 0 for size in sizes]
        small = [number for number, joins in enumerate(is_joined) if joins]
        alone = [[number] for number, joins in enumerate(is_joined) if not joins]
        self.joined = small if len(small) > 1 else []
        self.groups = [small, *alone] if small else alone
        self._sizes = [[sizes[number] for number in group] for group in self.groups]
        order = [number for group in self.groups for number in group]
        sent = _pieces([sum(each) for each in self._sizes], elements)
        parts = _pieces([sizes[number] for number in order], elements)
        self.pieces = [
            _Piece(whole, [part._replace(tensor=order[part.tensor]) for part in cut])
            for whole, cut in zip(sent, parts, strict=True)
        ]
        self.places: dict[tuple[int, int], _Places] = {}

    def join(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the joined tensors, along the last dimension."""
        return [
            rows[group[0]] if len(group) == 1 else torch.cat([rows[number] for number in group], dim=-1)
            for group in self.groups
        ]

    def split(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of joined flat tensors."""
        found: dict[int, Tensor] = {}
        for group, sizes, whole in zip(self.groups, self._sizes, joined, strict=True):
            found.update(zip(group, whole.split(sizes) if len(group) > 1 else [whole], strict=True))
        return [found[number] for number in range(len(found))]


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
        self._layouts: dict[tuple[torch.dtype, tuple[int, ...]], _Layout] = {}

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
            outputs: contiguous tensors for the result; None: new ones, which may share memory.

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
        layout = self._layout([share.shape[1] for share in shares], shares[0].dtype)
        rows = [row.expand(self.size, -1).unbind() for row in layout.join(shares)]
        sums = [
            own[0].new_empty(own[0].shape, dtype=dtype) if outputs is None or len(group) > 1 else outputs[group[0]]
            for group, own in zip(layout.groups, rows, strict=True)
        ]
        for piece, places in self._exchange(layout, [[row[rank] for row in rows] for rank in range(self.size)]):
            for part, received in zip(piece.sent, places.incoming, strict=True):
                own, total = part.of(rows[part.tensor][self._rank]), part.of(sums[part.tensor])
                sum_over_ranks(own, received, self._rank, total)
        found = layout.split(sums)
        if outputs is None:
            return found
        if layout.joined:
            _copy([outputs[number] for number in layout.joined], [found[number] for number in layout.joined])
        return outputs

    def all_gather(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Write the rows of all ranks into each whole tensor.

        Args:
            parts: this rank's rows of each tensor, contiguous and of one dtype; may be views of `wholes`.
            wholes: contiguous tensors of all rows, of the same dtype.
        """
        self.gather_of(parts, wholes)()

    def gather_of(self, parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that gathers these tensors, see `all_gather`, whose host does less each time."""
        shares = [whole.view(self.size, -1).unbind() for whole in wholes]
        mine = [part.view(-1) for part in parts]
        own = [(share[self._rank], part) for share, part in zip(shares, mine, strict=True)]
        moved = [(place, part) for place, part in own if place.data_ptr() != part.data_ptr()]
        layout = self._layout([part.numel() for part in mine], mine[0].dtype)
        into = [
            [part.of(shares[part.tensor][rank]) for rank in self._others for part in piece.parts]
            for piece in layout.pieces
        ]
        arrived: dict[tuple[int, int], list[Tensor]] = {}

        def gather() -> None:
            if moved:
                _copy([place for place, _ in moved], [part for _, part in moved])
            for index, (piece, places) in enumerate(self._exchange(layout, [layout.join(mine)] * self.size)):
                key = index, places.inbox.data_ptr()
                if key not in arrived:
                    arrived[key] = [places.inbox[rank, part.place] for rank in self._others for part in piece.parts]
                _copy(into[index], arrived[key])

        return gather

    def _layout(self, sizes: Sequence[int], dtype: torch.dtype) -> _Layout:
        key = dtype, tuple(sizes)
        if key not in self._layouts:
            # a multiple of 256 bytes
            self._layouts[key] = _Layout(sizes, dtype, SLOT_BYTES // self.size // 256 * 256 // dtype.itemsize)
        return self._layouts[key]

    def _exchange(self, layout: _Layout, sent: Sequence[Sequence[Tensor]]) -> Iterator[tuple[_Piece, _Places]]:
        """Send every rank its flat joined tensors, and yield the pieces of all others as they arrive."""
        before: tuple[_Piece, int, _Places] | None = None
        for index, piece in enumerate(layout.pieces):
            number = self._pieces
            self._pieces += 1
            key = index, number % SLOTS
            if key not in layout.places:
                layout.places[key] = self._places(piece, number % SLOTS, sent[0][0].dtype)
            places = layout.places[key]
            self._send(piece, number, places, sent)
            if before is not None:
                yield from self._receive(*before)
            before = piece, number, places
        if before is not None:
            yield from self._receive(*before)

    def _send(self, piece: _Piece, number: int, places: _Places, sent: Sequence[Sequence[Tensor]]) -> None:
        """Copy a piece into the inbox of every other rank."""
        if number >= SLOTS:
            self.memory.wait([self._used(rank) for rank in self._others], number - SLOTS + 1)
        for rank in self._others:
            for part, place in zip(piece.sent, places.outgoing[rank], strict=True):
                place.copy_(part.of(sent[rank][part.tensor]), non_blocking=True)
        self.memory.write(self._others, self._arrived(self._rank), number + 1)

    def _receive(self, piece: _Piece, number: int, places: _Places) -> Iterator[tuple[_Piece, _Places]]:
        self.memory.wait([self._arrived(rank) for rank in self._others], number + 1)
        yield piece, places
        self.memory.write(self._others, self._used(self._rank), number + 1)

    def _places(self, piece: _Piece, slot: int, dtype: torch.dtype) -> _Places:
        """Return where a piece is in a slot."""
        row, elements = SLOT_BYTES // (self.size * 256) * 256, piece.sent[-1].place.stop
        first = slot * SLOT_BYTES
        inboxes = [
            memory[first : first + self.size * row].view(dtype).view(self.size, -1)[:, :elements]
            for memory in self.memory.of_rank
        ]
        outgoing = {rank: [inboxes[rank][self._rank, part.place] for part in piece.sent] for rank in self._others}
        own = inboxes[self._rank]
        return _Places(outgoing, own, [own[:, part.place] for part in piece.sent])

    def _arrived(self, source: int) -> int:
        """Return the offset of the counter of pieces that a rank has sent to the owner of the memory."""
        return SLOTS * SLOT_BYTES + 2 * source * COUNTER_BYTES

    def _used(self, reader: int) -> int:
        """Return the offset of the counter of pieces of the owner of the memory that a rank has used."""
        return self._arrived(reader) + COUNTER_BYTES


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    torch._foreach_copy_(into, values)


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
