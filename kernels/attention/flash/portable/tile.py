"""Device functions shared by forward and backward kernels: tile iteration, loads and stores, scores of one tile.

Terms: query i and key j have the distance d = j - (i + offset) with offset = keys - queries, so that both sequences end
at the same token. A query sees the keys with -left <= d <= right. An "edge" tile needs masking or a lookup per element;
in a "plain" tile every pair is visible and the distance bias is constant, so neither is needed. Exponents are in base
2: a score times log2(e).
"""

from __future__ import annotations

from ....launch import INTERPRETED, constant, jit, rounded, tl
from ...dropout import head_dropout_key, tile_keep_mask

INTERPRET = constant(INTERPRETED)
LOG2E = constant(1.4426950408889634)
LN2 = constant(0.6931471805599453)


# ---------------------------------------------------------------- arithmetic


@jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """Return accumulator + a @ b. The interpreter does not support bf16 products, so both are upcast there."""
    if INTERPRET:
        wide = tl.dot(a.to(accumulator.dtype), b.to(accumulator.dtype), out_dtype=accumulator.dtype)
        accumulator = accumulator + wide
    else:
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
    return accumulator


# ---------------------------------------------------------------- indices and memory


@jit
def dense_tile(program, rows, heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Return sequence, head and first row of a program's tile; LAST_FIRST starts the longest causal tiles first."""
    tiles = tl.cdiv(rows, BLOCK)
    tile = program % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return program // tiles // heads, program // tiles % heads, tile * BLOCK


@jit
def locate_tile(
    program, head, tile, tiles_pointer, cu_seqlens_q, cu_seqlens_k, rows, heads, max_queries, max_keys,
    BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return sequence, head and first row of a tile, then start and length of its queries, and of its keys.

    Packed: tile `tile` of the tile list (see `tile_list`), of `head`. Dense: the tile of `program`, see `dense_tile`.
    """
    if PACKED:
        sequence = tl.load(tiles_pointer + 2 + 2 * tile)
        first = tl.load(tiles_pointer + 3 + 2 * tile)
        start_q = tl.load(cu_seqlens_q + sequence)
        start_k = tl.load(cu_seqlens_k + sequence)
        queries = tl.load(cu_seqlens_q + sequence + 1) - start_q
        keys = tl.load(cu_seqlens_k + sequence + 1) - start_k
    else:
        sequence, head, first = dense_tile(program, rows, heads, BLOCK, LAST_FIRST)
        start_q, queries, start_k, keys = 0, max_queries, 0, max_keys
    return sequence, head, first, start_q, queries, start_k, keys


@jit
def head_terms(
    bias_pointer, distance_pointer, slopes_pointer, rng_pointer, sequence, head,
    stride_bias_b, stride_bias_h, reach,
    HAS_BIAS: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return what the scores of a sequence and head depend on besides their products; 0 where there is none.

    Pointers to its dense bias and to its distance bias; the distance bias at -reach and at reach; its slope times
    log2(e); key and first places of its dropout mask, see `head_dropout_key`.
    """
    bias_base, distance_base, far_low, far_high, alibi_slope, dropout_key, dropout_first = 0, 0, 0.0, 0.0, 0.0, 0, 0
    if HAS_BIAS:
        bias_base = row_pointer(bias_pointer, sequence, head, 0, stride_bias_b, 0, stride_bias_h)
    if HAS_DISTANCE:
        distance_base = distance_pointer + head * (2 * reach + 1)
        far_low, far_high = tl.load(distance_base), tl.load(distance_base + 2 * reach)
    if HAS_SLOPE:
        alibi_slope = tl.load(slopes_pointer + head) * LOG2E
    if HAS_DROPOUT:
        dropout_key, dropout_first = head_dropout_key(rng_pointer, sequence, head)
    return bias_base, distance_base, far_low, far_high, alibi_slope, dropout_key, dropout_first


@jit
def row_pointer(pointer, sequence, head, start, stride_b, stride_s, stride_h):
    """Return the pointer to the first row of a sequence and head; `start` is its first row if packed, else 0."""
    offset = tl.cast(sequence, tl.int64) * stride_b + tl.cast(start, tl.int64) * stride_s
    return pointer + offset + tl.cast(head, tl.int64) * stride_h


@jit
def per_row_offset(sequence, head, start, heads, rows, PACKED: tl.constexpr):
    """Return the offset of a sequence's first row in a tensor (batch, heads, rows), or packed (heads, rows)."""
    leading = tl.cast(head, tl.int64) if PACKED else tl.cast(sequence, tl.int64) * heads + head
    return leading * rows + start


@jit
def load_rows(
    pointer, first, stride, kept, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load rows `first` to `first + BLOCK` of (rows, HEAD_DIM); 0 in columns from HEAD_DIM on and where not `kept`."""
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
    """Store a tile, rounded, to the elements that `load_rows` loads."""
    column = tl.arange(0, BLOCK_D)[None, :]
    pointers = pointer + tl.cast(first, tl.int64) * stride + (tl.arange(0, BLOCK)[:, None] * stride + column)
    tl.store(pointers, rounded(tile, pointer.dtype.element_ty), mask=kept[:, None] & (column < HEAD_DIM))


# ---------------------------------------------------------------- tile iteration


@jit
def keys_before(position, left, chunk, HAS_CHUNK: tl.constexpr):
    """Return how many keys before its own a query at `position` sees: `left`, or those since its chunk began."""
    if HAS_CHUNK:
        left = tl.minimum(left, tl.maximum(position, 0) % chunk)
    return left


@jit
def queries_after(position, left, chunk, HAS_CHUNK: tl.constexpr):
    """Return how many queries after its own see a key at `position`: `left`, or those until its chunk ends."""
    if HAS_CHUNK:
        left = tl.minimum(left, chunk - 1 - position % chunk)
    return left


@jit
def tile_sections(
    first, last, length, low_first, low_last, high_first, high_last, reach,
    BLOCK: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr, HAS_DISTANCE: tl.constexpr,
):  # fmt: skip
    """Divide the positions y < length with -low <= y - x <= high, for first <= x <= last, into edge and plain tiles.

    low and high are given for the first and the last x; x - low and x + high do not decrease between.
    Returns six ascending bounds, all but the last multiples of BLOCK: edge tiles from the 1st to the 2nd (low side of
    the window), plain tiles to the 3rd (y - x <= -reach), edge tiles to the 4th, plain tiles to the 5th
    (y - x >= reach), edge tiles to the 6th. Without a distance bias the 2nd, 3rd and 4th are equal.
    """
    begin = 0
    plain_begin = 0
    stop = length
    plain_stop = length // BLOCK * BLOCK
    if HAS_HIGH:
        stop = tl.minimum(stop, last + high_last + 1)
        plain_stop = tl.minimum(plain_stop, tl.maximum(first + high_first + 1, 0) // BLOCK * BLOCK)
    if HAS_LOW:
        begin = tl.maximum(first - low_first, 0) // BLOCK * BLOCK
        plain_begin = tl.cdiv(tl.maximum(last - low_last, 0), BLOCK) * BLOCK
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
def section_bounds(section, bounds):
    """Return begin and end of a section's plain tiles, and the end of its edge tiles, which follow.

    Sections: 0 low side of the window, 1 distances <= -reach, 2 distances >= reach. The begin is selected here instead
    of carried from section to section, because Triton 3.6 miscompiles a loop bound carried that way.
    """
    begin, plain_begin, far_low_stop, far_high_begin, plain_stop, stop = bounds
    plain_start = tl.where(section == 0, begin, tl.where(section == 1, plain_begin, far_high_begin))
    plain_end = tl.where(section == 0, begin, tl.where(section == 1, far_low_stop, plain_stop))
    edge_end = tl.where(section == 0, plain_begin, tl.where(section == 1, far_high_begin, stop))
    return plain_start, plain_end, edge_end


# ---------------------------------------------------------------- one tile


@jit
def valid_keys(padding_pointer, key, keys, first_seen, EDGE: tl.constexpr, HAS_PADDING: tl.constexpr):
    """Return True for keys that exist, are visible to some query and are not padding; other rows of K, V load as 0."""
    key_mask = key >= 0
    if EDGE:
        key_mask = key_mask & (key >= first_seen) & (key < keys)
    if HAS_PADDING:
        key_mask = key_mask & (tl.load(padding_pointer + key, mask=key_mask, other=0) != 0)
    return key_mask


@jit
def absolute_distances(query, key, offset, like):
    """Return |key - query - offset| in the dtype of `like`; exact below 2^24 tokens.

    Positions are converted before broadcasting: one conversion per row and column instead of one per pair.
    """
    return tl.abs(key.to(like.dtype) - (query + offset).to(like.dtype))


@jit
def score_exponents(
    product, query, key, key_mask, queries, keys, offset, left, right, chunk, scale, softcap, far_bias, alibi_slope,
    bias_pointer, stride_bias_q, stride_bias_k, distance_pointer, reach,
    EDGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr,
    HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """Return the exponents of a tile from its products q k^T, -inf where masked, and the derivative of the softcap.

    `query`, `key` and `key_mask` are broadcastable to the tile, (queries, keys) or (keys, queries). `alibi_slope` is
    the slope of the head times log2(e).
    """
    slope = 1.0
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1) needs no library call and saturates at -1 and 1 without overflow
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
        exponent = exponent - alibi_slope * absolute_distances(query, key, offset, exponent)
    if EDGE or HAS_PADDING:
        visible = key_mask
        if EDGE and HAS_LEFT:
            visible = visible & (distance >= -keys_before(query + offset, left, chunk, HAS_CHUNK))
        if EDGE and HAS_RIGHT:
            visible = visible & (distance <= right)
        exponent = tl.where(visible, exponent, float("-inf"))
    return exponent, slope


@jit
def score_gradients(
    exponent, slope, value_product, lse, delta, dropout_key, dropout_first, query, key, threshold, keep_scale,
    HAS_SOFTCAP: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return the weights, those after dropout, the gradient of the biased scores, and that before the softcap.

    `value_product` is dO v^T; `lse` (base 2) and `delta`, per query, are broadcastable to the tile.
    """
    weight = tl.exp2(exponent - lse)
    dropped = weight
    if HAS_DROPOUT:
        kept = tile_keep_mask(dropout_key, dropout_first, query, key, threshold)
        dropped = tl.where(kept, weight * keep_scale, 0.0)
        value_product = tl.where(kept, value_product * keep_scale, 0.0)
    gradient = weight * (value_product - delta)
    before_cap = gradient
    if HAS_SOFTCAP:
        before_cap = gradient * slope
    return weight, dropped, gradient, before_cap


@jit
def load_lse(pointer, row, inside):
    """Load the log-sum-exp of rows in base 2; +inf, which makes all weights 0, for masked or missing rows."""
    lse = tl.load(pointer + row, mask=inside, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
