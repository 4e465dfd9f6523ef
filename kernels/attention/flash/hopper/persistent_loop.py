"""The turns of a program of a persistent grid, and the rings of shared memory that its loads go through."""

# Gluon compiles these functions, and its language is typed for itself:
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

jit: Any = gluon.jit

# what a launch may pass without a variant of its own: all numbers that are no constants
_NUMBERS = (
    "order_width", "heads", "heads_per_group", "groups", "queries", "pitch", "keys", "query_tiles", "reach", "extent",
    "bands", "key_blocks", "offset",
)  # fmt: skip
kernel: Any = gluon.jit(do_not_specialize=_NUMBERS)

# what Triton 3.9 has new names for
load_tile: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@jit
def turns_of(order, width):
    """How many tiles this program computes; `order` is of `order.py`, rows of `width` numbers."""
    return gl.load(order + gl.program_id(0) * width)


@jit
def turn_of(order, width, turn):
    """Tile, and pair of sequence and head, of this program's turn."""
    at = order + gl.program_id(0) * width + 1 + 2 * turn
    return gl.load(at), gl.load(at + 1)


@jit
def ring(buffers, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Shared memory `buffers` of STAGES tiles with its barriers: (buffers, full, free)."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(free.index(stage), READERS)
    return buffers, full, free


@jit
def fill(tiles, step, descriptor, place, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Producer: when the ring's place of `step` is free, load a tile into it."""
    buffers, full, free = tiles
    stage = step % STAGES
    mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    load_tile(descriptor, place, full.index(stage), buffers.index(stage))


@jit
def wait_full(tiles, step, STAGES: gl.constexpr):
    """Consumer: wait for the tile of `step`."""
    mbarrier.wait(tiles[1].index(step % STAGES), (step // STAGES) & 1)


@jit
def release(tiles, step, STAGES: gl.constexpr):
    """Consumer: the tile of `step` is read."""
    mbarrier.arrive(tiles[2].index(step % STAGES), count=1)
