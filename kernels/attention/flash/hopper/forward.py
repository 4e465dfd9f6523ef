"""The forward kernel of flash attention on Hopper, after FlashAttention-3 (Shah et al., arXiv 2407.08608).

A persistent grid. One warp group loads by TMA, two or three compute, 64 queries each: the scores of the next tile of
keys are issued before the output of the last one is awaited, so that the tensor cores work while the softmax is
computed.
"""

# Gluon compiles these functions, and its language is typed for itself:
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .persistent_loop import fill, jit, kernel, load_tile, release, ring, store_tile, turn_of, turns_of, wait_full
from .score_tile import biased, far_shifts, hidden_scores, key_tiles, row_slopes, slope_of_head, tiles_without_mask


@jit
def _produce(
    q_descriptor, k_descriptor, v_descriptor, queries_ring, keys_ring, values_ring,
    order_pointer, order_width, heads, heads_per_group, offset, keys,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Load the queries of all consumers, and the tiles of keys and values from the last to the first."""
    step = 0
    for turn in range(turns_of(order_pointer, order_width)):
        row, pair = turn_of(order_pointer, order_width, turn)
        head, sequence = pair % heads, pair // heads
        group = head // heads_per_group
        number = key_tiles(row, offset, keys, CONSUMERS * BLOCK_M, BLOCK_N, CAUSAL)
        for i in range(number):
            place = [sequence, (number - 1 - i) * BLOCK_N, group, 0]
            fill(keys_ring, step, k_descriptor, place, BLOCK_N * HEAD_DIM * 2, STAGES)
            if i == 0:
                for w in gl.static_range(CONSUMERS):
                    mbarrier.wait(queries_ring[2].index(w), (turn & 1) ^ 1)
                    mbarrier.expect(queries_ring[1].index(w), BLOCK_M * HEAD_DIM * 2)
                    place_q = [sequence, (CONSUMERS * row + w) * BLOCK_M, head, 0]
                    load_tile(q_descriptor, place_q, queries_ring[1].index(w), queries_ring[0].index(w))
            fill(values_ring, step, v_descriptor, place, BLOCK_N * HEAD_DIM * 2, STAGES)
            step += 1


@jit
def _consume(
    out_descriptor, lse_pointer, distance_pointer, slopes_pointer, queries_ring, keys_ring, values_ring, outs,
    order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
    W: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr, OUT_APART: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Consumer W: output and log-sum-exp of its BLOCK_M rows of each tile."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    out_rows_layout: gl.constexpr = gl.SliceLayout(1, out_layout)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_layout)
    q = queries_ring[0].index(W).reshape([BLOCK_M, HEAD_DIM])
    out_buffer = outs.index(W)
    step = 0
    for turn in range(turns_of(order_pointer, order_width)):
        row, pair = turn_of(order_pointer, order_width, turn)
        number = key_tiles(row, offset, keys, CONSUMERS * BLOCK_M, BLOCK_N, CAUSAL)
        first = (row * CONSUMERS + W) * BLOCK_M
        clear = tiles_without_mask(first, offset, keys, BLOCK_N, CAUSAL)
        distance_here = distance_pointer
        if HAS_DISTANCE:
            distance_here = distance_pointer + 2 * (pair % heads * (2 * extent + 1) + extent)
        far = far_shifts(distance_here, extent, scale, HAS_DISTANCE)
        slope = slope_of_head(slopes_pointer, pair % heads, scale, HAS_SLOPE)
        maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, rows_layout)
        total = gl.zeros([BLOCK_M], gl.float32, rows_layout)
        out = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, out_layout)

        mbarrier.wait(queries_ring[1].index(W), turn & 1)
        wait_full(keys_ring, step, STAGES)
        k = keys_ring[0].index(step % STAGES).reshape([BLOCK_N, HEAD_DIM])
        pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[pending])
        release(keys_ring, step, STAGES)
        start = (number - 1) * BLOCK_N
        s, shift = biased(
            s, distance_here, far, slope, start, first, offset, reach, scale, CAUSAL, HAS_DISTANCE, HAS_SLOPE
        )
        s = hidden_scores(s, start, first, offset, keys, CAUSAL)
        maximum = gl.max(s, 1) * scale + shift
        # a row that has seen no key yet holds -inf, and -inf - -inf would be NaN
        safe = gl.where(maximum == float("-inf"), 0.0, maximum) - shift
        weight = gl.exp2(s * scale - gl.expand_dims(safe, 1))
        total = gl.sum(weight, 1)
        p = gl.convert_layout(weight.to(dtype), weights_layout)
        for i in range(1, number):
            before = step
            step += 1
            wait_full(keys_ring, step, STAGES)
            k = keys_ring[0].index(step % STAGES).reshape([BLOCK_N, HEAD_DIM])
            pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            wait_full(values_ring, before, STAGES)
            v = values_ring[0].index(before % STAGES).reshape([BLOCK_N, HEAD_DIM])
            pending_out = warpgroup_mma(p, v, out, is_async=True)
            s = warpgroup_mma_wait(1, deps=[pending])
            release(keys_ring, step, STAGES)
            start = (number - 1 - i) * BLOCK_N
            s, shift = biased(
                s, distance_here, far, slope, start, first, offset, reach, scale, CAUSAL, HAS_DISTANCE, HAS_SLOPE
            )
            if number - 1 - i >= clear:
                s = hidden_scores(s, start, first, offset, keys, CAUSAL)
            higher = gl.maximum(maximum, gl.max(s, 1) * scale + shift)
            safe = gl.where(higher == float("-inf"), 0.0, higher)
            shrink = gl.exp2(maximum - safe)
            safe = safe - shift
            weight = gl.exp2(s * scale - gl.expand_dims(safe, 1))
            total = total * shrink + gl.sum(weight, 1)
            maximum = higher
            out = warpgroup_mma_wait(0, deps=[pending_out])
            release(values_ring, before, STAGES)
            out = out * gl.expand_dims(gl.convert_layout(shrink, out_rows_layout), 1)
            p = gl.convert_layout(weight.to(dtype), weights_layout)
        if OUT_APART:
            mbarrier.arrive(queries_ring[2].index(W), count=1)
        wait_full(values_ring, step, STAGES)
        v = values_ring[0].index(step % STAGES).reshape([BLOCK_N, HEAD_DIM])
        pending_out = warpgroup_mma(p, v, out, is_async=True)
        empty = total == 0.0
        inverse = gl.convert_layout(1.0 / gl.where(empty, 1.0, total), out_rows_layout)
        query = first + gl.arange(0, BLOCK_M, rows_layout)
        lse = maximum + gl.log2(gl.where(empty, 1.0, total))
        lse = (lse - row_slopes(lse, slope, scale, CAUSAL, HAS_SLOPE)) * 0.6931471805599453
        lse = gl.where(empty, float("-inf"), lse)
        gl.store(lse_pointer + pair.to(gl.int64) * queries + query, lse, mask=query < queries)
        out = warpgroup_mma_wait(0, deps=[pending_out])
        release(values_ring, step, STAGES)
        step += 1
        tma.store_wait(0)  # of the tile before: its output has left the buffer
        out_buffer.reshape([BLOCK_M, HEAD_DIM]).store((out * gl.expand_dims(inverse, 1)).to(dtype))
        fence_async_shared()
        store_tile(out_descriptor, [pair // heads, first, pair % heads, 0], out_buffer)
        if not OUT_APART:
            tma.store_wait(0)
            mbarrier.arrive(queries_ring[2].index(W), count=1)
    tma.store_wait(0)


@kernel
def hopper_forward(
    q_descriptor, k_descriptor, v_descriptor, out_descriptor, lse_pointer, distance_pointer, slopes_pointer,
    order_pointer, order_width, heads, heads_per_group, queries, keys, scale, reach, extent,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_DISTANCE: gl.constexpr, HAS_SLOPE: gl.constexpr, OUT_APART: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of every tile of CONSUMERS * BLOCK_M queries.

    Descriptors over (batch, rows, heads, HEAD_DIM) with tiles of BLOCK_M or BLOCK_N rows. lse: (batch, heads, queries)
    fp32, natural. distance: the table of `distance.distance_table`. slopes: fp32 (heads,), not with
    a distance bias. scale: of the scores times log2(e). OUT_APART: the output has shared memory of its own, so that
    the next queries come early.
    """
    dtype: gl.constexpr = q_descriptor.dtype
    offset = keys - queries
    layout: gl.constexpr = q_descriptor.layout
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, BLOCK_M, 1, HEAD_DIM], layout)
    outs = q_buffers
    if OUT_APART:
        outs = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, BLOCK_M, 1, HEAD_DIM], layout)
    queries_ring = ring(q_buffers, CONSUMERS, 1)
    keys_ring = ring(gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], layout), STAGES, CONSUMERS)
    values_ring = ring(gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], layout), STAGES, CONSUMERS)
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer,
                queries_ring, keys_ring, values_ring, outs,
                order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                0, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, OUT_APART, dtype,
            )),
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer,
                queries_ring, keys_ring, values_ring, outs,
                order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                1, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, OUT_APART, dtype,
            )),
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer,
                queries_ring, keys_ring, values_ring, outs,
                order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                2, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, OUT_APART, dtype,
            )),
            (_produce, (
                q_descriptor, k_descriptor, v_descriptor, queries_ring, keys_ring, values_ring,
                order_pointer, order_width, heads, heads_per_group, offset, keys,
                CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL,
            )),
        ], [4, 4, 4], [160, 160, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer,
                queries_ring, keys_ring, values_ring, outs,
                order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                0, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, OUT_APART, dtype,
            )),
            (_consume, (
                out_descriptor, lse_pointer, distance_pointer, slopes_pointer,
                queries_ring, keys_ring, values_ring, outs,
                order_pointer, order_width, heads, queries, offset, keys, scale, reach, extent,
                1, CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, HAS_DISTANCE, HAS_SLOPE, OUT_APART, dtype,
            )),
            (_produce, (
                q_descriptor, k_descriptor, v_descriptor, queries_ring, keys_ring, values_ring,
                order_pointer, order_width, heads, heads_per_group, offset, keys,
                CONSUMERS, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL,
            )),
        ], [4, 4], [240, 24])  # fmt: skip
