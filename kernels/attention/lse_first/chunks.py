"""Chunks of keys and values on the device, or on the host and copied while the device computes.

Chunks from the host are double buffered: while the kernels use one buffer, a copy stream fills the other, so device
memory depends on the chunk size, not on the number of keys. Copies overlap with the kernels if host memory is pinned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """A range of the keys.

    Attributes:
        tensor: index of the tensor that contains it.
        start: first key within that tensor.
        stop: end of the range within that tensor, exclusive.
        offset: first key within the whole sequence.
    """

    tensor: int
    start: int
    stop: int
    offset: int

    def slice(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the chunk's slice of the tensors, each (batch, keys, groups, head_dim); a view."""
        return tensors[self.tensor][:, self.start : self.stop]


def split_into_chunks(lengths: Sequence[int], chunk_size: int) -> list[Chunk]:
    """Split consecutive tensors of these lengths into chunks of at most `chunk_size` keys; 0 keeps them whole."""
    chunks: list[Chunk] = []
    offset = 0
    for tensor, length in enumerate(lengths):
        step = chunk_size or max(length, 1)
        for start in range(0, length, step):
            chunks.append(Chunk(tensor, start, min(start + step, length), offset + start))
        offset += length
    return chunks


def _copy_rows_(target: Tensor, source: Tensor) -> None:
    """Copy (batch, ...) asynchronously, row by row: copies of non-contiguous pinned memory synchronize."""
    for target_row, source_row in zip(target, source, strict=True):
        target_row.copy_(source_row, non_blocking=True)


def prefetch_chunks(parts: Sequence[tuple[Tensor, ...]], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors of each chunk on `device`: as they are, or as copies that are valid until the next chunk."""
    if not parts or parts[0][0].device == device:
        yield from parts
        return
    compute, copies = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    copies.wait_stream(compute)  # earlier kernels may still use the memory of the buffers
    slots = min(2, len(parts))
    sizes = [max(part[i].numel() for part in parts) for i in range(len(parts[0]))]
    buffers = [
        [tensor.new_empty(size, device=device) for tensor, size in zip(parts[0], sizes, strict=True)]
        for _ in range(slots)
    ]
    filled = [torch.cuda.Event() for _ in range(slots)]
    used = [torch.cuda.Event() for _ in range(slots)]

    def start_copy(index: int) -> tuple[Tensor, ...]:
        slot = index % slots
        with torch.cuda.stream(copies):
            if index >= slots:
                copies.wait_event(used[slot])
            chunk = tuple(
                buffer[: part.numel()].view(part.shape)
                for buffer, part in zip(buffers[slot], parts[index], strict=True)
            )
            for target, source in zip(chunk, parts[index], strict=True):
                _copy_rows_(target, source)
            filled[slot].record(copies)
        return chunk

    try:
        upcoming = start_copy(0)
        for index in range(len(parts)):
            current = upcoming
            if index + 1 < len(parts):
                upcoming = start_copy(index + 1)
            compute.wait_event(filled[index % slots])
            yield current
            used[index % slots].record(compute)
    finally:
        compute.wait_stream(copies)  # before the allocator reuses the memory of the buffers


class GradientWriter:
    """Copy the gradients of chunks from the device to the tensors of the chunks, asynchronously.

    Args:
        targets: destination tensors of each chunk, in the order of the chunks.
        device: device that computes the gradients.
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

    def get_buffers(self, index: int) -> tuple[Tensor, ...]:
        """Return the tensors that the kernels must write the gradients of a chunk to."""
        if self.direct:
            return self.targets[index]
        if len(self.slots) < 2:
            sizes = [max(target[i].numel() for target in self.targets) for i in range(len(self.targets[0]))]
            flat = [self.targets[0][i].new_empty(size, device=self.device) for i, size in enumerate(sizes)]
            self.slots.append((torch.cuda.Event(), tuple(flat)))
        copied, flat = self.slots[index % 2]
        self.compute.wait_event(copied)  # copy of the chunk before last; a no-op if never recorded
        return tuple(
            buffer[: target.numel()].view(target.shape)
            for buffer, target in zip(flat, self.targets[index], strict=True)
        )

    def copy_back(self, index: int, gradients: tuple[Tensor, ...]) -> None:
        """Start copying the gradients that the kernels wrote to the tensors of `get_buffers`."""
        if self.direct:
            return
        self.copies.wait_stream(self.compute)
        with torch.cuda.stream(self.copies):
            for target, source in zip(self.targets[index], gradients, strict=True):
                _copy_rows_(target, source)
            self.slots[index % 2][0].record(self.copies)

    def __exit__(self, *_: object) -> None:
        if not self.direct:
            self.compute.wait_stream(self.copies)
            self.copies.synchronize()  # autograd reads the host tensors next
