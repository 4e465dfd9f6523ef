"""Gradient of the queries on Hopper: grid and warp groups as in the forward kernel, three products per tile."""

# Gluon functions are compiled by Triton, and type checkers cannot follow them:
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unbound-name, unsupported-operation]

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .persistent_loop import (
    jit,
    kernel,
    load_tile,
    make_ring,
    next_tile,
    num_assigned_tiles,
    release,
    store_tile,
    tma_load,
    wait_full,
)
from .score_tile import (
    LOG2E,
    add_bias,
    far_bias,
    load_begins,
    load_slope,
    mask_scores,
    num_earlier_tiles,
    num_key_tiles,
    num_unmasked_tiles,
    row_slope_terms,
    tile_coordinates,
)


@jit
def _produce(
    q_descriptor, k_descriptor, v_descriptor, do_descriptor, queries_ring, out_gradients, keys_ring, values_ring,
    begins_pointer, order_pointer, order_width, heads, heads_per_group, offset, keys,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr,
    DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Load queries and output gradients of both consumers, and the tiles of keys and values, the last first.

    With one stage the values of a tile come before its keys: consumers need the keys until the end of a step, so that
    their stage is free last.
    """
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        row, pair = next_tile(order_pointer, order_width, iteration)
        head, sequence = pair % heads, pair // heads
        group = head // heads_per_group
        num_tiles = num_key_tiles(row, offset, keys, 2 * BLOCK_M, BLOCK_N, CAUSAL)
        earlier = num_earlier_tiles(begins_pointer, row * 2 * BLOCK_M, num_tiles, BLOCK_N, DOCUMENTS)
        for i in range(num_tiles - earlier):
            coordinates = [sequence, (num_tiles - 1 - i) * BLOCK_N, group, 0]
            if STAGES == 1:
                tma_load(values_ring, step, v_descriptor, coordinates, BLOCK_N * HEAD_DIM * 2, STAGES)
            else:
                tma_load(keys_ring, step, k_descriptor, coordinates, BLOCK_N * HEAD_DIM * 2, STAGES)
            if i == 0:
                for w in gl.static_range(2):
                    full = queries_ring[1].index(w)
                    mbarrier.wait(queries_ring[2].index(w), (iteration & 1) ^ 1)
                    mbarrier.expect(full, 2 * BLOCK_M * HEAD_DIM * 2)
                    q_coordinates = [sequence, (2 * row + w) * BLOCK_M, head, 0]
                    load_tile(q_descriptor, q_coordinates, full, queries_ring[0].index(w))
                    load_tile(do_descriptor, q_coordinates, full, out_gradients.index(w))
            if STAGES == 1:
                tma_load(keys_ring, step, k_descriptor, coordinates, BLOCK_N * HEAD_DIM * 2, STAGES)
            else:
                tma_load(values_ring, step, v_descriptor, coordinates, BLOCK_N * HEAD_DIM * 2, STAGES)
            step += 1


@jit
def _sum_out_times_gradient(
    out_pointer, out_gradient, full, phase, first, pair, heads, queries, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
    rows_layout: gl.constexpr,
):  # fmt: skip
    """Return sum(out * dO) of BLOCK_M rows, once dO is in shared memory; each warp has the rows of its wgmma."""
    layout: gl.constexpr = gl.BlockedLayout(
        [HEAD_DIM // 16, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [BLOCK_M // 16, 1], [1, 0]
    )
    row = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    column = gl.expand_dims(gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout)), 0)
    place = (((pair // heads).to(gl.int64) * queries + row) * heads + pair % heads) * HEAD_DIM
    inside = gl.expand_dims(row < queries, 1)
    out = gl.load(out_pointer + gl.expand_dims(place, 1) + column, mask=inside, other=0.0)
    mbarrier.wait(full, phase)
    product = out.to(gl.float32) * out_gradient.load(layout).to(gl.float32)
    return gl.convert_layout(gl.sum(product, 1), rows_layout)


@jit
def _consume(
    dq_descriptor, out_pointer, lse_pointer, lse_gradient_pointer, base_2_pointer, delta_pointer, distance_pointer,
    slopes_pointer, row_sums_pointer,
    queries_ring, out_gradients, keys_ring, values_ring, outs,
    begins_pointer, order_pointer, order_width, heads, queries, pitch, offset, keys, scale, scale_log2, reach, extent,
    W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr, CORRECT_DELTA: gl.constexpr,
    HAS_LSE_GRADIENT: gl.constexpr, FAR_SUMS: gl.constexpr, SLOPE_SUMS: gl.constexpr, SEPARATE_OUT: gl.constexpr,
    ROW_STATISTICS: gl.constexpr, DOCUMENTS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Consumer W: compute the gradient of its BLOCK_M rows of each tile."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_layout)
    q = queries_ring[0].index(W).reshape([BLOCK_M, HEAD_DIM])
    out_gradient = out_gradients.index(W).reshape([BLOCK_M, HEAD_DIM])
    out_buffer = outs.index(W)
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        row, pair = next_tile(order_pointer, order_width, iteration)
        num_tiles = num_key_tiles(row, offset, keys, 2 * BLOCK_M, BLOCK_N, CAUSAL)
        first = row * 2 * BLOCK_M + W * BLOCK_M
        unmasked = num_unmasked_tiles(first, offset, keys, BLOCK_N, CAUSAL)
        earlier = num_earlier_tiles(begins_pointer, row * 2 * BLOCK_M, num_tiles, BLOCK_N, DOCUMENTS)
        begins, last_begin = load_begins(begins_pointer, first, queries, BLOCK_M, rows_layout, DOCUMENTS)
        distance_table = distance_pointer
        if HAS_DISTANCE:
            distance_table = distance_pointer + 2 * (pair % heads * (2 * extent + 1) + extent)
        far = far_bias(distance_table, extent, scale_log2, HAS_DISTANCE)
        slope = load_slope(slopes_pointer, pair % heads, scale_log2, HAS_SLOPE)
        query = first + gl.arange(0, BLOCK_M, rows_layout)
        inside = query < queries
        place = pair.to(gl.int64) * pitch + query
        if ROW_STATISTICS:
            natural = gl.load(lse_pointer + pair.to(gl.int64) * queries + query, mask=inside, other=float("-inf"))
            seen = natural != float("-inf")
            delta = _sum_out_times_gradient(
                out_pointer, out_gradient, queries_ring[1].index(W), iteration & 1, first, pair, heads, queries,
                BLOCK_M, HEAD_DIM, rows_layout,
            )  # fmt: skip
            if HAS_LSE_GRADIENT:
                delta -= gl.load(lse_gradient_pointer + pair.to(gl.int64) * queries + query, mask=seen, other=0.0)
            delta = gl.where(seen, delta, 0.0)
            lse = gl.where(seen, natural * LOG2E, float("inf"))
            gl.store(base_2_pointer + place, lse, mask=inside)
            if not CORRECT_DELTA:
                gl.store(delta_pointer + place, delta, mask=inside)
        else:
            lse = gl.load(base_2_pointer + place, mask=inside, other=0.0)
            delta = gl.load(delta_pointer + place, mask=inside, other=0.0)
            mbarrier.wait(queries_ring[1].index(W), iteration & 1)
        lse += row_slope_terms(lse, slope, scale_log2, CAUSAL, HAS_SLOPE)
        dq = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, out_layout)
        total = gl.zeros([BLOCK_M], gl.float32, rows_layout)
        row_sum, weight_sum = total, total
        for i in range(num_tiles - earlier):
            k = keys_ring[0].index(step % STAGES).reshape([BLOCK_N, HEAD_DIM])
            v = values_ring[0].index(step % STAGES).reshape([BLOCK_N, HEAD_DIM])
            if STAGES == 1:
                wait_full(values_ring, step, STAGES)
                pending_product = warpgroup_mma(out_gradient, v.permute((1, 0)), zero, use_acc=False, is_async=True)
                wait_full(keys_ring, step, STAGES)
                pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(1, deps=[pending_product])
                release(values_ring, step, STAGES)
                s = warpgroup_mma_wait(0, deps=[pending])
            else:
                wait_full(keys_ring, step, STAGES)
                pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
                wait_full(values_ring, step, STAGES)
                pending_product = warpgroup_mma(out_gradient, v.permute((1, 0)), zero, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=[pending])
            start = (num_tiles - 1 - i) * BLOCK_N
            s, shift = add_bias(
                s, distance_table, far, slope, start, first, offset, reach, scale_log2, CAUSAL, HAS_DISTANCE, HAS_SLOPE
            )
            is_edge = num_tiles - 1 - i >= unmasked
            if DOCUMENTS:
                is_edge = is_edge | (start < last_begin)
            if is_edge:
                s = mask_scores(s, start, first, offset, keys, begins, CAUSAL, DOCUMENTS)
            weight = gl.exp2(s * scale_log2 - gl.expand_dims(lse - shift, 1))
            if STAGES > 1:
                product = warpgroup_mma_wait(0, deps=[pending_product])
                release(values_ring, step, STAGES)
            gradient = weight * (product - gl.expand_dims(delta, 1))
            if CORRECT_DELTA:
                tile_sum = gl.sum(gradient, 1)
                total += tile_sum
            if FAR_SUMS:  # in blocks of 64 keys, since `diagonal_sums.py` sums the other blocks of 64
                lowest = start - (first + BLOCK_M - 1) - offset
                if lowest >= reach:
                    row_sum += tile_sum
                    weight_sum += gl.sum(weight, 1)
                elif lowest + BLOCK_N - 64 >= reach:
                    column = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout)), 0)
                    row_sum += gl.sum(gl.where(column >= BLOCK_N - 64, gradient, 0.0), 1)
                    weight_sum += gl.sum(gl.where(column >= BLOCK_N - 64, weight, 0.0), 1)
            if SLOPE_SUMS:
                tile_row, tile_column = tile_coordinates(gradient)
                distance = tile_column - tile_row + (start - first - offset).to(gl.float32)
                row_sum -= gl.sum(gradient * gl.abs(distance), 1)
                weight_sum -= gl.sum(weight * gl.abs(distance), 1)
            g = gl.convert_layout(gradient.to(dtype), weights_layout)
            pending_dq = warpgroup_mma(g, k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[pending_dq])
            release(keys_ring, step, STAGES)
            step += 1
        if SEPARATE_OUT:
            mbarrier.arrive(queries_ring[2].index(W), count=1)
        if CORRECT_DELTA:
            if HAS_LSE_GRADIENT:
                seen = inside & (lse != float("inf"))
                total -= gl.load(lse_gradient_pointer + pair.to(gl.int64) * queries + query, mask=seen, other=0.0)
            gl.store(delta_pointer + place, delta + total, mask=inside)
        if FAR_SUMS or SLOPE_SUMS:
            row_sum -= total * weight_sum
            gl.store(row_sums_pointer + pair.to(gl.int64) * queries + query, row_sum, mask=inside)
        tma.store_wait(0)  # wait until the gradient of the previous tile has left the buffer
        out_buffer.reshape([BLOCK_M, HEAD_DIM]).store((dq * scale).to(dtype))
        fence_async_shared()
        store_tile(dq_descriptor, [pair // heads, first, pair % heads, 0], out_buffer)
        if not SEPARATE_OUT:
            tma.store_wait(0)
            mbarrier.arrive(queries_ring[2].index(W), count=1)
    tma.store_wait(0)


@kernel
def hopper_dq(
    q_descriptor, k_descriptor, v_descriptor, do_descriptor, dq_descriptor,
    out_pointer, lse_pointer, lse_gradient_pointer, base_2_pointer, delta_pointer, distance_pointer, slopes_pointer,
    row_sums_pointer, begins_pointer, order_pointer, order_width, heads, heads_per_group, queries, pitch, keys, scale,
    scale_log2, reach, extent,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr, CORRECT_DELTA: gl.constexpr,
    HAS_LSE_GRADIENT: gl.constexpr, FAR_SUMS: gl.constexpr, SLOPE_SUMS: gl.constexpr, SEPARATE_OUT: gl.constexpr,
    ROW_STATISTICS: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Compute the gradient of each tile of 2 BLOCK_M queries, with ROW_STATISTICS also what `hopper_delta` computes.

    Descriptors and distance as in `hopper_forward`. out: contiguous (batch, queries, heads, HEAD_DIM). lse, natural,
    and its gradient: fp32 (batch, heads, queries); base_2 and delta: fp32 (batch, heads, pitch). row_sums: fp32 (batch,
    heads, queries); with FAR_SUMS the score gradients of a row, summed over blocks of 64 keys whose distances to the
    row's tile are all >= reach; with SLOPE_SUMS the row's contribution to the gradient of its head's slope. Both need
    CORRECT_DELTA, which corrects delta as `dq_kernel` does. begins: as in `hopper_forward`.
    """
    dtype: gl.constexpr = q_descriptor.dtype
    offset = keys - queries
    layout: gl.constexpr = q_descriptor.layout
    q_buffers = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_M, 1, HEAD_DIM], layout)
    out_gradients = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_M, 1, HEAD_DIM], layout)
    outs = q_buffers
    if SEPARATE_OUT:
        outs = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_M, 1, HEAD_DIM], layout)
    queries_ring = make_ring(q_buffers, 2, 1)
    keys_ring = make_ring(gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], layout), STAGES, 2)
    values_ring = make_ring(gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], layout), STAGES, 2)
    gl.warp_specialize([
        (_consume, (
            dq_descriptor, out_pointer, lse_pointer, lse_gradient_pointer, base_2_pointer, delta_pointer,
            distance_pointer, slopes_pointer, row_sums_pointer,
            queries_ring, out_gradients, keys_ring, values_ring, outs,
            begins_pointer, order_pointer, order_width, heads, queries, pitch, offset, keys, scale, scale_log2, reach,
            extent,
            0, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, CORRECT_DELTA, HAS_LSE_GRADIENT,
            FAR_SUMS, SLOPE_SUMS, SEPARATE_OUT, ROW_STATISTICS, DOCUMENTS, dtype,
        )),
        (_consume, (
            dq_descriptor, out_pointer, lse_pointer, lse_gradient_pointer, base_2_pointer, delta_pointer,
            distance_pointer, slopes_pointer, row_sums_pointer,
            queries_ring, out_gradients, keys_ring, values_ring, outs,
            begins_pointer, order_pointer, order_width, heads, queries, pitch, offset, keys, scale, scale_log2, reach,
            extent,
            1, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, CORRECT_DELTA, HAS_LSE_GRADIENT,
            FAR_SUMS, SLOPE_SUMS, SEPARATE_OUT, ROW_STATISTICS, DOCUMENTS, dtype,
        )),
        (_produce, (
            q_descriptor, k_descriptor, v_descriptor, do_descriptor,
            queries_ring, out_gradients, keys_ring, values_ring,
            begins_pointer, order_pointer, order_width, heads, heads_per_group, offset, keys,
            BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, DOCUMENTS,
        )),
    ], [4, 4], [240, 24])  # fmt: skip
