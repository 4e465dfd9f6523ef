"""All three gradients of at most 128 queries on Hopper in one kernel, as in the cross-attention of a short decoder.

One program computes the gradients of a head: its queries stay in shared memory, and the keys and values pass by once,
in tiles of 128. Two consumers compute dK and dV of 64 keys each, as in `dkdv.py`, and leave the score gradients in
shared memory, from which each adds up dQ of 64 queries in registers. Nothing is added up in global memory.
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

from .dkdv import exponents, store_rows
from .persistent_loop import jit, kernel, load_tile, make_ring, release, store_tile, wait_full

_HEAD_STAGES = gl.constexpr(2)
_GRADIENT_STAGES = gl.constexpr(2)


@jit
def _produce(
    q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor,
    queries_ring, out_gradients, lse_buffers, delta_buffers, keys_ring, values, heads, pairs, key_tiles,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Load the queries and output gradients of each head, and its tiles of keys and values."""
    step = 0
    turn = 0
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        head, sequence = pair % heads, pair // heads
        stage = turn % _HEAD_STAGES
        full = queries_ring[1].index(stage)
        mbarrier.wait(queries_ring[2].index(stage), ((turn // _HEAD_STAGES) & 1) ^ 1)
        mbarrier.expect(full, 2 * BLOCK_M * (HEAD_DIM * 2 + 4))
        load_tile(q_descriptor, [sequence, 0, head, 0], full, queries_ring[0].index(stage))
        load_tile(do_descriptor, [sequence, 0, head, 0], full, out_gradients.index(stage))
        load_tile(lse_descriptor, [pair, 0], full, lse_buffers.index(stage))
        load_tile(delta_descriptor, [pair, 0], full, delta_buffers.index(stage))
        for i in range(key_tiles):
            slot = step % STAGES
            full = keys_ring[1].index(slot)
            mbarrier.wait(keys_ring[2].index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, 4 * BLOCK_N * HEAD_DIM * 2)
            for w in gl.static_range(2):
                coordinates = [sequence, (i * 2 + w) * BLOCK_N, head, 0]
                load_tile(k_descriptor, coordinates, full, keys_ring[0].index(slot * 2 + w))
                load_tile(v_descriptor, coordinates, full, values.index(slot * 2 + w))
            step += 1
        turn += 1


@jit
def _consume(
    dq_descriptor, dk_pointer, dv_pointer,
    queries_ring, out_gradients, lse_buffers, delta_buffers, keys_ring, values, score_gradients_ring, outs,
    heads, pairs, row_heads, key_tiles, queries, keys, scale, scale_log2,
    W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Consumer W: compute both gradients of its BLOCK_N keys of each tile, and the gradient of 64 queries."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    columns_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zero = gl.zeros([64, 64], gl.float32, scores_layout)
    out_buffer = outs.index(W)
    step = 0
    turn = 0
    for pair in range(gl.program_id(0), pairs, gl.num_programs(0)):
        stage = turn % _HEAD_STAGES
        dq = gl.zeros([64, HEAD_DIM], gl.float32, sums_layout)
        wait_full(queries_ring, turn, _HEAD_STAGES)
        for i in range(key_tiles):
            slot, gradient_stage = step % STAGES, step % _GRADIENT_STAGES
            key = (i * 2 + W) * BLOCK_N
            k = keys_ring[0].index(slot * 2 + W).reshape([BLOCK_N, HEAD_DIM])
            v = values.index(slot * 2 + W).reshape([BLOCK_N, HEAD_DIM])
            dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, sums_layout)
            dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, sums_layout)
            wait_full(keys_ring, step, STAGES)
            free = score_gradients_ring[2].index(gradient_stage)
            mbarrier.wait(free, ((step // _GRADIENT_STAGES) & 1) ^ 1)
            for b in gl.static_range(2):
                q = queries_ring[0].index(stage).reshape([BLOCK_M, HEAD_DIM]).slice(b * 64, 64)
                do = out_gradients.index(stage).reshape([BLOCK_M, HEAD_DIM]).slice(b * 64, 64)
                pending = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                pending_product = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
                lse = lse_buffers.index(stage).reshape([BLOCK_M]).slice(b * 64, 64).load(columns_layout)
                s = warpgroup_mma_wait(1, deps=[pending])
                weight = gl.exp2(exponents(
                    s, lse, dk_pointer, (0.0, 0.0), 0.0, (0, 0), key, b * 64, keys - queries, keys, scale_log2, 0,
                    False, False, False, False,
                ))  # fmt: skip
                p = gl.convert_layout(weight.to(dtype), weights_layout)
                pending_dv = warpgroup_mma(p, do, dv, is_async=True)
                delta = delta_buffers.index(stage).reshape([BLOCK_M]).slice(b * 64, 64).load(columns_layout)
                product = warpgroup_mma_wait(1, deps=[pending_product])
                gradient = (weight * (product - gl.expand_dims(delta, 0))).to(dtype)
                g = gl.convert_layout(gradient, weights_layout)
                pending_dk = warpgroup_mma(g, q, dk, is_async=True)
                score_gradients_ring[0].index(gradient_stage * 4 + 2 * b + W).store(gradient)
                dv = warpgroup_mma_wait(1, deps=[pending_dv])
                dk = warpgroup_mma_wait(0, deps=[pending_dk])
            fence_async_shared()
            mbarrier.arrive(score_gradients_ring[1].index(gradient_stage), count=1)
            wait_full(score_gradients_ring, step, _GRADIENT_STAGES)
            for t in gl.static_range(2):
                gradients = score_gradients_ring[0].index(gradient_stage * 4 + 2 * W + t)
                tile = keys_ring[0].index(slot * 2 + t).reshape([BLOCK_N, HEAD_DIM])
                dq = warpgroup_mma(gradients.permute((1, 0)), tile, dq, is_async=True)
            store_rows(dk_pointer, dk * scale, key, pair, heads, row_heads, keys, HEAD_DIM)
            store_rows(dv_pointer, dv, key, pair, heads, row_heads, keys, HEAD_DIM)
            dq = warpgroup_mma_wait(0, deps=[dq])
            release(score_gradients_ring, step, _GRADIENT_STAGES)
            release(keys_ring, step, STAGES)
            step += 1
        release(queries_ring, turn, _HEAD_STAGES)
        tma.store_wait(0)  # wait until the gradient of the previous head has left the buffer
        out_buffer.reshape([64, HEAD_DIM]).store((dq * scale).to(dtype))
        fence_async_shared()
        store_tile(dq_descriptor, [pair // heads, W * 64, pair % heads, 0], out_buffer)
        turn += 1
    tma.store_wait(0)


@kernel
def hopper_short_backward(
    q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor, dq_descriptor,
    dk_pointer, dv_pointer, heads, pairs, row_heads, key_tiles, queries, keys, scale, scale_log2,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of the `pairs` of sequence and head, of as many groups as heads, without a mask.

    Arguments as in `hopper_dkdv`; BLOCK_M is `MAX_SHORT_QUERIES`, BLOCK_N and the rows of a tile of dq are 64.
    """
    dtype: gl.constexpr = q_descriptor.dtype
    layout: gl.constexpr = q_descriptor.layout
    row_layout: gl.constexpr = lse_descriptor.layout
    square_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    queries_ring = make_ring(
        gl.allocate_shared_memory(dtype, [_HEAD_STAGES, 1, BLOCK_M, 1, HEAD_DIM], layout), _HEAD_STAGES, 2
    )
    out_gradients = gl.allocate_shared_memory(dtype, [_HEAD_STAGES, 1, BLOCK_M, 1, HEAD_DIM], layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [_HEAD_STAGES, 1, BLOCK_M], row_layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [_HEAD_STAGES, 1, BLOCK_M], row_layout)
    keys_ring = make_ring(gl.allocate_shared_memory(dtype, [STAGES * 2, 1, BLOCK_N, 1, HEAD_DIM], layout), STAGES, 2)
    values = gl.allocate_shared_memory(dtype, [STAGES * 2, 1, BLOCK_N, 1, HEAD_DIM], layout)
    # written and read by both consumers
    score_gradients = gl.allocate_shared_memory(dtype, [_GRADIENT_STAGES * 4, 64, 64], square_layout)
    score_gradients_ring = make_ring(score_gradients, _GRADIENT_STAGES, 2, 2)
    outs = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, HEAD_DIM], dq_descriptor.layout)
    gl.warp_specialize([
        (_consume, (
            dq_descriptor, dk_pointer, dv_pointer,
            queries_ring, out_gradients, lse_buffers, delta_buffers, keys_ring, values,
            score_gradients_ring, outs,
            heads, pairs, row_heads, key_tiles, queries, keys, scale, scale_log2,
            0, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, dtype,
        )),
        (_consume, (
            dq_descriptor, dk_pointer, dv_pointer,
            queries_ring, out_gradients, lse_buffers, delta_buffers, keys_ring, values,
            score_gradients_ring, outs,
            heads, pairs, row_heads, key_tiles, queries, keys, scale, scale_log2,
            1, BLOCK_M, BLOCK_N, STAGES, HEAD_DIM, dtype,
        )),
        (_produce, (
            q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor,
            queries_ring, out_gradients, lse_buffers, delta_buffers, keys_ring, values, heads, pairs, key_tiles,
            BLOCK_M, BLOCK_N, STAGES, HEAD_DIM,
        )),
    ], [4, 4], [240, 24])  # fmt: skip
