"""All three gradients on Hopper in one kernel, over tiles of 128 keys: five products per tile instead of seven.

Two consumers compute dK and dV of 64 keys each, as in `dkdv.py`, and leave the score gradients in shared memory, from
which each computes its part of the tile's dQ, over the keys of both, a step later. One warp adds these parts up in fp32
in global memory by TMA, and two others round the sums that are complete.

Each tile of queries counts the tiles of keys that have added to it. If ORDERED, these take fixed turns, so that the
sums have the same bits each time; otherwise each adds as soon as it can, with a causal mask after the first one, which
stores, without a mask to zeros. Programs wait for each other: all must be resident (`launch_kernel`: cooperative), and
each handles its tiles of keys in the order of the turns.
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
from .persistent_loop import (
    add_tile,
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

_GRADIENT_STAGES = gl.constexpr(2)


# the next two are called by a test with plain numbers: operators and branches only


@jit
def num_visits(tile, phase, query_tiles, PER_KEYS: gl.constexpr, CAUSAL: gl.constexpr):
    """Return how many tiles of queries a tile of keys visits in a phase; PER_KEYS: tiles of queries as long as it."""
    count = query_tiles
    if CAUSAL:
        half = query_tiles // 2
        if tile * PER_KEYS >= half:
            count = query_tiles - tile * PER_KEYS if phase == 0 else 0
        else:
            count = half if phase == 0 else half - tile * PER_KEYS
    return count


@jit
def visit(tile, phase, j, query_tiles, PER_KEYS: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr):
    """Return visit j of a phase: the tile of queries, and how many tiles of keys must have added to its dQ before.

    Without a mask, tiles of keys take turns in their order; if not ORDERED, each begins at another tile of queries, and
    none is the first. With a causal mask (as many queries as keys, an even number of tiles) a program handles tile p of
    keys, then tile N - 1 - p of N, with N + 1 visits in total; all programs of a head start together. Tile p < N / 2
    visits the second half of the queries in rotation from p on, then the rest of the first half upwards from the
    diagonal; the other tile goes downwards from the end to its diagonal. In each step all programs are at different
    tiles of queries. If not ORDERED, only the first turn goes before the others.
    """
    i = j
    turn = tile
    if not CAUSAL and not ORDERED:
        i = (j + tile * PER_KEYS) % query_tiles
        turn = 1
    if CAUSAL:
        half = query_tiles // 2
        if tile * PER_KEYS >= half:
            i = query_tiles - 1 - j
        elif phase == 0:
            i = half + tile * PER_KEYS + j
            if i >= query_tiles:
                i -= half
            # the tiles of keys that come by are, from the first: the one that started here, and downwards
            turn = (i - half) // PER_KEYS - tile
            if turn < 0:
                turn += half // PER_KEYS
        else:
            i = tile * PER_KEYS + j
            turn = j // PER_KEYS
        if not ORDERED and turn > 1:
            turn = 1
    return i, turn


@jit
def _produce(
    q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor,
    keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers,
    order_pointer, order_width, groups, heads_per_group, query_tiles,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Load the keys and values of a tile, and the queries and output gradients that it visits."""
    PER_KEYS: gl.constexpr = 128 // BLOCK_M
    BYTES: gl.constexpr = BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        tile, pair = next_tile(order_pointer, order_width, iteration)
        group, sequence = pair % groups, pair // groups
        full = keys_ring[1].index(0)
        mbarrier.wait(keys_ring[2].index(0), (iteration & 1) ^ 1)
        mbarrier.expect(full, 4 * 64 * HEAD_DIM * 2)
        for w in gl.static_range(2):
            coordinates = [sequence, (tile * 2 + w) * 64, group, 0]
            load_tile(k_descriptor, coordinates, full, keys_ring[0].index(w))
            load_tile(v_descriptor, coordinates, full, values.index(w))
        for phase in range(2 if CAUSAL else 1):
            for h in range(heads_per_group):
                head = group * heads_per_group + h
                row = sequence * groups * heads_per_group + head
                for j in range(num_visits(tile, phase, query_tiles, PER_KEYS, CAUSAL)):
                    i, _ = visit(tile, phase, j, query_tiles, PER_KEYS, CAUSAL, ORDERED)
                    stage = step % STAGES
                    coordinates = [sequence, i * BLOCK_M, head, 0]
                    tma_load(queries_ring, step, q_descriptor, coordinates, BYTES, STAGES)
                    full = queries_ring[1].index(stage)
                    load_tile(lse_descriptor, [row, i * BLOCK_M], full, lse_buffers.index(stage))
                    tma_load(out_gradients_ring, step, do_descriptor, coordinates, BYTES, STAGES)
                    full = out_gradients_ring[1].index(stage)
                    load_tile(delta_descriptor, [row, i * BLOCK_M], full, delta_buffers.index(stage))
                    step += 1


@jit
def _compute_part(
    score_gradients_ring, parts_ring, keys_ring, step,
    W: gl.constexpr, BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Compute and hand on consumer W's part of dQ of `step`: half of the columns, or with BLOCK_M 128 of the rows."""
    BLOCKS: gl.constexpr = BLOCK_M // 64
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    base = (step % _GRADIENT_STAGES) * (2 * BLOCKS)
    wait_full(score_gradients_ring, step, _GRADIENT_STAGES)
    dq = gl.zeros([64, 64], gl.float32, layout)
    for t in gl.static_range(2):
        keys = keys_ring[0].index(t).reshape([64, HEAD_DIM])
        if BLOCKS == 2:
            gradient = score_gradients_ring[0].index(base + 2 * W + t)
        else:
            gradient = score_gradients_ring[0].index(base + t)
            keys = keys.slice(64 * W, 64, 1)
        dq = warpgroup_mma(gradient.permute((1, 0)), keys, dq, use_acc=t == 1, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    release(score_gradients_ring, step, _GRADIENT_STAGES)
    mbarrier.wait(parts_ring[2].index(W), (step & 1) ^ 1)
    parts_ring[0].index(W).reshape([64, 64]).store(dq)
    fence_async_shared()
    mbarrier.arrive(parts_ring[1].index(W), count=1)


@jit
def _consume(
    dk_pointer, dv_pointer,
    keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers, score_gradients_ring, parts_ring,
    order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys, scale, scale_log2,
    W: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr,
    ORDERED: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Consumer W: compute both gradients of its 64 keys of each tile, and its part of dQ."""
    BLOCKS: gl.constexpr = BLOCK_M // 64
    PER_KEYS: gl.constexpr = 128 // BLOCK_M
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    columns_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    zero = gl.zeros([64, 64], gl.float32, scores_layout)
    k = keys_ring[0].index(W).reshape([64, HEAD_DIM])
    v = values.index(W).reshape([64, HEAD_DIM])
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        tile, pair = next_tile(order_pointer, order_width, iteration)
        key = (tile * 2 + W) * 64
        dk = gl.zeros([64, HEAD_DIM], gl.float32, sums_layout)
        dv = gl.zeros([64, HEAD_DIM], gl.float32, sums_layout)
        begin = step
        wait_full(keys_ring, iteration, 1)
        for phase in range(2 if CAUSAL else 1):
            for _ in range(heads_per_group):
                for j in range(num_visits(tile, phase, query_tiles, PER_KEYS, CAUSAL)):
                    i, _ = visit(tile, phase, j, query_tiles, PER_KEYS, CAUSAL, ORDERED)
                    stage, gradient_stage = step % STAGES, step % _GRADIENT_STAGES
                    wait_full(queries_ring, step, STAGES)
                    for b in gl.static_range(BLOCKS):
                        q = queries_ring[0].index(stage).reshape([BLOCK_M, HEAD_DIM]).slice(b * 64, 64)
                        do = out_gradients_ring[0].index(stage).reshape([BLOCK_M, HEAD_DIM]).slice(b * 64, 64)
                        pending = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                        if b == 0:
                            wait_full(out_gradients_ring, step, STAGES)
                        pending_product = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
                        lse = lse_buffers.index(stage).reshape([BLOCK_M]).slice(b * 64, 64).load(columns_layout)
                        s = warpgroup_mma_wait(1, deps=[pending])
                        weight = gl.exp2(exponents(
                            s, lse, dk_pointer, (0.0, 0.0), 0.0, (0, 0), key, i * BLOCK_M + b * 64, offset, keys,
                            scale_log2, 0, CAUSAL, False, False, False,
                        ))  # fmt: skip
                        p = gl.convert_layout(weight.to(dtype), weights_layout)
                        pending_dv = warpgroup_mma(p, do, dv, is_async=True)
                        delta = delta_buffers.index(stage).reshape([BLOCK_M]).slice(b * 64, 64).load(columns_layout)
                        product = warpgroup_mma_wait(1, deps=[pending_product])
                        gradient = (weight * (product - gl.expand_dims(delta, 0))).to(dtype)
                        g = gl.convert_layout(gradient, weights_layout)
                        pending_dk = warpgroup_mma(g, q, dk, is_async=True)
                        if b == 0:
                            free = score_gradients_ring[2].index(gradient_stage)
                            mbarrier.wait(free, ((step // _GRADIENT_STAGES) & 1) ^ 1)
                        score_gradients_ring[0].index(gradient_stage * (2 * BLOCKS) + 2 * b + W).store(gradient)
                        if b == BLOCKS - 1:
                            fence_async_shared()
                            mbarrier.arrive(score_gradients_ring[1].index(gradient_stage), count=1)
                        dv = warpgroup_mma_wait(1, deps=[pending_dv])
                        if b == BLOCKS - 1:
                            release(out_gradients_ring, step, STAGES)
                        dk = warpgroup_mma_wait(0, deps=[pending_dk])
                        if b == BLOCKS - 1:
                            release(queries_ring, step, STAGES)
                    if step > begin:  # a step later, so that neither consumer waits for the other
                        _compute_part(score_gradients_ring, parts_ring, keys_ring, step - 1, W, BLOCK_M, HEAD_DIM)
                    step += 1
        if step > begin:
            _compute_part(score_gradients_ring, parts_ring, keys_ring, step - 1, W, BLOCK_M, HEAD_DIM)
        release(keys_ring, iteration, 1)
        store_rows(dk_pointer, dk * scale, key, pair, groups, row_heads, keys, HEAD_DIM)
        store_rows(dv_pointer, dv, key, pair, groups, row_heads, keys, HEAD_DIM)


@jit
def _wait_for_turn(counter, turn):
    """Wait until at least `turn` tiles of keys have added to a tile of queries; their sums are visible to TMA then."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 count;
        again:
        ld.acquire.gpu.global.b32 count, [$1];
        setp.lt.s32 p, count, $2;
        @p bra again;
        fence.proxy.async.global;
        mov.b32 $0, count;
        }""",
        "=r,l,r,~{memory}", [counter, turn], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _complete(counter, PENDING: gl.constexpr):
    """Wait until this warp's TMA stores but the last PENDING (0 or 2) are complete, not only read."""
    if PENDING == 0:
        wait: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, 0;"
    else:
        wait: gl.constexpr = "cp.async.bulk.wait_group 2; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(wait, "=r,l,~{memory}", [counter], gl.int32, is_pure=False, pack=1)


@jit
def _end_turn(counter):
    """Let the next tile of keys add to the tile of queries, after `_complete`."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 lane;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 p, lane, 0;
        @p red.release.gpu.global.add.u32 [$1], 1;
        mov.b32 $0, lane;
        }""",
        "=r,l,~{memory}", [counter], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _add(
    sums_descriptor, turns_pointer, parts_ring,
    order_pointer, order_width, groups, heads_per_group, query_tiles, turns,
    BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """One warp: add the parts of dQ to the sums, tile by tile."""
    PER_KEYS: gl.constexpr = 128 // BLOCK_M
    step = 0
    previous = turns_pointer
    is_pending = False
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        tile, pair = next_tile(order_pointer, order_width, iteration)
        group, sequence = pair % groups, pair // groups
        for phase in range(2 if CAUSAL else 1):
            for h in range(heads_per_group):
                head = group * heads_per_group + h
                row = sequence * groups * heads_per_group + head
                for j in range(num_visits(tile, phase, query_tiles, PER_KEYS, CAUSAL)):
                    i, turn = visit(tile, phase, j, query_tiles, PER_KEYS, CAUSAL, ORDERED)
                    counter = turns_pointer + row * turns + i
                    if (CAUSAL or ORDERED) and turn > 0:
                        _wait_for_turn(counter, turn)
                    for w in gl.static_range(2):
                        mbarrier.wait(parts_ring[1].index(w), step & 1)
                        if BLOCK_M == 64:
                            coordinates = [sequence, i * 64, head, w * 64]
                        else:
                            coordinates = [sequence, i * 128 + w * 64, head, 0]
                        if turn == 0:
                            store_tile(sums_descriptor, coordinates, parts_ring[0].index(w))
                        else:
                            add_tile(sums_descriptor, coordinates, parts_ring[0].index(w))
                    tma.store_wait(0)
                    for w in gl.static_range(2):
                        mbarrier.arrive(parts_ring[2].index(w), count=1)
                    # others wait for this addition if ORDERED, else for the first one only: it may take another step
                    is_awaited = ORDERED or turn == 0
                    if is_awaited:
                        _complete(counter, 0)
                        _end_turn(counter)
                    elif is_pending:
                        _complete(counter, 2)
                    if is_pending:
                        _end_turn(previous)
                    is_pending = not is_awaited
                    previous = counter
                    step += 1
    if is_pending:
        _complete(previous, 0)
        _end_turn(previous)


@jit
def _round(
    sums_descriptor, dq_descriptor, turns_pointer, sums_buffer, dq_buffer, loaded,
    order_pointer, order_width, groups, heads_per_group, query_tiles, turns, key_tiles, scale,
    BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Two warps: scale and round the sums of dQ of as many queries as the tile has keys, once they are complete."""
    PER_KEYS: gl.constexpr = 128 // BLOCK_M
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [2, 1], [1, 0])
    step = 0
    for iteration in range(num_assigned_tiles(order_pointer, order_width)):
        tile, pair = next_tile(order_pointer, order_width, iteration)
        group, sequence = pair % groups, pair // groups
        first = tile * PER_KEYS
        end = first + PER_KEYS
        visits = tile + 1
        if not CAUSAL:
            first = tile * query_tiles // key_tiles
            end = (tile + 1) * query_tiles // key_tiles
            visits = key_tiles
        for h in range(heads_per_group):
            head = group * heads_per_group + h
            row = sequence * groups * heads_per_group + head
            for i in range(first, end):
                _wait_for_turn(turns_pointer + row * turns + i, visits)
                for w in gl.static_range(2):
                    if BLOCK_M == 64:
                        coordinates = [sequence, i * 64, head, w * 64]
                    else:
                        coordinates = [sequence, i * 128 + w * 64, head, 0]
                    mbarrier.expect(loaded, 64 * 64 * 4)
                    load_tile(sums_descriptor, coordinates, loaded, sums_buffer)
                    mbarrier.wait(loaded, step & 1)
                    tma.store_wait(0)  # wait until the previous gradient has left the buffer
                    for part in gl.static_range(8):
                        sums = sums_buffer.reshape([64, 64]).slice(part * 8, 8).load(layout)
                        dq_buffer.reshape([64, 64]).slice(part * 8, 8).store((sums * scale).to(dtype))
                    fence_async_shared()
                    store_tile(dq_descriptor, coordinates, dq_buffer)
                    step += 1
    tma.store_wait(0)


@kernel
def hopper_fused_backward(
    q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor,
    sums_descriptor, dq_descriptor, dk_pointer, dv_pointer, turns_pointer,
    order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, queries, keys, scale, scale_log2,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of each tile of 128 keys and values, and of the queries.

    Arguments as in `hopper_dkdv`; BLOCK_M * HEAD_DIM is 8192. sums (fp32, zeros if neither CAUSAL nor ORDERED) and dq:
    contiguous (batch, queries, heads, HEAD_DIM), in boxes of 64 rows and columns. turns: int32 zeros (batch * heads,
    queries / 64 rounded up). Each row of queries must see a key.
    """
    BLOCKS: gl.constexpr = BLOCK_M // 64
    dtype: gl.constexpr = q_descriptor.dtype
    layout: gl.constexpr = q_descriptor.layout
    row_layout: gl.constexpr = lse_descriptor.layout
    square_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    offset = keys - queries
    turns = (queries + 63) // 64
    keys_ring = make_ring(gl.allocate_shared_memory(dtype, [2, 1, 64, 1, HEAD_DIM], layout), 1, 2)
    values = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, HEAD_DIM], layout)
    queries_ring = make_ring(gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], layout), STAGES, 2)
    out_gradients_ring = make_ring(
        gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK_M, 1, HEAD_DIM], layout), STAGES, 2
    )
    lse_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], row_layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], row_layout)
    # written and read by both consumers
    score_gradients = gl.allocate_shared_memory(dtype, [_GRADIENT_STAGES * BLOCKS * 2, 64, 64], square_layout)
    score_gradients_ring = make_ring(score_gradients, _GRADIENT_STAGES, 2, 2)
    parts_ring = make_ring(gl.allocate_shared_memory(gl.float32, [2, 1, 64, 1, 64], sums_descriptor.layout), 2, 1)
    sums_buffer = gl.allocate_shared_memory(gl.float32, [1, 64, 1, 64], sums_descriptor.layout)
    dq_buffer = gl.allocate_shared_memory(dtype, [1, 64, 1, 64], dq_descriptor.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, 1)
    gl.warp_specialize([
        (_consume, (
            dk_pointer, dv_pointer,
            keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers,
            score_gradients_ring, parts_ring,
            order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys,
            scale, scale_log2, 0, BLOCK_M, STAGES, HEAD_DIM, CAUSAL, ORDERED, dtype,
        )),
        (_consume, (
            dk_pointer, dv_pointer,
            keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers,
            score_gradients_ring, parts_ring,
            order_pointer, order_width, groups, row_heads, heads_per_group, query_tiles, offset, keys,
            scale, scale_log2, 1, BLOCK_M, STAGES, HEAD_DIM, CAUSAL, ORDERED, dtype,
        )),
        (_produce, (
            q_descriptor, k_descriptor, v_descriptor, do_descriptor, lse_descriptor, delta_descriptor,
            keys_ring, values, queries_ring, lse_buffers, out_gradients_ring, delta_buffers,
            order_pointer, order_width, groups, heads_per_group, query_tiles,
            BLOCK_M, STAGES, HEAD_DIM, CAUSAL, ORDERED,
        )),
        (_add, (
            sums_descriptor, turns_pointer, parts_ring,
            order_pointer, order_width, groups, heads_per_group, query_tiles, turns, BLOCK_M, CAUSAL, ORDERED,
        )),
        (_round, (
            sums_descriptor, dq_descriptor, turns_pointer, sums_buffer, dq_buffer, loaded,
            order_pointer, order_width, groups, heads_per_group, query_tiles, turns, (keys + 127) // 128, scale,
            BLOCK_M, CAUSAL, dtype,
        )),
    ], [4, 1, 1, 2], [240, 24, 24, 24])  # fmt: skip
