"""Bias gradients: kernels that recompute scores for sums that the dq kernel cannot accumulate without atomics.

Dense bias broadcast over batch or heads: each program owns a tile of the bias and sums the score gradients over the
dimensions it was broadcast to, in order. Distance bias: each program owns one diagonal of tiles of a head. All tiles of
a diagonal have the same pattern of distances, so their gradients are summed elementwise, and only the result is reduced
along its diagonals, once. Memory is O(queries + keys).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ....launch import jit, tl
from ..kernel_arguments import FlashAttentionParams, device_guard, launch_options, select_config, tile_list
from .backward import BackwardInputs
from .tile import (
    dot,
    head_terms,
    keys_before,
    load_lse,
    load_rows,
    locate_tile,
    per_row_offset,
    row_pointer,
    score_exponents,
    score_gradients,
    valid_keys,
)

# target number of programs of the diagonal kernel: enough for the largest GPU; independent of the device, so that
# results are too
TARGET_PROGRAMS = 1024


@jit
def tile_score_gradient(
    q_pointer, k_pointer, v_pointer, out_gradient_pointer, lse_pointer, delta_pointer,
    bias_pointer, distance_pointer, slopes_pointer, padding_pointer, rng_pointer,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    heads, heads_per_group, rows, max_queries, max_keys, left, right, chunk, reach,
    scale, softcap, keep_scale, threshold,
    sequence, head, first_query, first_key, start_q, queries, start_k, keys,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the biased scores of the tile at (first_query, first_key); first_key may be negative."""
    offset = keys - queries
    query = first_query + tl.arange(0, BLOCK_M)
    key = first_key + tl.arange(0, BLOCK_N)
    inside = query < queries
    first_seen = 0
    if HAS_LEFT:
        first_seen = tl.maximum(offset - keys_before(offset, left, chunk, HAS_CHUNK), 0)
    bias_base, distance_base, _, _, alibi_slope, dropout_key, dropout_first = head_terms(
        bias_pointer, distance_pointer, slopes_pointer, rng_pointer, sequence, head,
        stride_bias_b, stride_bias_h, reach, HAS_BIAS, HAS_DISTANCE, HAS_SLOPE, HAS_DROPOUT,
    )  # fmt: skip
    padding_base = padding_pointer
    if HAS_PADDING:
        padding_base = padding_pointer + tl.cast(sequence, tl.int64) * max_keys
    key_mask = valid_keys(padding_base, key, keys, first_seen, True, HAS_PADDING)
    group = head // heads_per_group
    q_rows = row_pointer(q_pointer, sequence, head, start_q, stride_qb, stride_qs, stride_qh)
    do_rows = row_pointer(out_gradient_pointer, sequence, head, start_q, stride_dob, stride_dos, stride_doh)
    k_rows = row_pointer(k_pointer, sequence, group, start_k, stride_kb, stride_ks, stride_kh)
    v_rows = row_pointer(v_pointer, sequence, group, start_k, stride_vb, stride_vs, stride_vh)
    row = per_row_offset(sequence, head, start_q, heads, rows, PACKED) + query
    q = load_rows(q_rows, first_query, stride_qs, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    k = load_rows(k_rows, first_key, stride_ks, key_mask, HEAD_DIM, BLOCK_N, BLOCK_D, True)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
    exponent, slope = score_exponents(
        dot(q, tl.trans(k), zeros, PRECISION),
        query[:, None], key[None, :], key_mask[None, :], queries, keys, offset, left, right, chunk, scale, softcap, 0.0,
        alibi_slope, bias_base, stride_bias_q, stride_bias_k, distance_base, reach,
        True, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SOFTCAP, HAS_BIAS, HAS_DISTANCE, HAS_SLOPE, HAS_PADDING,
    )  # fmt: skip
    out_gradient = load_rows(do_rows, first_query, stride_dos, inside, VALUE_DIM, BLOCK_M, BLOCK_V, True)
    v = load_rows(v_rows, first_key, stride_vs, key_mask, VALUE_DIM, BLOCK_N, BLOCK_V, True)
    lse = load_lse(lse_pointer, row, inside)
    delta = tl.load(delta_pointer + row, mask=inside, other=0.0)
    _, _, gradient, _ = score_gradients(
        exponent, slope, dot(out_gradient, tl.trans(v), zeros, PRECISION), lse[:, None], delta[:, None],
        dropout_key, dropout_first, query[:, None], key[None, :], threshold, keep_scale, HAS_SOFTCAP, HAS_DROPOUT,
    )  # fmt: skip
    return gradient


@jit
def bias_gradient_kernel(
    q_pointer, k_pointer, v_pointer, out_gradient_pointer, lse_pointer, delta_pointer, partial_pointer,
    bias_pointer, distance_pointer, slopes_pointer, padding_pointer, rng_pointer, cu_seqlens_q, cu_seqlens_k,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    batch, heads, heads_per_group, rows, max_queries, max_keys, left, right, chunk, reach,
    scale, softcap, keep_scale, threshold, partial_rows, partial_columns,
    BATCH_BROADCAST: tl.constexpr, HEADS_BROADCAST: tl.constexpr,
    SUM_QUERIES: tl.constexpr, SUM_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program computes the gradient of one tile of a dense bias, summed over broadcast batch and heads.

    partial: (bias batch, bias heads, partial_rows, partial_columns); if the bias is broadcast over queries
    (SUM_QUERIES), a row is the sum over a tile of queries; likewise columns with SUM_KEYS.
    """
    tiles_m = tl.cdiv(max_queries, BLOCK_M)
    tiles_n = tl.cdiv(max_keys, BLOCK_N)
    program = tl.program_id(0)
    tile_n = program % tiles_n
    tile_m = program // tiles_n % tiles_m
    bias_head = program // (tiles_n * tiles_m)  # index into the flattened batch and heads of the bias
    sequence_begin, sequence_end, head_begin, head_end = 0, batch, 0, heads
    if not HEADS_BROADCAST:
        head_begin = bias_head % heads
        head_end = head_begin + 1
    if not BATCH_BROADCAST:
        sequence_begin = bias_head if HEADS_BROADCAST else bias_head // heads
        sequence_end = sequence_begin + 1
    first_query, first_key = tile_m * BLOCK_M, tile_n * BLOCK_N
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
    offset = max_keys - max_queries
    visible = True
    if HAS_RIGHT:
        visible = first_key <= tl.minimum(first_query + BLOCK_M, max_queries) - 1 + offset + right
    if HAS_LEFT:
        visible = visible & (first_key + BLOCK_N - 1 >= first_query + offset - left)
    if visible:
        for sequence in range(sequence_begin, sequence_end):
            for head in range(head_begin, head_end):
                accumulator += tile_score_gradient(
                    q_pointer, k_pointer, v_pointer, out_gradient_pointer, lse_pointer, delta_pointer,
                    bias_pointer, distance_pointer, slopes_pointer, padding_pointer, rng_pointer,
                    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
                    stride_dob, stride_dos, stride_doh, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
                    heads, heads_per_group, rows, max_queries, max_keys, left, right, chunk, reach,
                    scale, softcap, keep_scale, threshold,
                    sequence, head, first_query, first_key, 0, max_queries, 0, max_keys,
                    HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
                    HAS_SOFTCAP, HAS_BIAS, HAS_DISTANCE, HAS_SLOPE, HAS_PADDING, HAS_DROPOUT, PACKED,
                    ACCUMULATE, PRECISION,
                )  # fmt: skip
    row = first_query + tl.arange(0, BLOCK_M)
    column = first_key + tl.arange(0, BLOCK_N)
    if SUM_QUERIES:
        accumulator = tl.sum(accumulator, 0, keep_dims=True)
        row = tile_m + tl.arange(0, 1)
    if SUM_KEYS:
        accumulator = tl.sum(accumulator, 1, keep_dims=True)
        column = tile_n + tl.arange(0, 1)
    start = tl.cast(bias_head, tl.int64) * partial_rows * partial_columns
    pointers = partial_pointer + start + row.to(tl.int64)[:, None] * partial_columns + column[None, :]
    tl.store(pointers, accumulator, mask=(row < partial_rows)[:, None] & (column < partial_columns)[None, :])


@jit
def distance_gradient_kernel(
    q_pointer, k_pointer, v_pointer, out_gradient_pointer, lse_pointer, delta_pointer, partial_pointer,
    bias_pointer, distance_pointer, slopes_pointer, padding_pointer, rng_pointer,
    cu_seqlens_q, cu_seqlens_k, tiles_pointer,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    batch, heads, heads_per_group, rows, max_queries, max_keys, left, right, chunk, reach,
    scale, softcap, keep_scale, threshold, first_diagonal, diagonals,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program sums score gradients by distance over every `splits`-th tile of one diagonal of tiles of a head.

    Tiles are square. The tile of diagonal c at query m starts at the key with distance c * BLOCK_N from m, so its
    element (row, column) has the distance c * BLOCK_N + column - row. partial: (splits, heads, diagonals, 2, BLOCK_N):
    the sums of the distances (c - 1) * BLOCK_N + n, and of c * BLOCK_N + n.
    """
    program = tl.program_id(0)
    diagonal = first_diagonal + program % diagonals
    head = program // diagonals % heads
    split = program // diagonals // heads
    splits = tl.num_programs(0) // diagonals // heads
    tiles = tl.load(tiles_pointer) if PACKED else tl.cdiv(max_queries, BLOCK_M) * batch
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
    for tile in range(split, tiles, splits):
        sequence, _, first, start_q, queries, start_k, keys = locate_tile(
            tile, 0, tile, tiles_pointer, cu_seqlens_q, cu_seqlens_k, max_queries, 1, max_queries, max_keys,
            BLOCK_M, False, PACKED,
        )  # fmt: skip
        first_key = first + keys - queries + diagonal * BLOCK_N
        if (first_key < keys) & (first_key + BLOCK_N > 0):
            accumulator += tile_score_gradient(
                q_pointer, k_pointer, v_pointer, out_gradient_pointer, lse_pointer, delta_pointer,
                bias_pointer, distance_pointer, slopes_pointer, padding_pointer, rng_pointer,
                stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
                stride_dob, stride_dos, stride_doh, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
                heads, heads_per_group, rows, max_queries, max_keys, left, right, chunk, reach,
                scale, softcap, keep_scale, threshold,
                sequence, head, first, first_key, start_q, queries, start_k, keys,
                HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SOFTCAP,
                HAS_BIAS, HAS_DISTANCE, HAS_SLOPE, HAS_PADDING, HAS_DROPOUT, PACKED, ACCUMULATE, PRECISION,
            )  # fmt: skip
    # row r is rotated left by r columns; each column then contains two diagonals
    row = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, BLOCK_N)[None, :]
    skewed = tl.gather(accumulator, (row + column) % BLOCK_N, 1)
    upper = tl.sum(tl.where(row + column < BLOCK_N, skewed, 0.0), 0)
    lower = tl.sum(tl.where(row + column < BLOCK_N, 0.0, skewed), 0)
    pointers = partial_pointer + tl.cast(program, tl.int64) * 2 * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(pointers, lower)
    tl.store(pointers + BLOCK_N, upper)


def launch_bias_gradient(saved: BackwardInputs, problem: FlashAttentionParams) -> Tensor:
    """Compute the gradient of a dense bias that is broadcast over some dimension, fp32 or fp64, like the bias."""
    q, bias = saved.q, problem.bias
    assert bias is not None
    batch, heads = q.shape[0], q.shape[-2]
    queries, keys = problem.max_queries, problem.max_keys
    shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    config = select_config("bias_gradient", q, saved.v, problem)
    tiles_m, tiles_n = -(-queries // config.queries), -(-keys // config.keys)
    # for a dimension of size 1 in the call, broadcast or not makes no difference
    sum_queries, sum_keys = shape[2] == 1, shape[3] == 1
    partial_shape = (*shape[:2], tiles_m if sum_queries else queries, tiles_n if sum_keys else keys)
    partial = saved.lse.new_zeros(partial_shape)
    if partial.numel() and batch:
        with device_guard(q):
            bias_gradient_kernel[(tiles_m * tiles_n * shape[0] * shape[1],)](
                **saved.kernel_arguments(problem),
                **launch_options(config),
                partial_pointer=partial,
                batch=batch,
                heads_per_group=heads // saved.k.shape[-2],
                partial_rows=partial_shape[2],
                partial_columns=partial_shape[3],
                BATCH_BROADCAST=shape[0] == 1,
                HEADS_BROADCAST=shape[1] == 1,
                SUM_QUERIES=sum_queries,
                SUM_KEYS=sum_keys,
            )
    if sum_queries:
        partial = partial.sum(2, keepdim=True)
    if sum_keys:
        partial = partial.sum(3, keepdim=True)
    return partial.reshape(bias.shape)


def launch_distance_gradient(
    saved: BackwardInputs, problem: FlashAttentionParams, far: Tensor | None, sinks_gradient: Tensor | None
) -> Tensor:
    """Compute the gradient of `distance_bias`, (heads, 2 reach + 1), fp32 or fp64.

    The sum over distances <= -reach is the remainder: the score gradients of a row sum to the gradient of its
    log-sum-exp, less that of its sink.

    Args:
        saved: with the delta that `launch_dq` corrected.
        problem: parameters of the call.
        far: score gradients at distances >= reach, from `launch_dq`; None for 0.
        sinks_gradient: gradient of `sinks`, (heads,); None without sinks.
    """
    q, distance_bias = saved.q, problem.distance_bias
    assert distance_bias is not None
    heads, reach = distance_bias.shape[0], distance_bias.shape[1] // 2
    across = (1,) if problem.packed else (0, 2)
    high, total = saved.lse.new_zeros(heads), saved.lse.new_zeros(heads)
    if far is not None:
        high = far.sum(across)
    if saved.lse_gradient is not None:  # fully masked rows do not contribute
        total = saved.lse_gradient.masked_fill(saved.lse == float("-inf"), 0.0).sum(across)
    if sinks_gradient is not None:
        total = total - sinks_gradient
    between = high.new_zeros(heads, 2 * reach - 1)
    # range of the distances that occur in the call, without the two clipped ends
    nearest = max(1 - reach, 1 - problem.max_keys, *([-problem.left] if problem.left >= 0 else []))
    farthest = min(reach - 1, problem.max_queries - 1, *([problem.right] if problem.right >= 0 else []))
    batch, rows = problem.batch_size(q), q.shape[-3]
    if nearest <= farthest and batch and rows:
        config = select_config("distance_gradient", q, saved.v, problem)
        block = config.keys
        first_diagonal, last_diagonal = nearest // block, -(-farthest // block)
        diagonals = last_diagonal - first_diagonal + 1
        tiles = None if problem.cu_seqlens_q is None else tile_list(problem.cu_seqlens_q, rows, block)
        bound = -(-rows // block) * (batch if tiles is None else 1)
        splits = max(1, min(bound, TARGET_PROGRAMS // (diagonals * heads)))
        partial = high.new_empty(splits, heads, diagonals, 2, block)
        with device_guard(q):
            distance_gradient_kernel[(splits * heads * diagonals,)](
                **saved.kernel_arguments(problem),
                **launch_options(config),
                partial_pointer=partial,
                tiles_pointer=tiles,
                batch=batch,
                heads_per_group=heads // saved.k.shape[-2],
                first_diagonal=first_diagonal,
                diagonals=diagonals,
            )
        sums = partial.sum(0)
        # each distance contributes to the upper sums of one diagonal of tiles and to the lower sums of the next
        lower, upper = F.pad(sums[:, :, 0], (0, 0, 0, 1)), F.pad(sums[:, :, 1], (0, 0, 1, 0))
        by_distance = (lower + upper).flatten(1)  # starts at the distance (first_diagonal - 1) * block
        begin = nearest - (first_diagonal - 1) * block
        count = farthest - nearest + 1
        between[:, nearest + reach - 1 : nearest + reach - 1 + count] = by_distance[:, begin : begin + count]
    low = total - between.sum(1) - high
    return torch.cat([low[:, None], between, high[:, None]], dim=1)
