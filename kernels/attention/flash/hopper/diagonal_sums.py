"""Gradient of a distance bias: sums along the diagonals of each tile of score gradients."""

# Gluon functions are compiled by Triton, and type checkers cannot follow them:
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, missing-attribute]

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from .persistent_loop import jit
from .score_tile import join_columns, split_blocks

_memory: Any = gl.shared_memory_descriptor
# gather from shared memory exists in Triton 3.7 or later, which no longer allows to reinterpret padded layouts
HAS_GATHER = gl.constexpr(hasattr(_memory, "gather"))
_COLUMNS = gl.constexpr(gl.BlockedLayout([4, 8, 1], [1, 1, 32], [1, 1, 4], [2, 1, 0]))


@jit
def allocate_scratch():
    """Allocate shared memory for the sums of one tile of one consumer, see `_store_blocks` and `_skewed`."""
    pads: gl.constexpr = [[128, 4]] if HAS_GATHER else [[128, 1], [256, 8], [1024, 8]]
    layout: gl.constexpr = gl.PaddedSharedLayout.with_identity_for(pads, [4, 8, 128], [2, 1, 0])
    return gl.allocate_shared_memory(gl.float32, [4, 8, 128], layout)


@jit
def clear_scratch(scratch):
    """Write the zeros that `_skewed` reads beside the sums, which tiles do not overwrite."""
    scratch.store(gl.zeros([4, 8, 128], gl.float32, _COLUMNS))


@jit
def _store_blocks(tile, scratch):
    """Store a (64 keys, 64 queries) tile, upper and lower blocks of the same distances added, see `split_blocks`.

    Row (w, r) of the scratch, (4, 8, 128), is for keys 16 w + r and 16 w + 8 + r, and column 64 + c for query c of the
    former and c + 8 of the latter; c is from -8 to 63.
    """
    upper, lower = split_blocks(tile)
    if not HAS_GATHER:
        rows: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[256, 8]], [4, 8, 128], [2, 1, 0])
        scratch = scratch._reinterpret(gl.float32, [4, 8, 128], rows)
    sums = ()
    for j in gl.static_range(7):
        sums += (upper[j] + lower[j + 1],)
    sums += (upper[7],)
    scratch.slice(56, 8, dim=2).store(lower[0])
    # as one: the compiler orders stores by barriers
    scratch.slice(64, 64, dim=2).store(join_columns(sums).reshape([4, 8, 64]))


@jit
def _skewed(scratch):
    """Load what `_store_blocks` has stored, in column 64 + query - key of the tile.

    So row (w, r) moves by 16 w + r columns. Without gather it is stored with a pitch of 128 numbers and loaded with one
    that is larger by 1, and by another 8 after 8 rows. What comes from beside the stored columns is 0, see
    `clear_scratch`. A warp stores 8 columns of 8 rows: of these only two share their banks, as two rows are followed by
    8 numbers of padding; with gather each row by 4.
    """
    if HAS_GATHER:
        w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, _COLUMNS)))
        r = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, _COLUMNS)))
        column = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(0, _COLUMNS)))
        shift = gl.expand_dims(16 * gl.expand_dims(w, 1) + gl.expand_dims(r, 0), 2)
        source = shift + gl.expand_dims(gl.expand_dims(column, 0), 0)
        skewed = scratch.gather(gl.where(source < 128, source, 0), 2)
    else:
        skewed = scratch.load(_COLUMNS)
    return skewed


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
        _store_blocks(gradient, scratch)
        sums = gl.sum(gl.sum(_skewed(scratch), 0), 0)
        # first tile of queries within the reach; the added constant makes the division round down below 0 too
        first = (key - offset - reach - 63 + (1 << 24)) // 64 - (1 << 18) + 1
        band_offset = ((row * key_blocks + key // 64) * bands + query // 64 - first).to(gl.int64) * 128
        # column 64 + query - key, of which 0 stays empty, becomes 64 + key - query
        column = (128 - gl.arange(0, 128, sums.type.layout)) & 127
        gl.store(pointer + band_offset + column, sums)
