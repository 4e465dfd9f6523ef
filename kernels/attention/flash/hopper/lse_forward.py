"""Log-sum-exp of attention scores on Hopper: the forward kernel without values, stage 1 of LSE-first attention.

One producer warp group and three consumers of 64 queries each, which alternate between tensor cores and exponentials.
"""

# Gluon functions are compiled by Triton, and type checkers cannot follow them:
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, unsupported-operation]

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

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
from .score_tile import mask_scores, num_key_tiles, num_unmasked_tiles


@jit
def _produce(
    q_descriptor, k_descriptor, queries_ring, keys_ring,
    order_pointer, order_width, heads, heads_per_group, offset, keys,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Load the queries of all consumers, and the tiles of keys from the last to the first."""
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        row, pair = next_tile(order_pointer, order_width, iteration)
        head, sequence = pair % heads, pair // heads
        num_tiles = num_key_tiles(row, offset, keys, 3 * BLOCK_M, BLOCK_N, CAUSAL)
        for w in gl.static_range(3):
            mbarrier.wait(queries_ring[2].index(w), (iteration & 1) ^ 1)
            mbarrier.expect(queries_ring[1].index(w), BLOCK_M * HEAD_DIM * 2)
            coordinates = [sequence, (3 * row + w) * BLOCK_M, head, 0]
            load_tile(q_descriptor, coordinates, queries_ring[1].index(w), queries_ring[0].index(w))
        for i in range(num_tiles):
            coordinates = [sequence, (num_tiles - 1 - i) * BLOCK_N, head // heads_per_group, 0]
            tma_load(keys_ring, step, k_descriptor, coordinates, BLOCK_N * HEAD_DIM * 2, STAGES)
            step += 1


@jit
def _consume(
    lse_pointer, queries_ring, keys_ring, order_pointer, order_width, queries, offset, keys, scale,
    W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, MERGE: gl.constexpr,
):  # fmt: skip
    """Consumer W: compute the log-sum-exp of its BLOCK_M rows of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    q = queries_ring[0].index(W).reshape([BLOCK_M, HEAD_DIM])
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        row, pair = next_tile(order_pointer, order_width, iteration)
        num_tiles = num_key_tiles(row, offset, keys, 3 * BLOCK_M, BLOCK_N, CAUSAL)
        first = (3 * row + W) * BLOCK_M
        unmasked = num_unmasked_tiles(first, offset, keys, BLOCK_N, CAUSAL)
        maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, rows_layout)
        total = gl.zeros([BLOCK_M], gl.float32, rows_layout)
        mbarrier.wait(queries_ring[1].index(W), iteration & 1)
        for i in range(num_tiles):
            wait_full(keys_ring, step, STAGES)
            k = keys_ring[0].index(step % STAGES).reshape([BLOCK_N, HEAD_DIM])
            pending = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[pending])
            release(keys_ring, step, STAGES)
            if num_tiles - 1 - i >= unmasked:
                s = mask_scores(s, (num_tiles - 1 - i) * BLOCK_N, first, offset, keys, 0, CAUSAL, False)
            new_maximum = gl.maximum(maximum, gl.max(s, 1) * scale)
            # -inf until the first visible key, and -inf - -inf would be NaN
            safe = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            total = total * gl.exp2(maximum - safe) + gl.sum(gl.exp2(s * scale - gl.expand_dims(safe, 1)), 1)
            maximum = new_maximum
            step += 1
        mbarrier.arrive(queries_ring[2].index(W), count=1)
        query = first + gl.arange(0, BLOCK_M, rows_layout)
        lse_row = lse_pointer + pair.to(gl.int64) * queries + query
        if MERGE:
            previous = gl.load(lse_row, mask=query < queries, other=float("-inf")) * 1.4426950408889634
            new_maximum = gl.maximum(maximum, previous)
            safe = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            total = total * gl.exp2(maximum - safe) + gl.exp2(previous - safe)
            maximum = new_maximum
        # as in `forward.py`: NaN for scores that are too large, not the -inf of a row without keys
        total = gl.where((total == 0.0) & (maximum > float("-inf")), float("nan"), total)
        empty = total == 0.0
        lse = (maximum + gl.log2(gl.where(empty, 1.0, total))) * 0.6931471805599453
        gl.store(lse_row, gl.where(empty, float("-inf"), lse), mask=query < queries)


@kernel
def hopper_lse(
    q_descriptor, k_descriptor, lse_pointer,
    order_pointer, order_width, heads, heads_per_group, queries, offset, keys, scale,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, MERGE: gl.constexpr,
):  # fmt: skip
    """Compute the log-sum-exp of each tile of 3 BLOCK_M queries over the keys; MERGE merges it into `lse`.

    Descriptors over (batch, rows, heads, HEAD_DIM) with tiles of BLOCK_M or BLOCK_N rows. lse: (batch, heads, queries)
    fp32, natural. offset: if CAUSAL, query i sees key j if j <= i + offset. scale: of the scores times log2(e), > 0.
    """
    dtype: gl.constexpr = q_descriptor.dtype
    layout: gl.constexpr = q_descriptor.layout
    queries_ring = make_ring(gl.allocate_shared_memory(dtype, [3, 1, BLOCK_M, 1, HEAD_DIM], layout), 3, 1)
    keys_ring = make_ring(gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_N, 1, HEAD_DIM], layout), STAGES, 3)
    gl.warp_specialize([
        (_consume, (
            lse_pointer, queries_ring, keys_ring, order_pointer, order_width, queries, offset, keys, scale,
            0, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, MERGE,
        )),
        (_consume, (
            lse_pointer, queries_ring, keys_ring, order_pointer, order_width, queries, offset, keys, scale,
            1, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, MERGE,
        )),
        (_consume, (
            lse_pointer, queries_ring, keys_ring, order_pointer, order_width, queries, offset, keys, scale,
            2, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL, MERGE,
        )),
        (_produce, (
            q_descriptor, k_descriptor, queries_ring, keys_ring,
            order_pointer, order_width, heads, heads_per_group, offset, keys,
            BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, CAUSAL,
        )),
    ], [4, 4, 4], [160, 160, 24])  # fmt: skip
