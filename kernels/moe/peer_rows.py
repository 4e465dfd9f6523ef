"""Rows written into the memory of the ranks that read them: the all-to-all of experts on GPUs of one host.

GPUs of one host read and write each other's memory, so that the kernel that would gather the rows to send stores them
where they are read. Sizes: n tokens of a rank, k experts per token, R ranks. A target is rank * capacity + row, in the
memory of that rank; -1 for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import jit, next_power_of_2, tl, triton

_LARGEST_BLOCK = 2048
_SEGMENTS = 64
"""Parts of rows that are written side by side: rows sorted by rank would reach one rank after the other."""


class Peers(NamedTuple):
    """Memory of the ranks.

    Attributes:
        of_rank: memory of each rank, uint8, which this one can write.
        addresses: its addresses, int64 (R,), on the device.
        rank: this rank.
        by_triton: the kernel runs; else its reference in PyTorch.
    """

    of_rank: Sequence[Tensor]
    addresses: Tensor
    rank: int
    by_triton: bool

    def part(self, rank: int, offset: int, dtype: torch.dtype, rows: int, width: int) -> Tensor:
        """Return a tensor (rows, width) in the memory of a rank."""
        return self.of_rank[rank][offset : offset + rows * width * dtype.itemsize].view(dtype).view(rows, width)


# ---------------------------------------------------------------- reference


def reference_send(
    peers: Peers, rows: Tensor, targets: Tensor, offset: int, capacity: int, extras: Sequence[tuple[Tensor, int]] = ()
) -> None:
    """Reference in plain PyTorch, with the arguments of `send_rows`."""
    rows, targets = rows.repeat_interleave(targets.numel() // max(1, len(rows)), 0), targets.flatten()
    for rank in range(len(peers.of_rank)):
        own = (targets >= rank * capacity) & (targets < (rank + 1) * capacity)
        for values, place in ((rows, offset), *extras):
            part = peers.part(rank, place, values.dtype, capacity, values.shape[1])
            part[targets[own] - rank * capacity] = values[own]


# ---------------------------------------------------------------- Triton


@jit
def _send_extra(values_pointer, assignment, address, offset, row, used):
    """Write the value beside one row."""
    value = tl.load(values_pointer + assignment)
    out = (address + offset).to(tl.pointer_type(values_pointer.dtype.element_ty))
    tl.store(out + row, value, mask=used)


@jit(do_not_specialize=["rows"])  # changes from step to step
def send_kernel(
    rows_pointer, targets_pointer, addresses_pointer, first_pointer, second_pointer, third_pointer,
    offset, first_offset, second_offset, third_offset, capacity, rows, width, COPIES: tl.constexpr,
    EXTRAS: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row per program, of (rows, width), to its COPIES targets, and there up to three EXTRAS beside it."""
    step = tl.cdiv(rows, SEGMENTS)
    row = (tl.program_id(0) % SEGMENTS * step + tl.program_id(0) // SEGMENTS).to(tl.int64)
    if row < rows:
        for begin in range(0, width, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            value = tl.load(rows_pointer + row * width + column, mask=column < width, other=0.0)
            for copy in tl.static_range(COPIES):
                target = tl.load(targets_pointer + row * COPIES + copy)
                used = target >= 0
                address = tl.load(addresses_pointer + tl.where(used, target // capacity, 0))
                place = (target % capacity).to(tl.int64)
                # stores of 16 bytes: no pointer from an address is known to be aligned
                out = tl.multiple_of((address + offset).to(tl.pointer_type(rows_pointer.dtype.element_ty)), 16)
                tl.store(out + place * width + column, value, mask=column < tl.where(used, width, 0))
                if begin == 0:
                    if EXTRAS > 0:
                        _send_extra(first_pointer, row * COPIES + copy, address, first_offset, place, used)
                    if EXTRAS > 1:
                        _send_extra(second_pointer, row * COPIES + copy, address, second_offset, place, used)
                    if EXTRAS > 2:
                        _send_extra(third_pointer, row * COPIES + copy, address, third_offset, place, used)


# ---------------------------------------------------------------- public function


def send_rows(
    peers: Peers, rows: Tensor, targets: Tensor, offset: int, capacity: int, extras: Sequence[tuple[Tensor, int]] = ()
) -> None:
    """Write rows to their targets.

    Args:
        peers: the ranks.
        rows: (rows, width).
        targets: int32, the same number for each row.
        offset: of a tensor (capacity, width) in the memory of each rank, in bytes, a multiple of 16.
        capacity: its rows.
        extras: up to three tensors (targets, 1), a value beside each row, and their offsets in the memory of each rank.
    """
    rows, (number, width) = rows.contiguous(), rows.shape
    if not peers.by_triton:
        reference_send(peers, rows, targets, offset, capacity, extras)
    elif number:
        values: list[Tensor | None] = [each.contiguous() for each, _ in extras]
        places = [place for _, place in extras]
        missing = 3 - len(extras)
        send_kernel[(_SEGMENTS * triton.cdiv(number, _SEGMENTS),)](
            rows, targets, peers.addresses, *values, *[None] * missing, offset, *places, *[0] * missing, capacity,
            number, width, COPIES=targets.numel() // number, EXTRAS=len(extras), SEGMENTS=_SEGMENTS,
            BLOCK=min(_LARGEST_BLOCK, next_power_of_2(width)), num_warps=4,
        )  # fmt: skip
