"""Pool of host buffers: no buffer is handed out twice, and the pool stays as large as the largest step needs."""

from __future__ import annotations

import gc
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import TIER, cases
from torch import Tensor

from stoker.models.memory import host_copies
from stoker.models.memory.host_copies import ALIGNMENT, PinnedMemoryPool

SMALL_SLAB = 1 << 16
"""Bytes of a slab here, as many times smaller than a real one as the buffers are."""


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> PinnedMemoryPool:
    """A pool that believes its memory is pinned, and cuts small slabs."""
    empty = torch.empty
    monkeypatch.setattr(host_copies.torch, "empty", lambda size, pin_memory=False, **keys: empty(size, **keys))
    monkeypatch.setattr(host_copies, "SLAB_BYTES", SMALL_SLAB)
    return PinnedMemoryPool(pinned=True)


def test_buffers_are_given_out_again() -> None:
    pool = PinnedMemoryPool(pinned=False)
    one, other = pool.allocate(1000), pool.allocate(1000)
    assert one.data_ptr() != other.data_ptr()
    one.fill_(1)
    other.fill_(2)
    assert one.sum() == 1000
    pool.release(one)
    assert pool.allocate(1000).data_ptr() == one.data_ptr()
    assert pool.allocate(500).data_ptr() != other.data_ptr()
    assert pool.size == 2 * 1024 + ALIGNMENT


def test_slabs_are_cut(pinned: PinnedMemoryPool) -> None:
    """The rest of a slab is used, also where a larger buffer needed a new slab in between."""
    buffers = [pinned.allocate(size) for size in (40000, 40000, 20000, 20000, 100000)]
    assert pinned.size == 2 * SMALL_SLAB + (1 << 17)  # the last has one of its own
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [int(buffer.unique()) for buffer in buffers] == [0, 1, 2, 3, 4]


def test_the_smallest_piece_that_holds_a_buffer_is_cut(pinned: PinnedMemoryPool) -> None:
    """So large pieces stay for large buffers."""
    large, _, small, _ = (pinned.allocate(size * ALIGNMENT) for size in (16, 1, 4, 107))
    pinned.release(large)
    pinned.release(small)
    assert pinned.allocate(3 * ALIGNMENT).data_ptr() == small.data_ptr()
    assert pinned.allocate(16 * ALIGNMENT).data_ptr() == large.data_ptr()
    assert pinned.allocate(1).data_ptr() == small.data_ptr() + 3 * ALIGNMENT
    assert pinned.size == SMALL_SLAB


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (1, 3, 0, 2)])
def test_neighbours_merge(pinned: PinnedMemoryPool, order: tuple[int, ...]) -> None:
    """Also with what was never cut, and whichever is back first."""
    buffers = [pinned.allocate(10000) for _ in range(4)]
    for number in order:
        pinned.release(buffers[number])
    assert pinned.allocate(SMALL_SLAB).data_ptr() == buffers[0].data_ptr()
    assert pinned.size == SMALL_SLAB


def test_slabs_do_not_merge(monkeypatch: pytest.MonkeyPatch, pinned: PinnedMemoryPool) -> None:
    """They may lie side by side, and are two tensors all the same."""
    both = torch.zeros(2 * SMALL_SLAB, dtype=torch.uint8).numpy()
    third = torch.zeros(2 * SMALL_SLAB, dtype=torch.uint8)
    slabs = iter([torch.from_numpy(both[:SMALL_SLAB]), torch.from_numpy(both[SMALL_SLAB:]), third])
    monkeypatch.setattr(host_copies.torch, "empty", lambda *_, **__: next(slabs))
    one, other = pinned.allocate(SMALL_SLAB), pinned.allocate(SMALL_SLAB)
    assert one.data_ptr() + SMALL_SLAB == other.data_ptr()
    pinned.release(one)
    pinned.release(other)
    assert pinned.allocate(SMALL_SLAB + 1).numel() == SMALL_SLAB + 1
    assert {pinned.allocate(SMALL_SLAB).data_ptr() for _ in range(2)} == {one.data_ptr(), other.data_ptr()}
    assert pinned.size == 4 * SMALL_SLAB


def test_growing_sizes_share_slabs(pinned: PinnedMemoryPool) -> None:
    for size in range(1000, SMALL_SLAB, 99):
        pinned.release(pinned.allocate(size))
    assert pinned.size == SMALL_SLAB


def cuts(total: int, count: int, randomness: random.Random) -> list[int]:
    """Sizes that differ widely and make up `total` bytes, but for rounding."""
    weights = [randomness.lognormvariate(0, 0.7) for _ in range(count)]
    return [int(total * weight / sum(weights)) for weight in weights]


@pytest.mark.parametrize(
    "order", cases([list, reversed, lambda buffers: random.Random(0).sample(buffers, len(buffers))], fast=1)
)
def test_a_constant_need_in_random_cuts_takes_constant_memory(
    pinned: PinnedMemoryPool, order: Callable[[list[Tensor]], Iterator[Tensor]]
) -> None:
    """Experts one after the other: as many tokens in each step, but never as many for each."""
    randomness, need = random.Random(0), 20 * SMALL_SLAB
    sizes: list[int] = []
    for _ in range(60 if TIER == "fast" else 300):
        buffers = [pinned.allocate(size) for size in cuts(need, 200, randomness)]
        for buffer in order(buffers):
            pinned.release(buffer)
        sizes.append(pinned.size)
    assert sizes[-1] <= 1.15 * need
    assert sizes[50] == sizes[-1]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000), st.randoms(use_true_random=False)), max_size=80))
def test_a_buffer_that_is_out_is_nobody_elses(steps: list[tuple[bool, int, random.Random]]) -> None:
    """Whatever is taken and given back in whatever order."""
    pool = PinnedMemoryPool(pinned=False)
    out: list[tuple[int, Tensor]] = []
    for number, (takes, size, randomness) in enumerate(steps):
        if takes:
            out.append((number % 251, pool.allocate(size).fill_(number % 251)))
        elif out:
            pool.release(out.pop(randomness.randrange(len(out)))[1])
        assert all(bool((buffer == mark).all()) for mark, buffer in out)
        places = sorted((buffer.data_ptr(), buffer.numel()) for _, buffer in out if buffer.numel())
        assert all(start + length <= after for (start, length), (after, _) in pairwise(places))


def test_the_collector_may_give_back_at_any_moment(monkeypatch: pytest.MonkeyPatch, pinned: PinnedMemoryPool) -> None:
    """The graph of a step that failed dies in the garbage collector, which also runs in the midst of the pool."""

    class Graph:
        def __init__(self, buffer: Tensor) -> None:
            self.buffer, self.circle = buffer, self

        def __del__(self) -> None:
            pinned.release(self.buffer)

    def interrupted(free: list[tuple[int, int, int]], piece: tuple[int, int, int]) -> int:
        place = bisect_left(free, piece)
        gc.collect()
        return place

    first, second, third = (pinned.allocate(size) for size in (10000, 10000, 10000))
    monkeypatch.setattr(host_copies, "bisect_left", interrupted)
    Graph(first)
    pinned.release(third)
    pinned.release(pinned.allocate(1))
    pinned.release(second)
    assert pinned.allocate(SMALL_SLAB).data_ptr() == first.data_ptr()
    assert pinned.size == SMALL_SLAB
