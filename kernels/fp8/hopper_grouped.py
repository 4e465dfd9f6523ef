"""Grouped fp8 matmuls for Hopper: rows times the matrix of their expert, and the gradients of the matrices.

Persistent grid; one producer warp group loads by TMA, two consumers multiply 64 or 128 rows each and store by TMA while
the next tile is multiplied. Experts begin at multiples of 128 rows.
"""

# Gluon functions are compiled by Triton, and type checkers cannot follow them:
# pyrefly: ignore-errors[bad-argument-type, bad-assignment, not-iterable, unbound-name, unsupported-operation]

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..attention.flash.hopper.persistent_loop import load_tile, make_ring, store_tile

jit: Any = gluon.jit
kernel: Any = gluon.jit(do_not_specialize=["height", "width", "depth", "experts"])


@jit
def _num_tiles(
    count_pointer, height, width, experts, OUTER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Return the number of tiles of all programs."""
    if OUTER:
        tiles = experts * gl.cdiv(height, BLOCK_M) * gl.cdiv(width, BLOCK_N)
    else:
        tiles = gl.load(count_pointer) * gl.cdiv(width, BLOCK_N)
    return tiles


@jit
def _place(
    tile, ends_pointer, experts_pointer, rows_pointer, count_pointer, height, width, depth, experts,
    OUTER: gl.constexpr, STACKED: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Return of a tile its place in A (row, column), B and the result, the row where its expert's end, and steps."""
    column_tiles = gl.cdiv(width, BLOCK_N)
    if OUTER:
        row_tiles = gl.cdiv(height, BLOCK_M)
        expert = gl.load(experts_pointer + tile // (row_tiles * column_tiles))
        tile = tile % (row_tiles * column_tiles)
    else:
        row_tiles = gl.load(count_pointer)
    band = tile // (GROUP_M * column_tiles)
    tall = gl.minimum(row_tiles - band * GROUP_M, GROUP_M)
    within = tile - band * GROUP_M * column_tiles
    row_tile = band * GROUP_M + within % tall
    column = within // tall * BLOCK_N
    if OUTER:
        first = gl.load(ends_pointer + expert - 1, mask=expert > 0, other=0)
        stop = gl.load(ends_pointer + expert)
        steps = (stop - first) // BLOCK_K
        a_row = row_tile * BLOCK_M
        a_column = first
        b_row = column
        b_column = first
        out_row = expert * height + a_row
        out_stop = expert * height + height
    else:
        expert = gl.load(experts_pointer + row_tile)
        a_row = gl.load(rows_pointer + row_tile)
        used = expert < experts
        out_stop = gl.load(ends_pointer + expert, mask=used, other=height)
        steps = gl.where(used, depth // BLOCK_K, 0)
        expert = gl.where(used, expert, 0)
        a_column = 0
        out_row = a_row
        b_row = column
        b_column = expert * depth
        if STACKED:
            b_row = expert * width + column
            b_column = 0
    return a_row, a_column, b_row, b_column, out_row, out_stop, column, steps


@jit
def _produce(
    a_descriptor, b_descriptor, ring, ends_pointer, experts_pointer, rows_pointer, count_pointer,
    height, width, depth, experts,
    OUTER: gl.constexpr, STACKED: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the tiles of both operands."""
    a_buffers, b_buffers, full, free = ring
    CHUNKS: gl.constexpr = BLOCK_M // 64
    step = 0
    tiles = _num_tiles(count_pointer, height, width, experts, OUTER, BLOCK_M, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        a_row, a_column, b_row, b_column, _, _, _, steps = _place(
            tile, ends_pointer, experts_pointer, rows_pointer, count_pointer, height, width, depth, experts,
            OUTER, STACKED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        for number in range(steps):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (BLOCK_M + BLOCK_N) * BLOCK_K)
            place = number * BLOCK_K
            load_tile(b_descriptor, [b_row, b_column + place], full.index(stage), b_buffers.index(stage))
            for chunk in gl.static_range(CHUNKS):
                load_tile(
                    a_descriptor, [a_row + chunk * 64, a_column + place], full.index(stage),
                    a_buffers.index(stage * CHUNKS + chunk),
                )  # fmt: skip
            step += 1


@jit
def _store(
    total, out_descriptor, buffer, a_scale_pointer, b_scale_pointer, row_amax_pointer, a_row, b_row, column, width,
    out_row, out_stop,
    A_SCALES: gl.constexpr, B_SCALES: gl.constexpr, ROW_AMAX: gl.constexpr, EVEN_WIDTH: gl.constexpr,
    BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scale 64 rows of the result and store them, unless they are after the expert's."""
    if out_row < out_stop:
        row = gl.arange(0, 64, gl.SliceLayout(1, layout))
        across = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        if A_SCALES == "tensor" and B_SCALES == "tensor":
            total = total * (gl.load(a_scale_pointer) * gl.load(b_scale_pointer))
        else:
            if A_SCALES == "tensor":
                total = total * gl.load(a_scale_pointer)
            else:
                total = total * gl.expand_dims(gl.load(a_scale_pointer + a_row + row), 1)
            if B_SCALES == "tensor":
                total = total * gl.load(b_scale_pointer)
            else:
                b_scale = gl.load(b_scale_pointer + b_row + across, mask=column + across < width, other=0.0)
                total = total * gl.expand_dims(b_scale, 0)
        value = total.to(out_descriptor.dtype)
        tma.store_wait(0)  # until the last tile has left the buffer
        buffer.store(value)
        fence_async_shared()
        store_tile(out_descriptor, [out_row, column], buffer)
        if ROW_AMAX:
            bits = value.to(gl.float32).to(gl.int32, bitcast=True) & 0x7FFFFFFF
            if not EVEN_WIDTH:  # columns beyond the width are other matrices' rows
                bits = gl.where(gl.expand_dims(column + across < width, 0), bits, 0)
            gl.atomic_max(row_amax_pointer + out_row + row, gl.max(bits, 1), sem="relaxed")


@jit
def _consume(
    out_descriptor, ring, outs, a_scale_pointer, b_scale_pointer, row_amax_pointer,
    ends_pointer, experts_pointer, rows_pointer, count_pointer, height, width, depth, experts,
    W: gl.constexpr, A_SCALES: gl.constexpr, B_SCALES: gl.constexpr, FAST: gl.constexpr, ROW_AMAX: gl.constexpr,
    EVEN_WIDTH: gl.constexpr, OUTER: gl.constexpr, STACKED: gl.constexpr, GROUP_M: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer W: multiply BLOCK_M / 2 rows of each tile, in chunks of 64."""
    a_buffers, b_buffers, full, free = ring
    CHUNKS: gl.constexpr = BLOCK_M // 64
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    zero = gl.zeros([64, BLOCK_N], gl.float32, layout)
    step = 0
    tiles = _num_tiles(count_pointer, height, width, experts, OUTER, BLOCK_M, BLOCK_N)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        a_row, _, b_row, _, out_row, out_stop, column, steps = _place(
            tile, ends_pointer, experts_pointer, rows_pointer, count_pointer, height, width, depth, experts,
            OUTER, STACKED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = gl.zeros([64, BLOCK_N], gl.float32, layout)
        second = gl.zeros([64, BLOCK_N], gl.float32, layout)
        for number in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            b = b_buffers.index(stage).permute((1, 0))
            first_chunk: gl.constexpr = W * (CHUNKS // 2)
            if FAST:
                pending = warpgroup_mma(a_buffers.index(stage * CHUNKS + first_chunk), b, total, is_async=True)
                if CHUNKS == 4:
                    also = warpgroup_mma(a_buffers.index(stage * CHUNKS + first_chunk + 1), b, second, is_async=True)
                    total, second = warpgroup_mma_wait(2, deps=[pending, also])
                else:
                    total = warpgroup_mma_wait(1, deps=[pending])
                if number > 0:  # the last step's operands have been read
                    mbarrier.arrive(free.index((step - 1) % STAGES), count=1)
            else:
                # the product of 128 columns by the tensor cores, added in fp32 registers
                pending = warpgroup_mma(
                    a_buffers.index(stage * CHUNKS + first_chunk), b, zero, use_acc=False, is_async=True
                )
                part = warpgroup_mma_wait(0, deps=[pending])
                if CHUNKS == 4:
                    also = warpgroup_mma(
                        a_buffers.index(stage * CHUNKS + first_chunk + 1), b, zero, use_acc=False, is_async=True
                    )
                    total += part
                    part = warpgroup_mma_wait(0, deps=[also])
                    mbarrier.arrive(free.index(stage), count=1)
                    second += part
                else:
                    mbarrier.arrive(free.index(stage), count=1)
                    total += part
            step += 1
        if FAST:
            if CHUNKS == 4:
                total, second = warpgroup_mma_wait(0, deps=[total, second])
            else:
                total = warpgroup_mma_wait(0, deps=[total])
            if steps > 0:
                mbarrier.arrive(free.index((step - 1) % STAGES), count=1)
        shift = W * (BLOCK_M // 2)
        _store(
            total, out_descriptor, outs.index(W), a_scale_pointer, b_scale_pointer, row_amax_pointer,
            a_row + shift, b_row, column, width, out_row + shift, out_stop,
            A_SCALES, B_SCALES, ROW_AMAX, EVEN_WIDTH, BLOCK_N, layout,
        )  # fmt: skip
        if CHUNKS == 4:
            _store(
                second, out_descriptor, outs.index(W), a_scale_pointer, b_scale_pointer, row_amax_pointer,
                a_row + shift + 64, b_row, column, width, out_row + shift + 64, out_stop,
                A_SCALES, B_SCALES, ROW_AMAX, EVEN_WIDTH, BLOCK_N, layout,
            )  # fmt: skip
    tma.store_wait(0)


@kernel
def hopper_grouped_kernel(
    a_descriptor, b_descriptor, out_descriptor, a_scale_pointer, b_scale_pointer, row_amax_pointer,
    ends_pointer, experts_pointer, rows_pointer, count_pointer, height, width, depth, experts,
    A_SCALES: gl.constexpr, B_SCALES: gl.constexpr, FAST: gl.constexpr, ROW_AMAX: gl.constexpr,
    EVEN_WIDTH: gl.constexpr, OUTER: gl.constexpr, STACKED: gl.constexpr, GROUP_M: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute out[r] = a[r] @ b[e(r)]^T, 0 in rows after the last expert's; OUTER: out[e] = sum of a[:, r] b[:, r]^T.

    Descriptors: a (rows, depth) with tiles (64, BLOCK_K), b (experts * width, depth), or without STACKED
    (width, experts * depth), with tiles (BLOCK_N, BLOCK_K), out (rows, width) with tiles (64, BLOCK_N); OUTER:
    a (height, rows), b (width, rows), out (experts * height, width). height: rows of `a`.
    """
    layout: gl.constexpr = a_descriptor.layout
    CHUNKS: gl.constexpr = BLOCK_M // 64
    a_buffers = gl.allocate_shared_memory(a_descriptor.dtype, [STAGES * CHUNKS, 64, BLOCK_K], layout)
    b_buffers = gl.allocate_shared_memory(b_descriptor.dtype, [STAGES, BLOCK_N, BLOCK_K], b_descriptor.layout)
    outs = gl.allocate_shared_memory(out_descriptor.dtype, [2, 64, BLOCK_N], out_descriptor.layout)
    _, full, free = make_ring(b_buffers, STAGES, 2)
    ring = (a_buffers, b_buffers, full, free)
    gl.warp_specialize([
        (_consume, (
            out_descriptor, ring, outs, a_scale_pointer, b_scale_pointer, row_amax_pointer,
            ends_pointer, experts_pointer, rows_pointer, count_pointer, height, width, depth, experts,
            0, A_SCALES, B_SCALES, FAST, ROW_AMAX, EVEN_WIDTH, OUTER, STACKED, GROUP_M,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )),
        (_consume, (
            out_descriptor, ring, outs, a_scale_pointer, b_scale_pointer, row_amax_pointer,
            ends_pointer, experts_pointer, rows_pointer, count_pointer, height, width, depth, experts,
            1, A_SCALES, B_SCALES, FAST, ROW_AMAX, EVEN_WIDTH, OUTER, STACKED, GROUP_M,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )),
        (_produce, (
            a_descriptor, b_descriptor, ring, ends_pointer, experts_pointer, rows_pointer, count_pointer,
            height, width, depth, experts,
            OUTER, STACKED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )),
    ], [4, 4], [240, 24])  # fmt: skip
