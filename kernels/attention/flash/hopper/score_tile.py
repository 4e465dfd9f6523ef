"""Device functions for the scores of a tile: visited keys, masks and biases.

Terms as in `tile.py`: query i and key j have the distance d = j - (i + offset), offset = keys - queries.
"""

# Gluon functions are compiled by Triton, and pyright cannot check their types:
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental.gluon import language as gl

from .persistent_loop import jit

LOG2E = gl.constexpr(1.4426950408889634)


@jit
def num_key_tiles(row, offset, keys, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the number of key tiles that the queries of tile `row` visit; at least one, for the pipeline."""
    end = keys
    if CAUSAL:
        end = gl.minimum(keys, (row + 1) * ROWS + offset)
    return gl.maximum((end + BLOCK_N - 1) // BLOCK_N, 1)


@jit
def num_unmasked_tiles(first, offset, keys, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the number of leading key tiles that are fully visible to all queries from `first` on."""
    clear = keys // BLOCK_N
    if CAUSAL:
        clear = gl.minimum(clear, gl.maximum(first + offset + 1, 0) // BLOCK_N)
    return clear


@jit
def mask_scores(s, start, first, offset, keys, CAUSAL: gl.constexpr):
    """Mask scores (queries, keys): -inf for keys beyond the end or, if CAUSAL, later than the query."""
    layout: gl.constexpr = s.type.layout
    key = start + gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
    hidden = key >= keys
    if CAUSAL:
        query = first + gl.expand_dims(gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
        hidden = hidden | (key > query + offset)
    return gl.where(hidden, float("-inf"), s)


@jit
def far_bias(distance_table, extent, scale, HAS_DISTANCE: gl.constexpr):
    """Return the bias of exponents at distances <= -reach, and >= reach."""
    low = 0.0
    high = 0.0
    if HAS_DISTANCE:
        low = gl.load(distance_table - 2 * extent) * scale
        high = gl.load(distance_table + 2 * extent) * scale
    return low, high


@jit
def add_distance_bias(s, pairs, SIGN: gl.constexpr):
    """Add entries of the distance table to a tile, two at a time, since a thread holds adjacent columns.

    Args:
        s: (rows, columns).
        pairs: pointer to the table entry of row 0 and column 0.
        SIGN: 1 if the distance increases with the column (first half of the table), -1 if it decreases (second half).
    """
    halves = s.reshape([s.shape[0], s.shape[1] // 2, 2])
    layout: gl.constexpr = halves.type.layout
    row = gl.arange(0, s.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    column = 2 * gl.arange(0, s.shape[1] // 2, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    second = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    distance = gl.expand_dims(gl.expand_dims(column, 0) - gl.expand_dims(row, 1), 2)
    halves += gl.load(pairs + 2 * SIGN * distance + gl.expand_dims(gl.expand_dims(second, 0), 1))
    return gl.convert_layout(halves.reshape([s.shape[0], s.shape[1]]), s.type.layout)


@jit
def load_slope(slopes_pointer, head, scale, HAS_SLOPE: gl.constexpr):
    """Load the slope of a head, divided by the scale of the scores; `scale` is that scale times log2(e)."""
    slope = 0.0
    if HAS_SLOPE:
        slope = gl.load(slopes_pointer + head) * LOG2E / scale
    return slope


@jit
def tile_coordinates(tile):
    """Return the row and column indices of a tile, fp32, (rows, 1) and (1, columns)."""
    layout: gl.constexpr = tile.type.layout
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout)).to(gl.float32)
    column = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout)).to(gl.float32)
    return gl.expand_dims(row, 1), gl.expand_dims(column, 0)


@jit
def row_slope_terms(rows, slope, scale, CAUSAL: gl.constexpr, HAS_SLOPE: gl.constexpr):
    """Return the per-row term that `add_bias` omits from the exponents of a tile; `rows` (1-D) provides the layout."""
    omitted = gl.zeros_like(rows)
    if HAS_SLOPE and CAUSAL:
        omitted = slope * scale * gl.arange(0, rows.shape[0], rows.type.layout).to(gl.float32)
    return omitted


@jit
def add_bias(
    s, distance_table, far, slope, start, first, offset, reach, scale,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr,
):  # fmt: skip
    """Return the scores plus the bias that varies within the tile, and a constant shift of all its exponents.

    `s`: (queries, keys) from query `first` and key `start` on; `far`: from `far_bias`. A causal ALiBi bias is linear
    along the keys; its term that is constant per row is omitted, see `row_slope_terms`.
    """
    shift = 0.0
    if HAS_DISTANCE:
        shift = far[0]
        if start - (first + s.shape[0] - 1) - offset >= reach:
            shift = far[1]
        elif start + s.shape[1] - 1 - first - offset > -reach:
            shift = 0.0
            s = add_distance_bias(s, distance_table + 2 * (start - first - offset), 1)
    if HAS_SLOPE:
        row, column = tile_coordinates(s)
        gap = (start - first - offset).to(gl.float32)
        if CAUSAL:
            s = s + slope * column
            shift = slope * scale * gap
        else:
            s = s - slope * gl.abs(column - row + gap)
    return s, shift
