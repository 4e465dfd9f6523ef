"""Gradient of a distance bias: sums along the diagonals of each tile of score gradients."""

# Gluon functions are compiled by Triton, and pyright cannot check their types:
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from .persistent_loop import jit

_memory: Any = gl.shared_memory_descriptor
# gather from shared memory exists in Triton 3.7 or later, which no longer allows to reinterpret padded layouts
HAS_GATHER = gl.constexpr(hasattr(_memory, "gather"))


@jit
def allocate_scratch():
    """Allocate shared memory for one tile of one consumer."""
    if HAS_GATHER:
        layout: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[64, 4]], [64, 64], [1, 0])
        scratch = gl.allocate_shared_memory(gl.float32, [64, 64], layout)
    else:
        wide: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[128, 1], [256, 8]], [64, 128], [1, 0])
        scratch = gl.allocate_shared_memory(gl.float32, [64, 128], wide)
    return scratch


@jit
def _skewed(tile, scratch, layout: gl.constexpr):
    """Skew a (64 queries, 64 keys) tile: column 64 + j - i of row i of the result is column j; other elements are 0.

    Without gather the tile is stored with a row pitch of 128 numbers, in columns 64 to 127, and loaded with a pitch of
    129: the address 128 i + 64 + j equals 129 i + (64 + j - i). A warp stores 8 keys of 4 rows, 2 apart. So that these
    are in all 32 banks, two rows are followed by 8 numbers of padding; with gather each row by 4.
    """
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, layout)), 0) + row - 64
    if HAS_GATHER:
        scratch.store(tile)
        skewed = scratch.gather(gl.minimum(gl.maximum(column, 0), 63), 1)
    else:
        narrow: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[256, 8]], [64, 128], [1, 0])
        scratch._reinterpret(gl.float32, [64, 128], narrow).slice(64, 64, dim=1).store(tile)
        skewed = scratch.load(layout)
    return gl.where((column >= 0) & (column < 64), skewed, 0.0)


@jit
def store_diagonals(gradient, pointer, scratch, row, key, query, offset, reach, bands, key_blocks):
    """Store the diagonal sums of a 64 x 64 tile (keys, queries) if any of its pairs is closer than the reach.

    Args:
        gradient: fp32 (64 keys, 64 queries).
        pointer: fp32 (batch, heads, key_blocks, bands, 128); column 64 + j - i is for query i and key j of the tile.
        scratch: from `allocate_scratch`.
        row: flattened index of sequence and head.
    """
    if (key + 63 - query - offset > -reach) & (key - (query + 63) - offset < reach):
        columns: gl.constexpr = gl.BlockedLayout([64, 1], [1, 32], [1, 4], [1, 0])
        # transposed: a thread holds pairs of queries, which cannot be stored as aligned pairs to padded rows of queries
        sums = gl.sum(_skewed(gl.permute(gradient, (1, 0)), scratch, columns), 0)
        # first tile of queries within the reach; the added constant makes the division round down below 0 too
        first = (key - offset - reach - 63 + (1 << 24)) // 64 - (1 << 18) + 1
        band_offset = ((row * key_blocks + key // 64) * bands + query // 64 - first).to(gl.int64) * 128
        gl.store(pointer + band_offset + gl.arange(0, 128, gl.SliceLayout(0, columns)), sums)
