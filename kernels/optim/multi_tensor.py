"""One launch for many tensors: a table on the device says where each tensor lies and which programs work on it.

The table is int64 [columns, tensors]: first program, number of elements, then what the kernel asks for, such as the
addresses of the tensor's arrays. A program finds its tensor by halving, which takes no memory and, as all programs read
the same few lines, hits the cache; the tensors may be as many and as large as they like.
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
"""Of addresses, in bytes: what a vector instruction moves; of sizes, in elements: a mask cuts none of these in two."""

# ---------------------------------------------------------------- Triton


@jit
def tensor_of_program(table_pointer, tensors, halvings):
    """Which tensor this program works on: the last one whose first program is not after it."""
    program = tl.program_id(0)
    low = tl.zeros((), tl.int32)
    high = low + tensors
    for _ in range(halvings):
        middle = (low + high) // 2
        is_later = tl.load(table_pointer + middle) <= program
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle)
    return low


@jit
def elements_of_program(table_pointer, tensors, tensor, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """The elements [BLOCK] of its tensor that this program works on, and how many elements the tensor has; int64."""
    first = tl.load(table_pointer + tensor)
    size = tl.load(table_pointer + tensors + tensor)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    return (tl.program_id(0) - first) * BLOCK + tl.arange(0, BLOCK), size


@jit
def array_of_tensor(table_pointer, tensors, tensor, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The array whose address is in a column of the table."""
    pointer = tl.load(table_pointer + COLUMN * tensors + tensor).to(tl.pointer_type(DTYPE))  # pyright: ignore[reportArgumentType]
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


# ---------------------------------------------------------------- host


class Table(NamedTuple):
    """Where tensors lie, for one launch.

    Attributes:
        columns: int64 (columns, tensors) on the device.
        tensors: how many.
        halvings: with which a program finds its tensor.
        programs: to launch.
    """

    columns: Tensor
    tensors: int
    halvings: int
    programs: int


def table_of(rows: Sequence[tuple[int, ...]], block: int, device: torch.device) -> Table:
    """Put a table on the device; the host does not wait for that.

    Args:
        rows: for each tensor its number of elements, at least 1, and what the other columns hold. Whoever takes
            addresses keeps the tensors until the kernel is launched, on the stream that is the current one now.
        block: elements that one program works on.
        device: of the tensors.
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
    return Table(columns, len(rows), (len(rows) - 1).bit_length(), programs)


@lru_cache(maxsize=1024)  # a state in host memory has a table for each of its buckets
def _on_device(content: bytes, tensors: int, device: torch.device, stream: int) -> Tensor:
    """A table that is there already is not copied again: weights, moments and mostly gradients stay where they are.

    A copy would wait behind the large ones of a state in host memory. Tables are kept by stream, since only that one
    knows that the copy is done.
    """
    columns = torch.frombuffer(bytearray(content), dtype=torch.int64).view(-1, tensors)
    return columns.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else columns


def is_aligned(size: int, *addresses: int) -> bool:
    """Whether vector instructions serve all arrays of a tensor: its addresses and its size are multiples of 16."""
    bits = size
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT == 0


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of it."""
    return getattr(tl, str(dtype).removeprefix("torch."))
