"""Persistent grid and software pipeline: tiles of a program, and ring buffers in shared memory for TMA loads."""

# Gluon functions are compiled by Triton, and type checkers cannot follow them:
# pyrefly: ignore-errors[bad-assignment, bad-function-definition]

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

jit: Any = gluon.jit

# runtime numbers, not specialized, so that their values do not cause new compiled variants
_NUMBERS = (
    "order_width", "heads", "heads_per_group", "groups", "row_heads", "queries", "pitch", "keys", "query_tiles",
    "reach", "extent", "bands", "key_blocks", "offset", "pairs", "key_tiles",
)  # fmt: skip
kernel: Any = gluon.jit(do_not_specialize=_NUMBERS)

# renamed in Triton 3.9
load_tile: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def _add_tile(tensor_desc, coord, src, _semantic: Any = None):
    """Add a tile of shared memory to global memory by TMA, as `tma.async_atomic_add` of Triton 3.9."""
    coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coordinates, src.handle)


add_tile: Any = getattr(tma, "async_atomic_add", None) or _add_tile


@jit
def num_assigned_tiles(order, width):
    """Return the number of tiles of this program; `order` is from `tile_order`, with rows of `width` numbers."""
    return gl.load(order + gl.program_id(0) * width)


@jit
def next_tile(order, width, turn):
    """Return the tile, and the (sequence, head) pair, of this program's iteration `turn`."""
    entry = order + gl.program_id(0) * width + 1 + 2 * turn
    return gl.load(entry), gl.load(entry + 1)


@jit
def make_ring(buffers, STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    """Return a ring buffer of STAGES tiles with its barriers: (buffers, full, free)."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), WRITERS)
        mbarrier.init(free.index(stage), READERS)
    return buffers, full, free


@jit
def tma_load(tiles, step, descriptor, coordinates, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Producer: wait until the stage of `step` is free, then start loading a tile into it."""
    buffers, full, free = tiles
    stage = step % STAGES
    mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    load_tile(descriptor, coordinates, full.index(stage), buffers.index(stage))


@jit
def wait_full(tiles, step, STAGES: gl.constexpr):
    """Consumer: wait until the tile of `step` is loaded."""
    mbarrier.wait(tiles[1].index(step % STAGES), (step // STAGES) & 1)


@jit
def release(tiles, step, STAGES: gl.constexpr):
    """Consumer: mark the tile of `step` as read, which frees its stage."""
    mbarrier.arrive(tiles[2].index(step % STAGES), count=1)
