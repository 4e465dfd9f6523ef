"""Rows of tensors: what a rank holds of each parameter and of each tensor of the optimizer.

Parameters are cut along their first dimension, in equal chunks but for the last (FSDP2: DTensor, `Shard(0)`). A
checkpoint says which rows each file holds, so it loads on any other number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `start + len(local)` of a tensor of `rows` rows.

    Attributes:
        local: the rows, on the device; a scalar is whole.
        start: first row.
        rows: rows of the whole tensor; 1 for a scalar.
        copy: place of this rank among those that hold the same rows.
        copies: how many ranks hold them.
    """

    local: Tensor
    start: int = 0
    rows: int = 1
    copy: int = 0
    copies: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (self.rows, *self.local.shape[1:]) if self.local.ndim else ()

    def of(self, local: Tensor) -> Piece:
        """The same rows of another tensor that is cut alike."""
        return Piece(local, self.start, self.rows, self.copy, self.copies)

    def share(self) -> Piece:
        """The part of the rows that this rank writes, so that ranks with the same rows write each one once."""
        if not self.local.ndim:
            return self if self.copy == 0 else Piece(self.local.new_empty(0), 0, 0)
        first, count = chunk(self.local.shape[0], self.copies, self.copy)
        return Piece(self.local[first : first + count], self.start + first, self.rows)


def piece_of(tensor: Tensor) -> Piece:
    """What this rank holds of a parameter: all of a plain tensor, as every rank does; its rows of a DTensor.

    Raises:
        ValueError: a DTensor that is cut along another dimension than the first.
    """
    local = local_tensor(tensor)
    rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return Piece(local, 0, rows, *place_among_all())
    mesh, start = tensor.device_mesh, 0
    copy, copies = 0, 1
    for axis, placement in enumerate(tensor.placements):
        size, place = mesh.size(axis), mesh.get_local_rank(axis)
        if placement.is_replicate():
            copy, copies = copy * size + place, copies * size
        elif isinstance(placement, Shard) and placement.dim == 0:
            start, _ = chunk(rows, size, place)
        else:
            raise ValueError(f"`tensor` ({placement}) must be cut along its first dimension only")
    return Piece(local, start, rows, copy, copies)


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor of this rank, sharing memory with `tensor`."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def place_among_all() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def chunk(rows: int, parts: int, part: int) -> tuple[int, int]:
    """First row and number of rows of a part, as `torch.chunk` cuts: all parts equal but the last ones."""
    size = -(-rows // parts)
    first = min(part * size, rows)
    return first, min(size, rows - first)
