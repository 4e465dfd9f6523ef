"""Device functions for the scores of a tile: visited keys, masks and biases.

Terms as in `tile.py`: query i and key j have the distance d = j - (i + offset), offset = keys - queries.
"""

# Gluon functions are compiled by Triton, and type checkers cannot follow them:
# pyrefly: ignore-errors[bad-argument-type]

from __future__ import annotations

from triton.experimental.gluon import constexpr_function
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
def num_earlier_tiles(begins_pointer, first, num_tiles, BLOCK_N: gl.constexpr, DOCUMENTS: gl.constexpr):
    """Return the number of leading key tiles before the document of query `first`; `begins` is from `row_bounds`."""
    earlier = 0
    if DOCUMENTS:
        earlier = gl.minimum(gl.load(begins_pointer + first) // BLOCK_N, num_tiles - 1)
    return earlier


@jit
def load_begins(begins_pointer, first, queries, BLOCK_M: gl.constexpr, layout: gl.constexpr, DOCUMENTS: gl.constexpr):
    """Return the first key of the documents of BLOCK_M queries, and of the last one's; 0 without DOCUMENTS."""
    begins = 0
    last = 0
    if DOCUMENTS:
        query = first + gl.arange(0, BLOCK_M, layout)
        begins = gl.load(begins_pointer + query, mask=query < queries, other=0)
        last = gl.load(begins_pointer + gl.minimum(first + BLOCK_M, queries) - 1)
    return begins, last


@jit
def mask_scores(s, start, first, offset, keys, begins, CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr):
    """Mask scores (queries, keys): -inf for keys beyond the end or, if CAUSAL, later than the query.

    With DOCUMENTS also for keys before `begins` of the query.
    """
    layout: gl.constexpr = s.type.layout
    key = start + gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
    hidden = key >= keys
    if CAUSAL:
        query = first + gl.expand_dims(gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
        hidden = hidden | (key > query + offset)
    if DOCUMENTS:
        hidden = hidden | (key < gl.expand_dims(begins, 1))
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


# of an 8 x 8 block of each warp, (4, 8, 8), as wgmma leaves it
_BLOCK = gl.constexpr(gl.DistributedLinearLayout(
    reg_bases=[[0, 0, 1]],
    lane_bases=[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    warp_bases=[[1, 0, 0], [2, 0, 0]],
    block_bases=[],
    shape=[4, 8, 8],
))  # fmt: skip


@constexpr_function
def _log2(number):
    return number.bit_length() - 1


@jit
def _split_columns(rows):
    """Split (4, 8, columns, 8), with a power of two columns, into a tuple of (4, 8, 8)."""
    blocks = (rows,)
    for _ in gl.static_range(_log2(rows.shape[2])):
        halves = ()
        for n in gl.static_range(len(blocks)):
            pair = blocks[n].reshape([4, 8, 2, blocks[n].shape[2] // 2, 8])
            halves += gl.permute(pair, (0, 1, 3, 4, 2)).split()
        blocks = halves
    found = ()
    for n in gl.static_range(len(blocks)):
        found += (gl.convert_layout(blocks[n].reshape([4, 8, 8]), _BLOCK),)  # the same, by another name
    return found


@jit
def join_columns(blocks):
    """Join a power of two of (4, 8, 8) to (4, 8, columns, 8)."""
    for level in gl.static_range(_log2(len(blocks))):
        wholes = ()
        for n in gl.static_range(len(blocks) // 2):
            pair = gl.join(blocks[2 * n], blocks[2 * n + 1]).reshape([4, 8, 1 << level, 8, 2])
            wholes += (gl.permute(pair, (0, 1, 4, 2, 3)).reshape([4, 8, 2 << level, 8]),)
        blocks = wholes
    return blocks[0]


@jit
def split_blocks(tile):
    """Split a tile of 64 rows, computed by wgmma, into its 8 x 8 blocks.

    A warp has two rows of blocks, a thread one row and two adjacent columns of each block. The distance between a
    column and a row is the same in upper block j and lower block j + 1.

    Returns:
        Upper and lower blocks by their column, tuples of (4 warps, 8, 8).
    """
    blocks = tile.reshape([4, 2, 8, tile.shape[1] // 8, 8])
    upper, lower = gl.permute(blocks, (0, 2, 3, 4, 1)).split()
    return _split_columns(upper), _split_columns(lower)


@jit
def _join_blocks(upper, lower):
    """Undo `split_blocks`, apart from the name of the layout."""
    blocks = gl.permute(gl.join(join_columns(upper), join_columns(lower)), (0, 4, 1, 2, 3))
    return blocks.reshape([64, 8 * blocks.shape[3]])


@jit
def add_distance_bias(s, pairs, SIGN: gl.constexpr):
    """Add entries of the distance table to a tile, those of a diagonal of blocks once for all of them.

    Two entries are loaded at a time, since a thread has adjacent columns.

    Args:
        s: (64, columns).
        pairs: pointer to the table entry of row 0 and column 0.
        SIGN: 1 if the distance increases with the column (first half of the table), -1 if it decreases (second half).
    """
    upper, lower = split_blocks(s)
    layout: gl.constexpr = upper[0].reshape([4, 8, 4, 2]).type.layout
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    column = 2 * gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, layout))))
    second = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, layout))))
    row = gl.expand_dims(gl.expand_dims(16 * gl.expand_dims(w, 1) + gl.expand_dims(row, 0), 2), 3)
    distance = gl.expand_dims(gl.expand_dims(gl.expand_dims(column, 0), 0), 3) - row
    entries = pairs + 2 * SIGN * distance + gl.expand_dims(gl.expand_dims(gl.expand_dims(second, 0), 0), 0)
    bias = gl.convert_layout(gl.load(entries - 16 * SIGN).reshape([4, 8, 8]), _BLOCK)
    upper_biased, lower_biased = (), ()
    for j in gl.static_range(len(upper)):
        lower_biased += (lower[j] + bias,)
        bias = gl.convert_layout(gl.load(entries + 16 * SIGN * j).reshape([4, 8, 8]), _BLOCK)
        upper_biased += (upper[j] + bias,)
    return gl.convert_layout(_join_blocks(upper_biased, lower_biased), s.type.layout)


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
