"""Which state of an optimizer goes through the device together, and where each tensor of it lies. Arithmetic only.

Host memory is one long row of bytes. A bucket is what moves at once: the states of neighbouring parameters, one stretch
of that row and so one copy; or a stretch of the elements of one large parameter, one copy for each of its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
"""Of state in a bucket: a millisecond of the host link, against microseconds to start a copy."""
SLOTS = 3
"""Buckets on the device at once: one that comes, one that is updated, one that leaves."""
_ALIGNMENT = 256  # bytes; that of torch's own allocations for the kernels is 16 at least
_GRAIN = 1024  # elements; a cut at a multiple of it leaves vector instructions the elements they had


class Place(NamedTuple):
    """Where a tensor lies in a row of bytes."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """The tensor there, sharing memory with the bytes."""
        return memory[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class Copy(NamedTuple):
    """Bytes that host memory and a bucket's memory on the device have in common: where in each, and how many."""

    host: int
    device: int
    size: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one parameter on this rank.

    Attributes:
        tensors: key to shape and dtype.
        most_bytes: of the rank that has the most of it; the same number on every rank.
        elements: that a state of separate elements has: each tensor has so many, and they may be cut anywhere. None:
            the state must be on the device as a whole.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    most_bytes: int
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """A parameter in a bucket.

    Attributes:
        index: of the parameter in its group.
        state: its tensors in the memory of the bucket.
        cut: first element and the one after the last, where the bucket has only these, as vectors; None: all.
    """

    index: int
    state: Mapping[str, Place]
    cut: tuple[int, int] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """What the bucket has of a contiguous tensor of the shape of this rank's rows, sharing its memory."""
        return tensor if self.cut is None else tensor.view(-1)[slice(*self.cut)]


@dataclass(frozen=True, slots=True)
class Bucket:
    """What moves at once.

    Attributes:
        group: of the parameters.
        stretches: the parameters, in order.
        copies: between host memory and that of the bucket.
        size: bytes of the bucket's memory.
    """

    group: int
    stretches: tuple[Stretch, ...]
    copies: tuple[Copy, ...]
    size: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of an optimizer.

    Attributes:
        homes: group, then parameter: where its state lies in host memory, by key.
        buckets: in the order of the update.
        host_bytes: of host memory.
    """

    homes: tuple[tuple[Mapping[str, Place], ...], ...]
    buckets: tuple[Bucket, ...]
    host_bytes: int

    @property
    def slots(self) -> tuple[int, ...]:
        """Bytes of device memory for each of `SLOTS` buckets in flight; bucket i goes through slot i % `SLOTS`."""
        return tuple(max((bucket.size for bucket in self.buckets[slot::SLOTS]), default=0) for slot in range(SLOTS))

    @property
    def moved_bytes(self) -> int:
        """Bytes that one step copies to the device, and as many back."""
        return sum(copy.size for bucket in self.buckets for copy in bucket.copies)


def plan_buckets(groups: Sequence[Sequence[StateShape]], limit: int = BUCKET_BYTES) -> BucketPlan:
    """Cut the state of all parameters into buckets, those of a group one after the other.

    Ranks that hold different rows get the same buckets, so that what they send each other during an update agrees; of
    a state that is cut, only what a rank has.

    Args:
        groups: group, then parameter: its state.
        limit: bytes of a bucket; a state that must be on the device as a whole may be larger.
    """
    homes: list[tuple[Mapping[str, Place], ...]] = []
    buckets: list[Bucket] = []
    end = 0
    for group, states in enumerate(groups):
        found: list[Mapping[str, Place]] = []
        for indices in _pack([state.most_bytes for state in states], limit):
            begin = end
            for index in indices:
                placed, end = _put(states[index].tensors, end)
                found.append(placed)
            elements = states[indices[0]].elements
            if elements is not None and states[indices[0]].most_bytes > limit:
                buckets.extend(_cut(group, indices[0], found[-1], elements, limit))
                continue
            stretches = tuple(
                Stretch(index, {key: place._replace(start=place.start - begin) for key, place in found[index].items()})
                for index in indices
            )
            copies = (Copy(begin, 0, end - begin),) if end > begin else ()
            buckets.append(Bucket(group, stretches, copies, end - begin))
        homes.append(tuple(found))
    return BucketPlan(tuple(homes), tuple(buckets), end)


def _pack(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Neighbours that together have at most `limit` bytes, or one that alone has more."""
    first, filled = 0, 0
    for index, size in enumerate(sizes):
        if index > first and filled + size > limit:
            yield range(first, index)
            first, filled = index, 0
        filled += size
    if first < len(sizes):
        yield range(first, len(sizes))


def _put(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], start: int) -> tuple[Mapping[str, Place], int]:
    """Tensors one behind the other from `start` on, and where the next one would begin."""
    placed: dict[str, Place] = {}
    for key, (shape, dtype) in tensors.items():
        placed[key] = Place(start, shape, dtype)
        start = _aligned(start + placed[key].size)
    return placed, start


def _cut(group: int, index: int, home: Mapping[str, Place], elements: int, limit: int) -> Iterator[Bucket]:
    """Buckets of so many elements each that their tensors have at most `limit` bytes together."""
    width = sum(place.dtype.itemsize for place in home.values())
    step = max(_GRAIN, limit // width // _GRAIN * _GRAIN)
    for first in range(0, elements, step):
        last = min(first + step, elements)
        state, size = _put({key: ((last - first,), place.dtype) for key, place in home.items()}, 0)
        copies = tuple(
            Copy(place.start + first * place.dtype.itemsize, state[key].start, state[key].size)
            for key, place in home.items()
        )
        yield Bucket(group, (Stretch(index, state, (first, last)),), copies, size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
