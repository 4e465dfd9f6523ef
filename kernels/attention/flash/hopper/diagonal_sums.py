"""The gradient of a distance bias: sums along the diagonals of the scores' gradient, tile by tile."""

# Gluon compiles these functions, and its language is typed for itself:
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from .persistent_loop import jit

_memory: Any = gl.shared_memory_descriptor
# reading shared memory at indices came with Triton 3.7 or later, which no longer lets its padding be reinterpreted
HAS_GATHER = gl.constexpr(hasattr(_memory, "gather"))


@jit
def allocate_scratch():
    """Shared memory for the tile of one consumer."""
    if HAS_GATHER:
        layout: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[64, 1]], [64, 64], [1, 0])
        scratch = gl.allocate_shared_memory(gl.float32, [64, 64], layout)
    else:
        wide: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[128, 2]], [64, 128], [1, 0])
        scratch = gl.allocate_shared_memory(gl.float32, [64, 128], wide)
    return scratch


@jit
def _turned(tile, scratch, layout: gl.constexpr):
    """Columns of a (64 queries, 64 keys) moved so that column 64 + j - i of row i is its column j; the others are 0.

    Without a gather: stored in rows of 129 numbers, columns 64 to 127 of them, and read in rows of 130; place
    129 i + 64 + j is 130 i + (64 + j - i).
    """
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, layout)), 0) + row - 64
    if HAS_GATHER:
        scratch.store(tile)
        turned = scratch.gather(gl.minimum(gl.maximum(column, 0), 63), 1)
    else:
        narrow: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[128, 1]], [64, 128], [1, 0])
        scratch._reinterpret(gl.float32, [64, 128], narrow).slice(64, 64, dim=1).store(tile)
        turned = scratch.load(layout)
    return gl.where((column >= 0) & (column < 64), turned, 0.0)


@jit
def store_diagonals(gradient, pointer, scratch, row, key, query, offset, reach, bands, key_blocks):
    """If some pair of a 64 x 64 tile (keys, queries) is nearer than the reach, store the sums of its diagonals.

    Args:
        gradient: fp32 (64 keys, 64 queries).
        pointer: fp32 (batch, heads, key_blocks, bands, 128); column 64 + j - i is for query i and key j of the tile.
        scratch: of `allocate_scratch`.
        row: of sequence and head.
    """
    if (key + 63 - query - offset > -reach) & (key - (query + 63) - offset < reach):
        columns: gl.constexpr = gl.BlockedLayout([64, 1], [1, 32], [1, 4], [1, 0])
        # a thread holds pairs of queries: as rows they are stored one by one, for padded rows have no aligned pairs
        sums = gl.sum(_turned(gl.permute(gradient, (1, 0)), scratch, columns), 0)
        # the first tile of queries that is near, rounded down also below 0
        first = (key - offset - reach - 63 + (1 << 24)) // 64 - (1 << 18) + 1
        at = ((row * key_blocks + key // 64) * bands + query // 64 - first).to(gl.int64) * 128
        gl.store(pointer + at + gl.arange(0, 128, gl.SliceLayout(0, columns)), sums)
