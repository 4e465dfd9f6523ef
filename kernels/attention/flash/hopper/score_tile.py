"""Which keys a tile of queries visits, and what is added to its scores or hides them.

Terms as in `tile.py`: a query i and a key j have the distance d = j - (i + offset), offset = keys - queries.
"""

# Gluon compiles these functions, and its language is typed for itself:
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental.gluon import language as gl

from .persistent_loop import jit

LOG2E = gl.constexpr(1.4426950408889634)


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
        low = gl.load(distance_here - 2 * extent) * scale
        high = gl.load(distance_here + 2 * extent) * scale
    return low, high


@jit
def with_distances(s, pairs, SIGN: gl.constexpr):
    """A tile plus its entries of the distance table, two by two, since a thread holds neighbouring columns.

    Args:
        s: (rows, columns).
        pairs: the entry of row 0 and column 0.
        SIGN: 1 where the distance grows with the column, in the rising table; -1 in the falling one.
    """
    halves = s.reshape([s.shape[0], s.shape[1] // 2, 2])
    layout: gl.constexpr = halves.type.layout
    row = gl.arange(0, s.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    column = 2 * gl.arange(0, s.shape[1] // 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    second = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    apart = gl.expand_dims(gl.expand_dims(column, 0) - gl.expand_dims(row, 1), 2)
    halves += gl.load(pairs + 2 * SIGN * apart + gl.expand_dims(gl.expand_dims(second, 0), 1))
    return gl.convert_layout(halves.reshape([s.shape[0], s.shape[1]]), s.type.layout)


@jit
def slope_of_head(slopes_pointer, head, scale, HAS_SLOPE: gl.constexpr):
    """Slope of a head, in units of the unscaled scores; `scale` is theirs times log2(e)."""
    slope = 0.0
    if HAS_SLOPE:
        slope = gl.load(slopes_pointer + head) * LOG2E / scale
    return slope


@jit
def places(tile):
    """Row and column of each entry of a tile, fp32, (rows, 1) and (1, columns)."""
    layout: gl.constexpr = tile.type.layout
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout)).to(gl.float32)
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout)).to(gl.float32)
    return gl.expand_dims(row, 1), gl.expand_dims(column, 0)


@jit
def row_slopes(rows, slope, scale, CAUSAL: gl.constexpr, HAS_SLOPE: gl.constexpr):
    """What `biased` leaves out of the exponents of row 0, 1, ... of a tile: `rows` is 1-D and gives the layout."""
    left_out = gl.zeros_like(rows)
    if HAS_SLOPE and CAUSAL:
        left_out = slope * scale * gl.arange(0, rows.shape[0], rows.type.layout).to(gl.float32)
    return left_out


@jit
def biased(
    s, distance_here, far, slope, start, first, offset, reach, scale,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr,
):  # fmt: skip
    """Scores with the bias where it differs within the tile, and what all exponents of the tile gain beside.

    `s`: (queries, keys) from query `first` and key `start` on; `far`: of `far_shifts`. A causal slope is a line along
    the keys: what it takes from a whole row is left out, see `row_slopes`.
    """
    shift = 0.0
    if HAS_DISTANCE:
        shift = far[0]
        if start - (first + s.shape[0] - 1) - offset >= reach:
            shift = far[1]
        elif start + s.shape[1] - 1 - first - offset > -reach:
            shift = 0.0
            s = with_distances(s, distance_here + 2 * (start - first - offset), 1)
    if HAS_SLOPE:
        row, column = places(s)
        gap = (start - first - offset).to(gl.float32)
        if CAUSAL:
            s = s + slope * column
            shift = slope * scale * gap
        else:
            s = s - slope * gl.abs(column - row + gap)
    return s, shift
