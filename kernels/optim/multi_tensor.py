"""Multi-tensor launches: a device table with the addresses of each tensor and the programs that process it.

The table is int64 (columns, tensors): first program, number of elements, then kernel-specific columns, such as the
addresses of the tensor's arrays. A program finds its tensor by binary search, which takes no extra memory and hits the
cache, since all programs read the same few lines. Number and size of tensors are not limited.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..launch import jit, tl

ALIGNMENT = 16
"""Required for vectorized access: of addresses in bytes (a 16-byte load), of sizes in elements (no partial vector)."""

# ---------------------------------------------------------------- Triton


@jit
def find_tensor(table_pointer, tensors, search_steps):
    """Return the index of this program's tensor, the last one whose first program is not after it."""
    program = tl.program_id(0)
    low = tl.zeros((), tl.int32)
    high = low + tensors
    for _ in range(search_steps):
        middle = (low + high) // 2
        is_later = tl.load(table_pointer + middle) <= program
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
    return low


@jit
def element_offsets(table_pointer, tensors, tensor, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the element offsets (BLOCK,) of this program within its tensor, and the tensor's size; int64."""
    first = tl.load(table_pointer + tensor)
    size = tl.load(table_pointer + tensors + tensor)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    return (tl.program_id(0) - first) * BLOCK + tl.arange(0, BLOCK), size


@jit
def load_array_pointer(
    table_pointer, tensors, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return the pointer stored in a column of the table."""
    pointer = tl.load(table_pointer + COLUMN * tensors + tensor).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


# ---------------------------------------------------------------- host


class TensorTable(NamedTuple):
    """Table of the tensors of one launch.

    Attributes:
        columns: int64 (columns, tensors) on the device.
        num_tensors: number of tensors.
        search_steps: steps of the binary search for a program's tensor.
        num_programs: number of programs to launch.
    """

    columns: Tensor
    num_tensors: int
    search_steps: int
    num_programs: int


def build_tensor_table(rows: Sequence[tuple[int, ...]], block: int, device: torch.device) -> TensorTable:
    """Build a table and copy it to the device, without a host sync.

    Args:
        rows: for each tensor its number of elements, at least 1, followed by the values of the other columns. The
            caller must keep tensors whose addresses it stores until the kernel is launched on the current stream.
        block: elements per program.
        device: device of the tensors.
    """
    firsts, programs = [], 0
    for size, *_ in rows:
        firsts.append(programs)
        programs += -(-size // block)
    content = array("q", firsts)
    for column in zip(*rows, strict=True):
        content.extend(column)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    columns = _on_device(content.tobytes(), len(rows), device, stream)
    return TensorTable(columns, len(rows), (len(rows) - 1).bit_length(), programs)


@lru_cache(maxsize=1024)  # an offloaded optimizer state has a table for each of its buckets
def _on_device(content: bytes, tensors: int, device: torch.device, stream: int) -> Tensor:
    """Return a cached device table: addresses of weights, moments and mostly gradients do not change between steps.

    A copy would queue behind the large ones of an offloaded optimizer state. Tables are cached per stream, since only
    that stream is ordered after the copy.
    """
    columns = torch.frombuffer(bytearray(content), dtype=torch.int64).view(-1, tensors)
    return columns.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else columns


def is_aligned(size: int, *addresses: int) -> bool:
    """Return True if all arrays of a tensor allow vectorized access: addresses and size are multiples of 16."""
    bits = size
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT == 0


def triton_dtype(dtype: torch.dtype) -> Any:
    """Return the Triton dtype of a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))
