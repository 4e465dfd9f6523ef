"""What the kernels of forward and backward share: which tiles to visit, and the scores of one tile.

Terms: a query i and a key j have the distance d = j - (i + offset) with offset = keys - queries, so that both sequences
end at the same token. A query sees the keys with -left <= d <= right. In an "edge" tile the mask differs from place to
place; in a "plain" tile every pair is visible and the distance bias is one number, so nothing is compared or looked up.
Exponents are in base 2: a score times log2(e).
"""

from __future__ import annotations

from ....interpreter_rounding import rounded
from ....launch import HAS_TRITON, INTERPRETED, jit, tl
from ...dropout import kept_by_dropout


def _constant(value):
    return tl.constexpr(value) if HAS_TRITON else value


INTERPRET = _constant(INTERPRETED)
LOG2E = _constant(1.4426950408889634)
LN2 = _constant(0.6931471805599453)


# ---------------------------------------------------------------- numbers


@jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """Returns accumulator + a @ b. The interpreter cannot multiply bf16, so there both are widened first."""
    if INTERPRET:
        wide = tl.dot(a.to(accumulator.dtype), b.to(accumulator.dtype), out_dtype=accumulator.dtype)
        accumulator = accumulator + wide
    else:
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
    return accumulator


# ---------------------------------------------------------------- places


@jit
def dense_place(program, rows, heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Sequence, head and first row of a program's tile; with LAST_FIRST the longest tiles of a causal call start."""
    tiles = tl.cdiv(rows, BLOCK)
    tile = program % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return program // tiles // heads, program // tiles % heads, tile * BLOCK


@jit
def packed_lengths(cu_seqlens_q, cu_seqlens_k, sequence):
    """Start and length of a packed sequence's queries, and of its keys."""
    start_q = tl.load(cu_seqlens_q + sequence)
    start_k = tl.load(cu_seqlens_k + sequence)
    return (
        start_q,
        tl.load(cu_seqlens_q + sequence + 1) - start_q,
        start_k,
        tl.load(cu_seqlens_k + sequence + 1) - start_k,
    )


@jit
def row_start(pointer, sequence, head, start, stride_b, stride_s, stride_h):
    """Pointer to the first row of a sequence and head; `start` is the sequence's first row when packed, else 0."""
    offset = tl.cast(sequence, tl.int64) * stride_b + tl.cast(start, tl.int64) * stride_s
    return pointer + offset + tl.cast(head, tl.int64) * stride_h


@jit
def per_row_start(sequence, head, start, heads, rows, PACKED: tl.constexpr):
    """Where the numbers of a sequence's rows begin in (batch, heads, rows), or packed in (heads, rows)."""
    before = tl.cast(head, tl.int64) if PACKED else tl.cast(sequence, tl.int64) * heads + head
    return before * rows + start


@jit
def load_rows(
    pointer, first, stride, kept, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Rows `first` to `first + BLOCK` of (rows, HEAD_DIM); 0 in columns from HEAD_DIM on and where not `kept`."""
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = pointer + tl.cast(first, tl.int64) * stride + (tl.arange(0, BLOCK)[:, None] * stride + column)
    if MASKED:
        inside = kept[:, None]
        if HEAD_DIM != BLOCK_D:
            inside = inside & (column < HEAD_DIM)
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        tile = tl.load(pointers, mask=column < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@jit
def store_rows(pointer, first, stride, kept, tile, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store what `load_rows` would load, rounded."""
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = pointer + tl.cast(first, tl.int64) * stride + (tl.arange(0, BLOCK)[:, None] * stride + column)
    tl.store(pointers, rounded(tile, pointer.dtype.element_ty), mask=kept[:, None] & (column < HEAD_DIM))


# ---------------------------------------------------------------- which tiles


@jit
def sections(
    first, last, length, low, high, reach, BLOCK: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    HAS_DISTANCE: tl.constexpr,
):  # fmt: skip
    """Cuts the positions y < length that a block of positions first <= x <= last visits, where -low <= y - x <= high.

    Returns six ascending bounds, all but the last multiples of BLOCK: edge tiles from the 1st to the 2nd (the window's
    low side), plain tiles to the 3rd (y - x <= -reach), edge tiles to the 4th, plain tiles to the 5th (y - x >= reach),
    edge tiles to the 6th. Without a distance bias the 2nd, 3rd and 4th are equal.
    """
    begin = 0
    plain_begin = 0
    stop = length
    plain_stop = length // BLOCK * BLOCK
    if HAS_HIGH:
        stop = tl.minimum(stop, last + high + 1)
        plain_stop = tl.minimum(plain_stop, tl.maximum(first + high + 1, 0) // BLOCK * BLOCK)
    if HAS_LOW:
        begin = tl.maximum(first - low, 0) // BLOCK * BLOCK
        plain_begin = tl.cdiv(tl.maximum(last - low, 0), BLOCK) * BLOCK
        plain_begin = tl.minimum(plain_begin, tl.cdiv(tl.maximum(stop, 0), BLOCK) * BLOCK)
    plain_stop = tl.maximum(plain_stop, plain_begin)
    far_low_stop = plain_begin
    far_high_begin = plain_begin
    if HAS_DISTANCE:
        far_low_stop = tl.maximum(first - reach + 1, 0) // BLOCK * BLOCK
        far_low_stop = tl.minimum(tl.maximum(far_low_stop, plain_begin), plain_stop)
        far_high_begin = tl.cdiv(tl.maximum(last + reach, 0), BLOCK) * BLOCK
        far_high_begin = tl.minimum(tl.maximum(far_high_begin, far_low_stop), plain_stop)
    return begin, plain_begin, far_low_stop, far_high_begin, plain_stop, stop


@jit
def section_tiles(section, bounds):
    """Where a section's plain tiles begin and end, and its edge tiles, which follow; 0 is the window's, 1 low, 2 high.

    The begin is chosen here, not carried from section to section: Triton 3.6 loses such a carried bound of a loop.
    """
    begin, plain_begin, far_low_stop, far_high_begin, plain_stop, stop = bounds
    plain_start = tl.where(section == 0, begin, tl.where(section == 1, plain_begin, far_high_begin))
    plain_end = tl.where(section == 0, begin, tl.where(section == 1, far_low_stop, plain_stop))
    edge_end = tl.where(section == 0, plain_begin, tl.where(section == 1, far_high_begin, stop))
    return plain_start, plain_end, edge_end


# ---------------------------------------------------------------- one tile


@jit
def keys_taking_part(padding_pointer, key, keys, first_seen, EDGE: tl.constexpr, HAS_PADDING: tl.constexpr):
    """Whether a key exists, is seen by some query and is no padding; the other rows of K and V are read as 0."""
    part = key >= 0
    if EDGE:
        part = part & (key >= first_seen) & (key < keys)
    if HAS_PADDING:
        part = part & (tl.load(padding_pointer + key, mask=part, other=0) != 0)
    return part


@jit
def pair_distances(query, key, offset, like):
    """How far apart query and key are, |key - query - offset|, in the dtype of `like`; exact below 2^24 tokens.

    The places are converted before they are broadcast: a conversion per row and column, not one per pair.
    """
    return tl.abs(key.to(like.dtype) - (query + offset).to(like.dtype))


@jit
def exponents(
    product, query, key, part, queries, keys, offset, left, right, scale, softcap, far_bias, alibi_slope,
    bias_pointer, stride_bias_q, stride_bias_k, distance_pointer, reach,
    EDGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """Exponents of a tile from its products q k, -inf where hidden, and the slope of the softcap.

    `query`, `key` and `part` are shaped to broadcast to the tile, whichever of them its rows are. `alibi_slope` is that
    of the head times log2(e).
    """
    slope = 1.0
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which needs no library call and ends at -1 and 1
        tanh = 1.0 - 2.0 / (tl.exp2(product * (scale / softcap * 2.0 * LOG2E)) + 1.0)
        exponent = tanh * (softcap * LOG2E)
        slope = 1.0 - tanh * tanh
    else:
        exponent = product * (scale * LOG2E)
    if HAS_BIAS:
        pointers = bias_pointer + query.to(tl.int64) * stride_bias_q + key.to(tl.int64) * stride_bias_k
        bias = tl.load(pointers, mask=(query < queries) & (key >= 0) & (key < keys), other=0.0)
        exponent = exponent + bias.to(exponent.dtype) * LOG2E
    distance = key - query - offset
    if HAS_DISTANCE:
        if EDGE:
            clipped = tl.minimum(tl.maximum(distance, -reach), reach)
            exponent = exponent + tl.load(distance_pointer + reach + clipped) * LOG2E
        else:
            exponent = exponent + far_bias * LOG2E
    if HAS_SLOPE:
        exponent = exponent - alibi_slope * pair_distances(query, key, offset, exponent)
    if EDGE or HAS_PADDING:
        visible = part
        if EDGE and HAS_LEFT:
            visible = visible & (distance >= -left)
        if EDGE and HAS_RIGHT:
            visible = visible & (distance <= right)
        exponent = tl.where(visible, exponent, float("-inf"))
    return exponent, slope


@jit
def dropout_kept(seed, first_counter, query, key, max_keys, threshold):
    """Which weights of a tile dropout keeps; `first_counter` is that of the sequence's and head's first weight."""
    return kept_by_dropout(seed, first_counter + query.to(tl.int64) * max_keys + key, threshold)


@jit
def first_dropout_counter(rng_pointer, sequence, head, heads, max_queries, max_keys):
    """Counter of a head's first weight, see `dropout.py`."""
    return (tl.cast(sequence, tl.int64) * heads + head) * max_queries * max_keys + tl.load(rng_pointer + 1)


@jit
def score_gradients(
    exponent, slope, value_product, lse, delta, seed, first_counter, query, key, max_keys, threshold, keep_scale,
    HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Weights after dropout, gradient of the biased scores, and of the scores before the softcap.

    `value_product` is dO v^T; `lse` (base 2) and `delta`, per query, broadcast to the tile.
    """
    weight = tl.exp2(exponent - lse)
    dropped = weight
    if HAS_DROPOUT:
        kept = dropout_kept(seed, first_counter, query, key, max_keys, threshold)
        dropped = tl.where(kept, weight * keep_scale, 0.0)
        value_product = tl.where(kept, value_product * keep_scale, 0.0)
    gradient = weight * (value_product - delta)
    before_cap = gradient
    if HAS_SOFTCAP:
        before_cap = gradient * slope
    return dropped, gradient, before_cap


@jit
def load_lse(pointer, row, inside):
    """Log-sum-exp of the rows in base 2; +inf, which makes each weight 0, where there is no key or no row."""
    lse = tl.load(pointer + row, mask=inside, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
