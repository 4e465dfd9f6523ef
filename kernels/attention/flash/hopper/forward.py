"""Flash attention forward kernel for Hopper, after FlashAttention-3 (Shah et al., arXiv 2407.08608).

Persistent grid; one producer warp group loads by TMA, two or three consumers compute 64 queries each. The scores of the
next tile of keys are issued before waiting for the output of the last one, so that tensor cores and softmax overlap.
"""

# Gluon functions are compiled by Triton, and type checkers cannot follow them:
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unsupported-operation]

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
    add_bias,
    far_bias,
    load_begins,
    load_slope,
    mask_scores,
    num_earlier_tiles,
    num_key_tiles,
    num_unmasked_tiles,
    row_slope_terms,
)


@jit
def _produce(
    q_descriptor, k_descriptor, v_descriptor, queries_ring, keys_ring, values_ring,
    begins_pointer, order_pointer, order_width, heads, heads_per_group, offset, keys,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, DOCUMENTS: gl.constexpr,
):  # fmt: skip
    """Load the queries of all consumers, and the tiles of keys and values from the last to the first."""
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        row, pair = next_tile(order_pointer, order_width, iteration)
        head, sequence = pair % heads, pair // heads
        group = head // heads_per_group
        num_tiles = num_key_tiles(row, offset, keys, CONSUMERS * BLOCK_M, BLOCK_N, CAUSAL)
        earlier = num_earlier_tiles(begins_pointer, row * CONSUMERS * BLOCK_M, num_tiles, BLOCK_N, DOCUMENTS)
        for i in range(num_tiles - earlier):
            coordinates = [sequence, (num_tiles - 1 - i) * BLOCK_N, group, 0]
            tma_load(keys_ring, step, k_descriptor, coordinates, BLOCK_N * HEAD_DIM * 2, STAGES)
            if i == 0:
                for w in gl.static_range(CONSUMERS):
                    mbarrier.wait(queries_ring[2].index(w), (iteration & 1) ^ 1)
                    mbarrier.expect(queries_ring[1].index(w), BLOCK_M * HEAD_DIM * 2)
                    q_coordinates = [sequence, (CONSUMERS * row + w) * BLOCK_M, head, 0]
                    load_tile(q_descriptor, q_coordinates, queries_ring[1].index(w), queries_ring[0].index(w))
            tma_load(values_ring, step, v_descriptor, coordinates, BLOCK_N * HEAD_DIM * 2, STAGES)
            step += 1


@jit
def _consume(
    out_descriptor, lse_pointer, distance_pointer, slopes_pointer, sinks_pointer, queries_ring, keys_ring, values_ring,
    outs, begins_pointer, order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
    W: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr, HAS_SINK: gl.constexpr,
    DOCUMENTS: gl.constexpr, SEPARATE_OUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Consumer W: compute output and log-sum-exp of its BLOCK_M rows of each tile."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    out_rows_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_layout)
    q = queries_ring[0].index(W).reshape([BLOCK_M, HEAD_DIM])
    out_buffer = outs.index(W)
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        row, pair = next_tile(order_pointer, order_width, iteration)
        num_tiles = num_key_tiles(row, offset, keys, CONSUMERS * BLOCK_M, BLOCK_N, CAUSAL)
        first = (row * CONSUMERS + W) * BLOCK_M
        unmasked = num_unmasked_tiles(first, offset, keys, BLOCK_N, CAUSAL)
        earlier = num_earlier_tiles(begins_pointer, row * CONSUMERS * BLOCK_M, num_tiles, BLOCK_N, DOCUMENTS)
        begins, last_begin = load_begins(begins_pointer, first, queries, BLOCK_M, rows_layout, DOCUMENTS)
        distance_table = distance_pointer
        if HAS_DISTANCE:
            distance_table = distance_pointer + 2 * (pair % heads * (2 * extent + 1) + extent)
        far = far_bias(distance_table, extent, scale, HAS_DISTANCE)
        slope = load_slope(slopes_pointer, pair % heads, scale, HAS_SLOPE)
        maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, rows_layout)
        total = gl.zeros([BLOCK_M], gl.float32, rows_layout)
        out = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, out_layout)

        mbarrier.wait(queries_ring[1].index(W), iteration & 1)
        wait_full(keys_ring, step, STAGES)
        k = keys_ring[0].index(step % STAGES).reshape([BLOCK_N, HEAD_DIM])
        pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[pending])
        release(keys_ring, step, STAGES)
        start = (num_tiles - 1) * BLOCK_N
        s, shift = add_bias(
            s, distance_table, far, slope, start, first, offset, reach, scale, CAUSAL, HAS_DISTANCE, HAS_SLOPE
        )
        s = mask_scores(s, start, first, offset, keys, begins, CAUSAL, DOCUMENTS)
        maximum = gl.max(s, 1) * scale + shift
        # -inf until the first visible key, and -inf - -inf would be NaN
        safe = gl.where(maximum == float("-inf"), 0.0, maximum) - shift
        weight = gl.exp2(s * scale - gl.expand_dims(safe, 1))
        total = gl.sum(weight, 1)
        p = gl.convert_layout(weight.to(dtype), weights_layout)
        for i in range(1, num_tiles - earlier):
            previous = step
            step += 1
            wait_full(keys_ring, step, STAGES)
            k = keys_ring[0].index(step % STAGES).reshape([BLOCK_N, HEAD_DIM])
            pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            wait_full(values_ring, previous, STAGES)
            v = values_ring[0].index(previous % STAGES).reshape([BLOCK_N, HEAD_DIM])
            pending_out = warpgroup_mma(p, v, out, is_async=True)
            s = warpgroup_mma_wait(1, deps=[pending])
            release(keys_ring, step, STAGES)
            start = (num_tiles - 1 - i) * BLOCK_N
            s, shift = add_bias(
                s, distance_table, far, slope, start, first, offset, reach, scale, CAUSAL, HAS_DISTANCE, HAS_SLOPE
            )
            is_edge = num_tiles - 1 - i >= unmasked
            if DOCUMENTS:
                is_edge = is_edge | (start < last_begin)
            if is_edge:
                s = mask_scores(s, start, first, offset, keys, begins, CAUSAL, DOCUMENTS)
            new_maximum = gl.maximum(maximum, gl.max(s, 1) * scale + shift)
            safe = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            rescale = gl.exp2(maximum - safe)
            safe = safe - shift
            weight = gl.exp2(s * scale - gl.expand_dims(safe, 1))
            total = total * rescale + gl.sum(weight, 1)
            maximum = new_maximum
            out = warpgroup_mma_wait(0, deps=[pending_out])
            release(values_ring, previous, STAGES)
            out = out * gl.expand_dims(gl.convert_layout(rescale, out_rows_layout), 1)
            p = gl.convert_layout(weight.to(dtype), weights_layout)
        if SEPARATE_OUT:
            mbarrier.arrive(queries_ring[2].index(W), count=1)
        wait_full(values_ring, step, STAGES)
        v = values_ring[0].index(step % STAGES).reshape([BLOCK_N, HEAD_DIM])
        pending_out = warpgroup_mma(p, v, out, is_async=True)
        # a row with keys, but without weight, is beyond what fp32 exponents hold (scores of 1e9): NaN, not 0
        total = gl.where((total == 0.0) & (maximum > float("-inf")), float("nan"), total)
        weight_of_keys = 1.0
        if HAS_SINK:  # one more key, with value 0
            sink = gl.load(sinks_pointer + pair % heads) * 1.4426950408889634
            with_sink = gl.maximum(maximum, sink)
            safe = gl.where(with_sink == float("-inf"), 0.0, with_sink)
            weight_of_keys = gl.exp2(maximum - safe)
            total = total * weight_of_keys + gl.exp2(sink - safe)
            maximum = with_sink
        empty = total == 0.0
        inverse = gl.convert_layout(weight_of_keys / gl.where(empty, 1.0, total), out_rows_layout)
        query = first + gl.arange(0, BLOCK_M, rows_layout)
        lse = maximum + gl.log2(gl.where(empty, 1.0, total))
        lse = (lse - row_slope_terms(lse, slope, scale, CAUSAL, HAS_SLOPE)) * 0.6931471805599453
        lse = gl.where(empty, float("-inf"), lse)
        gl.store(lse_pointer + pair.to(gl.int64) * queries + query, lse, mask=query < queries)
        out = warpgroup_mma_wait(0, deps=[pending_out])
        release(values_ring, step, STAGES)
        step += 1
        tma.store_wait(0)  # wait until the output of the previous tile has left the buffer
        out_buffer.reshape([BLOCK_M, HEAD_DIM]).store((out * gl.expand_dims(inverse, 1)).to(dtype))
        fence_async_shared()
        store_tile(out_descriptor, [pair // heads, first, pair % heads, 0], out_buffer)
        if not SEPARATE_OUT:
            tma.store_wait(0)
            mbarrier.arrive(queries_ring[2].index(W), count=1)
    tma.store_wait(0)


@kernel
def hopper_forward(
    q_descriptor, k_descriptor, v_descriptor, out_descriptor, lse_pointer, distance_pointer, slopes_pointer,
    sinks_pointer, begins_pointer, order_pointer, order_width, heads, heads_per_group, queries, keys, scale, reach,
    extent,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr, HAS_SINK: gl.constexpr,
    DOCUMENTS: gl.constexpr, SEPARATE_OUT: gl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of each tile of CONSUMERS * BLOCK_M queries.

    Descriptors over (batch, rows, heads, HEAD_DIM) with tiles of BLOCK_M or BLOCK_N rows. lse: (batch, heads, queries)
    fp32, natural. distance: the table of `distance.distance_table`. slopes: fp32 (heads,), not with a distance bias.
    sinks: fp32 (heads,), with neither. With DOCUMENTS, for one batch entry of as many queries as keys and CAUSAL, a
    query sees no key before its entry in begins: int32 (queries,), ascending.
    scale: of the scores times log2(e). SEPARATE_OUT: the output has its own shared memory instead of the queries', so
    that the next queries are loaded earlier.
    """
    dtype: gl.constexpr = q_descriptor.dtype
    offset = keys - queries
    layout: gl.constexpr = q_descriptor.layout
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, BLOCK_M, 1, HEAD_DIM], layout)
    outs = q_buffers
    if SEPARATE_OUT:
        outs = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, BLOCK_M, 1, HEAD_DIM], layout)
    queries_ring = make_ring(q_buffers, CONSUMERS, 1)
    keys_ring = make_ring(
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], layout), STAGES, CONSUMERS
    )
    values_ring = make_ring(
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], layout), STAGES, CONSUMERS
    )
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer, sinks_pointer,
                queries_ring, keys_ring, values_ring, outs,
                begins_pointer, order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                0, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, HAS_SINK,
                DOCUMENTS, SEPARATE_OUT, dtype,
            )),
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer, sinks_pointer,
                queries_ring, keys_ring, values_ring, outs,
                begins_pointer, order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                1, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, HAS_SINK,
                DOCUMENTS, SEPARATE_OUT, dtype,
            )),
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer, sinks_pointer,
                queries_ring, keys_ring, values_ring, outs,
                begins_pointer, order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                2, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, HAS_SINK,
                DOCUMENTS, SEPARATE_OUT, dtype,
            )),
            (_produce, (
                q_descriptor, k_descriptor, v_descriptor, queries_ring, keys_ring, values_ring,
                begins_pointer, order_pointer, order_width, heads, heads_per_group, offset, keys,
                CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, DOCUMENTS,
            )),
        ], [4, 4, 4], [160, 160, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer, sinks_pointer,
                queries_ring, keys_ring, values_ring, outs,
                begins_pointer, order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                0, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, HAS_SINK,
                DOCUMENTS, SEPARATE_OUT, dtype,
            )),
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer, sinks_pointer,
                queries_ring, keys_ring, values_ring, outs,
                begins_pointer, order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                1, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, HAS_SINK,
                DOCUMENTS, SEPARATE_OUT, dtype,
            )),
            (_produce, (
                q_descriptor, k_descriptor, v_descriptor, queries_ring, keys_ring, values_ring,
                begins_pointer, order_pointer, order_width, heads, heads_per_group, offset, keys,
                CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, DOCUMENTS,
            )),
        ], [4, 4], [240, 24])  # fmt: skip
