"""Which keys a tile of queries visits, and what is added to its scores or hides them.

Terms as in `tile.py`: a query i and a key j have the distance d = j - (i + offset), offset = keys - queries.
"""

# Gluon compiles these functions, and its language is typed for itself:
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental.gluon import language as gl

from .schedule import jit


@jit
def key_tiles(row, offset, keys, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles of keys the queries of a row tile visit; at least one, so that there is something to do."""
    end = keys
    if CAUSAL:
        end = gl.minimum(keys, (row + 1) * ROWS + offset)
    return gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)


@jit
def tiles_without_mask(first, offset, keys, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many tiles of keys, from the first on, every query from row `first` on sees whole."""
    clear = keys // BLOCK_N
    if CAUSAL:
        clear = gl.minimum(clear, gl.maximum(first + offset + 1, 0) // BLOCK_N)
    return clear


@jit
def hidden_scores(s, start, first, offset, keys, CAUSAL: gl.constexpr):
    """Scores (queries, keys) with -inf for keys that do not exist or are later than the query."""
    layout: gl.constexpr = s.type.layout
    key = start + gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
    hidden = key >= keys
    if CAUSAL:
        query = first + gl.expand_dims(gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
        hidden = hidden | (key > query + offset)
    return gl.where(hidden, float("-inf"), s)


@jit
def far_shifts(distance_here, extent, scale, HAS_DISTANCE: gl.constexpr):
    """What exponents gain at the distances <= -reach, and >= reach."""
    low = 0.0
    high = 0.0
    if HAS_DISTANCE:
        low = gl.load(distance_here - extent) * scale
        high = gl.load(distance_here + extent) * scale
    return low, high


@jit
def distance_shift(s, distance_here, far, start, first, offset, reach, HAS_DISTANCE: gl.constexpr):
    """Scores with the distance bias, where it differs within the tile; else what all exponents of the tile gain.

    `s`: (queries, keys) from query `first` and key `start` on; `far`: of `far_shifts`.
    """
    shift = 0.0
    if HAS_DISTANCE:
        shift = far[0]
        if start - (first + s.shape[0] - 1) - offset >= reach:
            shift = far[1]
        elif start + s.shape[1] - 1 - first - offset > -reach:
            shift = 0.0
            # a pointer per row, then constants: what is left to compute per pair is the load
            layout: gl.constexpr = s.type.layout
            row = gl.expand_dims(gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
            column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
            s = s + gl.load(distance_here + (start - first - offset) - row + column)
    return s, shift
