"""Gradients of keys and values on Hopper: one producer warp group, two consumers of 64 keys each.

Scores are transposed here, (keys, queries), so that the weights are a register operand of wgmma. With head width 256
two accumulators do not fit into one warp group: there one consumer computes dV and the other dK of the same 64 keys,
with the weights of the first through shared memory.
"""

# Gluon functions are compiled by Triton, and type checkers cannot follow them:
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unsupported-operation]

from __future__ import annotations

from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .diagonal_sums import allocate_scratch, clear_scratch, store_diagonals
from .persistent_loop import (
    jit,
    kernel,
    load_tile,
    make_ring,
    next_tile,
    num_assigned_tiles,
    release,
    tma_load,
    wait_full,
)
from .score_tile import add_distance_bias, far_bias, load_slope, row_slope_terms, tile_coordinates

_WEIGHT_STAGES = gl.constexpr(2)


@jit
def _first_query_tile(tile, offset, BLOCK_M: gl.constexpr, BLOCK_KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """Return the first tile of queries that see any key of the tile."""
    first = 0
    if CAUSAL:
        first = gl.maximum(tile * BLOCK_KEYS - offset, 0) // BLOCK_M
    return first


@jit
def _end_of_query_tiles(ends_pointer, tile, query_tiles, keys, BLOCK_M: gl.constexpr, BLOCK_KEYS: gl.constexpr,
    DOCUMENTS: gl.constexpr):  # fmt: skip
    """Return the end of the tiles of queries that see any key of the tile; `ends` is from `row_bounds`."""
    end = query_tiles
    if DOCUMENTS:
        last = gl.load(ends_pointer + gl.minimum((tile + 1) * BLOCK_KEYS, keys) - 1)
        end = (last + BLOCK_M - 1) // BLOCK_M
    return end


@jit
def _produce(
    q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor,
    keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers,
    ends_pointer, order_pointer, order_width, groups, heads_per_group, query_tiles, offset, keys,
    TILES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    KEY_STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Load the keys and values of a tile, and the queries and output gradients that visit it, head by head."""
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        tile, pair = next_tile(order_pointer, order_width, iteration)
        group, sequence = pair % groups, pair // groups
        slot = iteration % KEY_STAGES
        full = keys_ring[1].index(slot)
        mbarrier.wait(keys_ring[2].index(slot), ((iteration // KEY_STAGES) & 1) ^ 1)
        mbarrier.expect(full, 2 * TILES * BLOCK_N * HEAD_DIM * 2)
        for w in gl.static_range(TILES):
            coordinates = [sequence, (tile * TILES + w) * BLOCK_N, group, 0]
            load_tile(k_descriptor, coordinates, full, keys_ring[0].index(slot * TILES + w))
            load_tile(v_descriptor, coordinates, full, values.index(slot * TILES + w))
        first = _first_query_tile(tile, offset, BLOCK_M, TILES * BLOCK_N, CAUSAL)
        end = _end_of_query_tiles(ends_pointer, tile, query_tiles, keys, BLOCK_M, TILES * BLOCK_N, DOCUMENTS)
        for h in range(heads_per_group):
            head = group * heads_per_group + h
            row = sequence * groups * heads_per_group + head
            for i in range(first, end):
                stage = step % STAGES
                coordinates = [sequence, i * BLOCK_M, head, 0]
                tma_load(queries_ring, step, q_descriptor, coordinates, BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4, STAGES)
                load_tile(lse_descriptor, [row, i * BLOCK_M], queries_ring[1].index(stage), lse_buffers.index(stage))
                tma_load(
                    out_gradients_ring, step, do_descriptor, coordinates, BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4, STAGES
                )
                load_tile(
                    delta_descriptor, [row, i * BLOCK_M], out_gradients_ring[1].index(stage), delta_buffers.index(stage)
                )
                step += 1


@jit
def exponents(
    s, lse, distance_table, far, slope, ends, key, query, offset, keys, scale_log2, reach,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Return the exponents (keys, queries) of a tile that starts at `key` and `query`; `far` is from `far_bias`.

    `ends` with DOCUMENTS: the ends of the keys' documents, and that of the first key's.
    """
    layout: gl.constexpr = s.type.layout
    row = gl.expand_dims(gl.arange(0, s.shape[0], gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, layout)), 0)
    shift = 0.0
    if HAS_DISTANCE:
        shift = far[0]
        if key - (query + s.shape[1] - 1) - offset >= reach:
            shift = far[1]
        elif key + s.shape[0] - 1 - query - offset > -reach:
            shift = 0.0
            s = add_distance_bias(s, distance_table + 2 * (key - query - offset), -1)
    if HAS_SLOPE:  # as in `add_bias`
        tile_key, tile_query = tile_coordinates(s)
        gap = (key - query - offset).to(gl.float32)
        if CAUSAL:
            s = s + slope * tile_key
            shift = slope * scale_log2 * gap
            lse += row_slope_terms(lse, slope, scale_log2, CAUSAL, HAS_SLOPE)
        else:
            s = s - slope * gl.abs(tile_key - tile_query + gap)
    # rows beyond the end have a score of 0, whose exponential may overflow
    edge = (key + s.shape[0] > keys) | (query + s.shape[1] > keys - offset)
    if CAUSAL:
        edge = edge | (query + offset < key + s.shape[0])
    if DOCUMENTS:
        edge = edge | (query + s.shape[1] > ends[1])
    if edge:
        hidden = (key + row >= keys) | (query + column >= keys - offset)
        if CAUSAL:
            hidden = hidden | (key + row > query + column + offset)
        if DOCUMENTS:
            hidden = hidden | (query + column >= gl.expand_dims(ends[0], 1))
        s = gl.where(hidden, float("-inf"), s)
    return s * scale_log2 - gl.expand_dims(lse - shift, 0)


@constexpr_function
def _rows_layout(head_dim, width):
    """Layout of 64 rows with `width` (4, 8) consecutive columns in a thread, and the rows of wgmma's sums in a warp.

    The sums have 2 columns in a thread. From there to 4 and from 4 to 8 is an exchange within warps; where more than
    one bit of a column moves at once, Triton goes through shared memory, which these kernels have none left of.
    """
    columns = [[0, 1 << bit] for bit in range(head_dim.bit_length() - 1)]
    in_thread, across = (columns[:2], columns[2:4]) if width == 4 else (columns[:3], columns[4:2:-1])
    others = [column for column in columns if column not in in_thread + across]
    return gl.DistributedLinearLayout(
        reg_bases=[*in_thread, [8, 0], *others],
        lane_bases=[*across, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, head_dim],
    )


@jit
def store_rows(pointer, sums, key, pair, groups, row_heads, keys, HEAD_DIM: gl.constexpr):
    """Store rows to (batch, keys, groups, HEAD_DIM), part of a contiguous tensor (batch, keys, row_heads, HEAD_DIM)."""
    nearer: gl.constexpr = _rows_layout(HEAD_DIM, 4)
    # the second exchange costs wider rows what it gains (H200)
    layout: gl.constexpr = _rows_layout(HEAD_DIM, 8 if HEAD_DIM == 64 else 4)
    values = gl.convert_layout(gl.convert_layout(sums.to(pointer.dtype.element_ty), nearer), layout)
    j = key + gl.expand_dims(gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout)), 0)
    row = (pair // groups * keys + j).to(gl.int64) * row_heads + pair % groups
    gl.store(pointer + row * HEAD_DIM + column, values, mask=j < keys)


@jit
def _consume_both(
    dk_pointer, dv_pointer, distance_pointer, slopes_pointer, diagonals_pointer,
    keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers, scratch,
    ends_pointer, order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys,
    scale, scale_log2, reach, extent, bands, key_blocks,
    W: gl.constexpr, TILES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    KEY_STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr, DIAGONALS: gl.constexpr,
    DOCUMENTS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Consumer W: compute both gradients of its BLOCK_N keys of each tile."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    columns_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores_layout)
    if DIAGONALS:
        clear_scratch(scratch)
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        tile, pair = next_tile(order_pointer, order_width, iteration)
        key = (tile * TILES + W) * BLOCK_N
        k = keys_ring[0].index(iteration % KEY_STAGES * TILES + W).reshape([BLOCK_N, HEAD_DIM])
        v = values.index(iteration % KEY_STAGES * TILES + W).reshape([BLOCK_N, HEAD_DIM])
        dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, sums_layout)
        dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, sums_layout)
        first = _first_query_tile(tile, offset, BLOCK_M, TILES * BLOCK_N, CAUSAL)
        end = _end_of_query_tiles(ends_pointer, tile, query_tiles, keys, BLOCK_M, TILES * BLOCK_N, DOCUMENTS)
        ends = 0
        first_end = 0
        if DOCUMENTS:
            j = key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores_layout))
            ends = gl.load(ends_pointer + j, mask=j < keys, other=0)
            first_end = gl.load(ends_pointer + gl.minimum(key, keys - 1))
        wait_full(keys_ring, iteration, KEY_STAGES)
        for h in range(heads_per_group):
            head = pair % groups * heads_per_group + h
            distance_table = distance_pointer
            if HAS_DISTANCE:
                # second half of the table: columns are queries, along which the distance decreases
                table_row = groups * heads_per_group + head
                distance_table = distance_pointer + 2 * (table_row * (2 * extent + 1) + extent)
            far = far_bias(distance_table, extent, scale_log2, HAS_DISTANCE)
            slope = load_slope(slopes_pointer, head, scale_log2, HAS_SLOPE)
            for i in range(first, end):
                stage = step % STAGES
                q = queries_ring[0].index(stage).reshape([BLOCK_M, HEAD_DIM])
                out_gradient = out_gradients_ring[0].index(stage).reshape([BLOCK_M, HEAD_DIM])
                wait_full(queries_ring, step, STAGES)
                pending = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                wait_full(out_gradients_ring, step, STAGES)
                pending_product = warpgroup_mma(v, out_gradient.permute((1, 0)), zero, use_acc=False, is_async=True)
                lse = lse_buffers.index(stage).reshape([BLOCK_M]).load(columns_layout)
                s = warpgroup_mma_wait(1, deps=[pending])
                weight = gl.exp2(exponents(
                    s, lse, distance_table, far, slope, (ends, first_end), key, i * BLOCK_M, offset, keys, scale_log2,
                    reach, CAUSAL, HAS_DISTANCE, HAS_SLOPE, DOCUMENTS,
                ))  # fmt: skip
                p = gl.convert_layout(weight.to(dtype), weights_layout)
                pending_dv = warpgroup_mma(p, out_gradient, dv, is_async=True)
                delta = delta_buffers.index(stage).reshape([BLOCK_M]).load(columns_layout)
                product = warpgroup_mma_wait(1, deps=[pending_product])
                gradient = weight * (product - gl.expand_dims(delta, 0))
                g = gl.convert_layout(gradient.to(dtype), weights_layout)
                pending_dk = warpgroup_mma(g, q, dk, is_async=True)
                if DIAGONALS:
                    row = pair // groups * groups * heads_per_group + head
                    store_diagonals(
                        gradient, diagonals_pointer, scratch, row, key, i * BLOCK_M, offset,
                        reach, bands, key_blocks,
                    )  # fmt: skip
                dv = warpgroup_mma_wait(1, deps=[pending_dv])
                release(out_gradients_ring, step, STAGES)
                dk = warpgroup_mma_wait(0, deps=[pending_dk])
                release(queries_ring, step, STAGES)
                step += 1
        release(keys_ring, iteration, KEY_STAGES)
        store_rows(dk_pointer, dk * scale, key, pair, groups, row_heads, keys, HEAD_DIM)
        store_rows(dv_pointer, dv, key, pair, groups, row_heads, keys, HEAD_DIM)


@jit
def _consume_values(
    dv_pointer, keys_ring, queries_ring, lse_buffers, out_gradients_ring, weights_ring,
    order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys, scale_log2,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of the values of each tile of keys, and hand on the attention weights in fp32."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    columns_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores_layout)
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        tile, pair = next_tile(order_pointer, order_width, iteration)
        key = tile * BLOCK_N
        k = keys_ring[0].index(iteration % KEY_STAGES).reshape([BLOCK_N, HEAD_DIM])
        dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, sums_layout)
        first = _first_query_tile(tile, offset, BLOCK_M, BLOCK_N, CAUSAL)
        wait_full(keys_ring, iteration, KEY_STAGES)
        for _ in range(heads_per_group):
            for i in range(first, query_tiles):
                stage = step % STAGES
                q = queries_ring[0].index(stage).reshape([BLOCK_M, HEAD_DIM])
                out_gradient = out_gradients_ring[0].index(stage).reshape([BLOCK_M, HEAD_DIM])
                wait_full(queries_ring, step, STAGES)
                pending = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                lse = lse_buffers.index(stage).reshape([BLOCK_M]).load(columns_layout)
                s = warpgroup_mma_wait(0, deps=[pending])
                weight = gl.exp2(exponents(
                    s, lse, lse_buffers, (0.0, 0.0), 0.0, (0, 0), key, i * BLOCK_M, offset, keys, scale_log2, 0,
                    CAUSAL, False, False, False,
                ))  # fmt: skip
                mbarrier.wait(weights_ring[2].index(step % _WEIGHT_STAGES), ((step // _WEIGHT_STAGES) & 1) ^ 1)
                weights_ring[0].index(step % _WEIGHT_STAGES).store(weight)
                mbarrier.arrive(weights_ring[1].index(step % _WEIGHT_STAGES), count=1)
                p = gl.convert_layout(weight.to(dtype), weights_layout)
                wait_full(out_gradients_ring, step, STAGES)
                pending_dv = warpgroup_mma(p, out_gradient, dv, is_async=True)
                dv = warpgroup_mma_wait(0, deps=[pending_dv])
                release(queries_ring, step, STAGES)
                release(out_gradients_ring, step, STAGES)
                step += 1
        release(keys_ring, iteration, KEY_STAGES)
        store_rows(dv_pointer, dv, key, pair, groups, row_heads, keys, HEAD_DIM)


@jit
def _consume_keys(
    dk_pointer, keys_ring, values, queries_ring, out_gradients_ring, delta_buffers, weights_ring,
    order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys, scale,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of the keys of each tile, with the weights of `_consume_values`."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    gradients_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    columns_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores_layout)
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        tile, pair = next_tile(order_pointer, order_width, iteration)
        v = values.index(iteration % KEY_STAGES).reshape([BLOCK_N, HEAD_DIM])
        dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, sums_layout)
        first = _first_query_tile(tile, offset, BLOCK_M, BLOCK_N, CAUSAL)
        wait_full(keys_ring, iteration, KEY_STAGES)
        for _ in range(heads_per_group):
            for _ in range(first, query_tiles):
                stage = step % STAGES
                q = queries_ring[0].index(stage).reshape([BLOCK_M, HEAD_DIM])
                out_gradient = out_gradients_ring[0].index(stage).reshape([BLOCK_M, HEAD_DIM])
                wait_full(out_gradients_ring, step, STAGES)
                pending = warpgroup_mma(v, out_gradient.permute((1, 0)), zero, use_acc=False, is_async=True)
                delta = delta_buffers.index(stage).reshape([BLOCK_M]).load(columns_layout)
                product = warpgroup_mma_wait(0, deps=[pending])
                wait_full(weights_ring, step, _WEIGHT_STAGES)
                weight = weights_ring[0].index(step % _WEIGHT_STAGES).load(scores_layout)
                release(weights_ring, step, _WEIGHT_STAGES)
                gradient = weight * (product - gl.expand_dims(delta, 0))
                g = gl.convert_layout(gradient.to(dtype), gradients_layout)
                wait_full(queries_ring, step, STAGES)
                pending_dk = warpgroup_mma(g, q, dk, is_async=True)
                dk = warpgroup_mma_wait(0, deps=[pending_dk])
                release(queries_ring, step, STAGES)
                release(out_gradients_ring, step, STAGES)
                step += 1
        release(keys_ring, iteration, KEY_STAGES)
        store_rows(dk_pointer, dk * scale, tile * BLOCK_N, pair, groups, row_heads, keys, HEAD_DIM)


@kernel
def hopper_dkdv(
    q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor,
    dk_pointer, dv_pointer, distance_pointer, slopes_pointer, diagonals_pointer,
    ends_pointer, order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, queries, keys,
    scale, scale_log2, reach, extent, bands, key_blocks,
    TILES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    KEY_STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr, DIAGONALS: gl.constexpr,
    DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of each tile of TILES * BLOCK_N keys and values, summed over the group's heads in order.

    Descriptors over (batch, rows, heads, HEAD_DIM); of lse (base 2, +inf in fully masked rows) and delta over (batch *
    heads, queries) fp32. dk, dv: (batch, keys, groups, HEAD_DIM), see `store_rows`. diagonals (DIAGONALS): see
    `store_diagonals`. Distance and slopes as in `hopper_forward`. With DOCUMENTS, as there and up to 128 columns, a key
    is seen by no query from its entry in ends on: int32 (keys,), ascending.
    """
    dtype: gl.constexpr = q_descriptor.dtype
    layout: gl.constexpr = q_descriptor.layout
    row_layout: gl.constexpr = lse_descriptor.layout
    offset = keys - queries
    # up to head width 128 each consumer has its own tile of keys; beyond, both share one
    READERS: gl.constexpr = TILES if HEAD_DIM <= 128 else 2
    keys_ring = make_ring(
        gl.allocate_shared_memory(dtype, [KEY_STAGES * TILES, 1, BLOCK_N, 1, HEAD_DIM], layout), KEY_STAGES, READERS
    )
    values = gl.allocate_shared_memory(dtype, [KEY_STAGES * TILES, 1, BLOCK_N, 1, HEAD_DIM], layout)
    queries_ring = make_ring(
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], layout), STAGES, READERS
    )
    out_gradients_ring = make_ring(
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], layout), STAGES, READERS
    )
    lse_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], row_layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], row_layout)
    scratch, other_scratch = values, values
    if DIAGONALS:
        scratch, other_scratch = allocate_scratch(), allocate_scratch()
    if HEAD_DIM > 128:
        weights_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
        weights = gl.allocate_shared_memory(gl.float32, [_WEIGHT_STAGES, BLOCK_N, BLOCK_M], weights_layout)
        weights_ring = make_ring(weights, _WEIGHT_STAGES, 1)
        gl.warp_specialize([
            (_consume_values, (
                dv_pointer, keys_ring, queries_ring, lse_buffers, out_gradients_ring, weights_ring,
                order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys, scale_log2,
                BLOCK_M, BLOCK_N, STAGES, KEY_STAGES, HEAD_DIM, CAUSAL, dtype,
            )),
            (_consume_keys, (
                dk_pointer, keys_ring, values, queries_ring, out_gradients_ring, delta_buffers, weights_ring,
                order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys, scale,
                BLOCK_M, BLOCK_N, STAGES, KEY_STAGES, HEAD_DIM, CAUSAL, dtype,
            )),
            (_produce, (
                q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor,
                keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers,
                ends_pointer, order_pointer, order_width, groups, heads_per_group, query_tiles, offset, keys,
                TILES, BLOCK_M, BLOCK_N, STAGES, KEY_STAGES, HEAD_DIM, CAUSAL, DOCUMENTS,
            )),
        ], [4, 4], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume_both, (
                dk_pointer, dv_pointer, distance_pointer, slopes_pointer, diagonals_pointer,
                keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers, scratch,
                ends_pointer, order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys,
                scale, scale_log2, reach, extent, bands, key_blocks,
                0, TILES, BLOCK_M, BLOCK_N, STAGES, KEY_STAGES, HEAD_DIM, CAUSAL,
                HAS_DISTANCE, HAS_SLOPE, DIAGONALS, DOCUMENTS, dtype,
            )),
            (_consume_both, (
                dk_pointer, dv_pointer, distance_pointer, slopes_pointer, diagonals_pointer,
                keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers, other_scratch,
                ends_pointer, order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys,
                scale, scale_log2, reach, extent, bands, key_blocks,
                1, TILES, BLOCK_M, BLOCK_N, STAGES, KEY_STAGES, HEAD_DIM, CAUSAL,
                HAS_DISTANCE, HAS_SLOPE, DIAGONALS, DOCUMENTS, dtype,
            )),
            (_produce, (
                q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor,
                keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers,
                ends_pointer, order_pointer, order_width, groups, heads_per_group, query_tiles, offset, keys,
                TILES, BLOCK_M, BLOCK_N, STAGES, KEY_STAGES, HEAD_DIM, CAUSAL, DOCUMENTS,
            )),
        ], [4, 4], [240, 24])  # fmt: skip
