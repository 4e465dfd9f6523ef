"""Chunks of keys and values, where they lie: on the device, or on the host and copied while the device computes.

From the host two buffers per tensor go round: while the kernels work on one, a second stream fills the other. So the
memory taken on the device depends on the size of a chunk, not on the number of keys. Copies overlap with the kernels
where the host's memory is pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """A range of the keys.

    Attributes:
        tensor: index of the tensor that holds it.
        start: its first key within that tensor.
        stop: the key after its last.
        offset: its first key within the whole sequence.
    """

    tensor: int
    start: int
    stop: int
    offset: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The part of the tensors, (batch, keys, groups, head_dim) each, that the chunk is; a view."""
        return tensors[self.tensor][:, self.start : self.stop]


def chunks_of(lengths: Sequence[int], chunk_size: int) -> list[Chunk]:
    """Cut tensors of these lengths, in order, into chunks of at most `chunk_size` keys; 0 cuts none."""
    chunks: list[Chunk] = []
    offset = 0
    for tensor, length in enumerate(lengths):
        step = chunk_size or max(length, 1)
        for start in range(0, length, step):
            chunks.append(Chunk(tensor, start, min(start + step, length), offset + start))
        offset += length
    return chunks


def _copy_rows_(target: Tensor, source: Tensor) -> None:
    """Copy (batch, ...) without waiting, row by row: a slice of pinned memory that is not contiguous would wait."""
    for target_row, source_row in zip(target, source, strict=True):
        target_row.copy_(source_row, non_blocking=True)


def fetched(parts: Sequence[tuple[Tensor, ...]], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """The parts of each chunk on `device`: themselves, or copies that hold until the next is asked for."""
    if not parts or parts[0][0].device == device:
        yield from parts
        return
    compute, copies = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    copies.wait_stream(compute)  # the buffers may lie where earlier kernels still work
    slots = min(2, len(parts))
    sizes = [max(part[i].numel() for part in parts) for i in range(len(parts[0]))]
    buffers = [
        [tensor.new_empty(size, device=device) for tensor, size in zip(parts[0], sizes, strict=True)]
        for _ in range(slots)
    ]
    filled = [torch.cuda.Event() for _ in range(slots)]
    used = [torch.cuda.Event() for _ in range(slots)]

    def fill(number: int) -> tuple[Tensor, ...]:
        slot = number % slots
        with torch.cuda.stream(copies):
            if number >= slots:
                copies.wait_event(used[slot])
            held = tuple(
                buffer[: part.numel()].view(part.shape)
                for buffer, part in zip(buffers[slot], parts[number], strict=True)
            )
            for target, source in zip(held, parts[number], strict=True):
                _copy_rows_(target, source)
            filled[slot].record(copies)
        return held

    try:
        following = fill(0)
        for number in range(len(parts)):
            held = following
            if number + 1 < len(parts):
                following = fill(number + 1)
            compute.wait_event(filled[number % slots])
            yield held
            used[number % slots].record(compute)
    finally:
        compute.wait_stream(copies)  # before the memory of the buffers is given to others


class Returned:
    """Takes the gradients of chunks from the device to where the chunks lie.

    Args:
        targets: the gradients' parts of each chunk, in the order of the chunks.
        device: where they are computed.
    """

    def __init__(self, targets: Sequence[tuple[Tensor, ...]], device: torch.device) -> None:
        self.targets = targets
        self.device = device
        self.direct = not targets or targets[0][0].device == device

    def __enter__(self) -> Self:
        if not self.direct:
            self.compute, self.copies = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
            self.slots: list[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = []
        return self

    def room(self, number: int) -> tuple[Tensor, ...]:
        """Where the kernels shall write the gradients of a chunk."""
        if self.direct:
            return self.targets[number]
        if len(self.slots) < 2:
            most = [max(target[i].numel() for target in self.targets) for i in range(len(self.targets[0]))]
            flat = [self.targets[0][i].new_empty(size, device=self.device) for i, size in enumerate(most)]
            self.slots.append((torch.cuda.Event(), tuple(flat)))
        copied, flat = self.slots[number % 2]
        self.compute.wait_event(copied)  # of the chunk before last; an event never recorded does not wait
        return tuple(
            buffer[: target.numel()].view(target.shape)
            for buffer, target in zip(flat, self.targets[number], strict=True)
        )

    def send(self, number: int, gradients: tuple[Tensor, ...]) -> None:
        """Start the way home of what the kernels wrote into `room`."""
        if self.direct:
            return
        self.copies.wait_stream(self.compute)
        with torch.cuda.stream(self.copies):
            for target, source in zip(self.targets[number], gradients, strict=True):
                _copy_rows_(target, source)
            self.slots[number % 2][0].record(self.copies)

    def __exit__(self, *_: object) -> None:
        if not self.direct:
            self.compute.wait_stream(self.copies)
            self.copies.synchronize()  # autograd reads the host's tensors next
