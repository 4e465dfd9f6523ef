"""Bucketing of offloaded optimizer state, and the memory layout of its tensors. Arithmetic only.

Host memory is one contiguous buffer. A bucket is the unit of transfer: the states of neighbouring parameters, which are
contiguous in that buffer and therefore one transfer; or a slice of the elements of one large parameter, with one
transfer for each of its state tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
"""Bytes of state per bucket: about a millisecond of transfer, against microseconds to launch a copy."""
NUM_SLOTS = 3
"""Device buffers: for the bucket being fetched, the one being updated, and the one being written back."""
_ALIGNMENT = 256  # bytes; more than the 16 bytes that vectorized kernels need
_GRAIN = 1024  # elements; slices start at multiples of it, so that vectorized kernels process the same vectors


class TensorLocation(NamedTuple):
    """Location of a tensor in a byte buffer."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return a view of the buffer as the tensor."""
        return memory[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class Transfer(NamedTuple):
    """One transfer: offset in host memory, offset in the bucket's device memory, and size, in bytes."""

    host_offset: int
    device_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shapes of the state of one parameter on this rank.

    Attributes:
        tensors: key to shape and dtype.
        max_shard_bytes: bytes of the largest shard; the same number on every rank.
        elements: elements of each tensor, for an elementwise update that may be split anywhere; None: the state must be
            on the device as a whole.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    max_shard_bytes: int
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """A parameter, or a slice of one, in a bucket.

    Attributes:
        index: index of the parameter in its group.
        state: locations of its state tensors in the memory of the bucket.
        element_range: element range `start, stop`, if the bucket has only these, as vectors; None: all.
    """

    index: int
    state: Mapping[str, TensorLocation]
    element_range: tuple[int, int] | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """Return a view of the slice of a contiguous tensor, shaped like the local shard of the parameter."""
        return tensor if self.element_range is None else tensor.view(-1)[slice(*self.element_range)]


@dataclass(frozen=True, slots=True)
class Bucket:
    """State that is transferred and updated at once.

    Attributes:
        group: index of the parameter group.
        slices: parameters, in order.
        transfers: transfers between host memory and the bucket's memory.
        size: bytes of the bucket's memory.
    """

    group: int
    slices: tuple[BucketSlice, ...]
    transfers: tuple[Transfer, ...]
    size: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of an optimizer.

    Attributes:
        host_locations: locations in host memory by key, for each group and each parameter in it.
        buckets: in the order of the update.
        host_bytes: total bytes of host memory.
    """

    host_locations: tuple[tuple[Mapping[str, TensorLocation], ...], ...]
    buckets: tuple[Bucket, ...]
    host_bytes: int

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of each of the `NUM_SLOTS` device buffers; bucket i uses buffer i % `NUM_SLOTS`."""
        return tuple(
            max((bucket.size for bucket in self.buckets[slot::NUM_SLOTS]), default=0) for slot in range(NUM_SLOTS)
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to the device per step, and the same number back."""
        return sum(transfer.size for bucket in self.buckets for transfer in bucket.transfers)


def plan_buckets(groups: Sequence[Sequence[StateShape]], bucket_bytes: int = BUCKET_BYTES) -> BucketPlan:
    """Assign the state of all parameters to buckets, group by group.

    Ranks with different shards get the same assignment of parameters to buckets, so that collectives during an update
    match; only a large state that is sliced gets as many buckets as its local shard needs.

    Args:
        groups: state shapes, for each group and each parameter in it.
        bucket_bytes: maximal bytes of a bucket; a state that must be on the device as a whole may be larger.
    """
    host_locations: list[tuple[Mapping[str, TensorLocation], ...]] = []
    buckets: list[Bucket] = []
    end = 0
    for group, states in enumerate(groups):
        group_locations: list[Mapping[str, TensorLocation]] = []
        for indices in _pack([state.max_shard_bytes for state in states], bucket_bytes):
            begin = end
            for index in indices:
                locations, end = _lay_out(states[index].tensors, end)
                group_locations.append(locations)
            elements = states[indices[0]].elements
            if elements is not None and states[indices[0]].max_shard_bytes > bucket_bytes:
                buckets.extend(_slice(group, indices[0], group_locations[-1], elements, bucket_bytes))
                continue
            slices = tuple(
                BucketSlice(
                    index,
                    {
                        key: location._replace(start=location.start - begin)
                        for key, location in group_locations[index].items()
                    },
                )
                for index in indices
            )
            transfers = (Transfer(begin, 0, end - begin),) if end > begin else ()
            buckets.append(Bucket(group, slices, transfers, end - begin))
        host_locations.append(tuple(group_locations))
    return BucketPlan(tuple(host_locations), tuple(buckets), end)


def _pack(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Yield ranges of neighbours with at most `limit` bytes together, or of one with more."""
    first, filled = 0, 0
    for index, size in enumerate(sizes):
        if index > first and filled + size > limit:
            yield range(first, index)
            first, filled = index, 0
        filled += size
    if first < len(sizes):
        yield range(first, len(sizes))


def _lay_out(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], start: int
) -> tuple[Mapping[str, TensorLocation], int]:
    """Place tensors consecutively from `start`; return their locations and the next free offset."""
    locations: dict[str, TensorLocation] = {}
    for key, (shape, dtype) in tensors.items():
        locations[key] = TensorLocation(start, shape, dtype)
        start = _aligned(start + locations[key].size)
    return locations, start


def _slice(
    group: int, index: int, host_locations: Mapping[str, TensorLocation], elements: int, limit: int
) -> Iterator[Bucket]:
    """Slice the state of one parameter into buckets of at most `limit` bytes (at least `_GRAIN` elements)."""
    element_bytes = sum(location.dtype.itemsize for location in host_locations.values())
    step = max(_GRAIN, limit // element_bytes // _GRAIN * _GRAIN)
    for start in range(0, elements, step):
        stop = min(start + step, elements)
        state, size = _lay_out({key: ((stop - start,), location.dtype) for key, location in host_locations.items()}, 0)
        transfers = tuple(
            Transfer(location.start + start * location.dtype.itemsize, state[key].start, state[key].size)
            for key, location in host_locations.items()
        )
        yield Bucket(group, (BucketSlice(index, state, (start, stop)),), transfers, size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
