"""Flash attention forward kernel (Dao, arXiv 2307.08691): one program per tile of queries, online softmax."""

from __future__ import annotations

from torch import Tensor

from ....launch import jit, rounded, tl
from ...dropout import tile_keep_mask
from ..kernel_arguments import (
    FlashAttentionParams,
    accumulator_dtype,
    common_kernel_arguments,
    device_guard,
    launch_options,
    select_config,
    stride_arguments,
    tile_schedule,
    with_contiguous_rows,
)
from .tile import (
    LN2,
    LOG2E,
    dot,
    head_terms,
    keys_before,
    load_rows,
    locate_tile,
    per_row_offset,
    row_pointer,
    score_exponents,
    section_bounds,
    store_rows,
    tile_sections,
    valid_keys,
)


@jit
def forward_kernel(
    q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer,
    bias_pointer, distance_pointer, slopes_pointer, sinks_pointer, padding_pointer, rng_pointer,
    cu_seqlens_q, cu_seqlens_k, tiles_pointer,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    heads, heads_per_group, rows, max_queries, max_keys, left, right, chunk, reach,
    scale, softcap, keep_scale, threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    HAS_SINK: tl.constexpr, PACKED: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program computes BLOCK_M rows of one head; packed, the tiles slot, slot + slots, ... of the tile list.

    q: (batch, queries, heads, HEAD_DIM) or packed (rows, heads, HEAD_DIM); out: likewise with VALUE_DIM; k, v: likewise
    with groups instead of heads. lse: (batch, heads, queries) or packed (heads, rows), natural. distance: (heads, 2
    reach + 1). slopes: (heads,). sinks: (heads,). padding: (batch, keys), 0 for padding. tiles: see `tile_list`.
    """
    program = tl.program_id(0)
    head, tile_begin, tile_end, tile_step = 0, 0, 1, 1
    if PACKED:
        slots = tl.num_programs(0) // heads
        head = program // slots
        tile_begin, tile_end, tile_step = program % slots, tl.load(tiles_pointer), slots
    for tile in range(tile_begin, tile_end, tile_step):
        sequence, head, first, start_q, queries, start_k, keys = locate_tile(
            program, head, tile, tiles_pointer, cu_seqlens_q, cu_seqlens_k, max_queries, heads, max_queries, max_keys,
            BLOCK_M, HAS_RIGHT, PACKED,
        )  # fmt: skip
        offset = keys - queries
        query = first + tl.arange(0, BLOCK_M)
        group = head // heads_per_group
        k_rows = row_pointer(k_pointer, sequence, group, start_k, stride_kb, stride_ks, stride_kh)
        v_rows = row_pointer(v_pointer, sequence, group, start_k, stride_vb, stride_vs, stride_vh)
        q_rows = row_pointer(q_pointer, sequence, head, start_q, stride_qb, stride_qs, stride_qh)
        q = load_rows(q_rows, first, stride_qs, query < queries, HEAD_DIM, BLOCK_M, BLOCK_D, True)

        first_seen = 0
        if HAS_LEFT:
            first_seen = tl.maximum(offset - keys_before(offset, left, chunk, HAS_CHUNK), 0)
        bias_base, distance_base, far_low, far_high, alibi_slope, dropout_key, dropout_first = head_terms(
            bias_pointer, distance_pointer, slopes_pointer, rng_pointer, sequence, head,
            stride_bias_b, stride_bias_h, reach, HAS_BIAS, HAS_DISTANCE, HAS_SLOPE, HAS_DROPOUT,
        )  # fmt: skip
        padding_base = padding_pointer
        if HAS_PADDING:
            padding_base = padding_pointer + tl.cast(sequence, tl.int64) * max_keys

        maximum = tl.full((BLOCK_M,), float("-inf"), ACCUMULATE)
        total = tl.zeros((BLOCK_M,), ACCUMULATE)
        if HAS_SINK:  # the online softmax starts as if it had seen a key with this score and value 0
            maximum = tl.zeros((BLOCK_M,), ACCUMULATE) + tl.load(sinks_pointer + head) * LOG2E
            total += 1.0
        accumulator = tl.zeros((BLOCK_M, BLOCK_V), ACCUMULATE)
        last = tl.minimum(first + BLOCK_M, queries) - 1
        bounds = tile_sections(
            first + offset, last + offset, keys, keys_before(first + offset, left, chunk, HAS_CHUNK),
            keys_before(last + offset, left, chunk, HAS_CHUNK), right, right, reach,
            BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_DISTANCE,
        )  # fmt: skip
        for section in range(
            0 if HAS_LEFT else (1 if HAS_DISTANCE else 2), 3, 2 if HAS_LEFT and not HAS_DISTANCE else 1
        ):
            plain_start, plain_end, edge_end = section_bounds(section, bounds)
            far = tl.where(section == 1, far_low, far_high)
            # no pipelining of edge tiles with a bias lookup: they are too few to be worth the shared memory
            for EDGE in tl.static_range(2):
                begin, end = (plain_end, edge_end) if EDGE else (plain_start, plain_end)
                for start in tl.range(begin, end, BLOCK_N, num_stages=1 if EDGE and HAS_DISTANCE else None):
                    key = start + tl.arange(0, BLOCK_N)
                    key_mask = valid_keys(padding_base, key, keys, first_seen, EDGE, HAS_PADDING)
                    k = load_rows(k_rows, start, stride_ks, key_mask, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE or HAS_PADDING)
                    v = load_rows(v_rows, start, stride_vs, key_mask, VALUE_DIM, BLOCK_N, BLOCK_V, EDGE or HAS_PADDING)
                    product = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE), PRECISION)
                    exponent, _ = score_exponents(
                        product, query[:, None], key[None, :], key_mask[None, :], queries, keys, offset, left, right,
                        chunk, scale, softcap, far, alibi_slope, bias_base, stride_bias_q, stride_bias_k, distance_base,
                        reach, EDGE, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SOFTCAP, HAS_BIAS, HAS_DISTANCE, HAS_SLOPE,
                        HAS_PADDING,
                    )  # fmt: skip
                    new_maximum = tl.maximum(maximum, tl.max(exponent, 1))
                    # -inf until the first visible key, and -inf - -inf would be NaN
                    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                    weight = tl.exp2(exponent - shift[:, None])
                    rescale = tl.exp2(maximum - shift)
                    total = total * rescale + tl.sum(weight, 1)
                    if HAS_DROPOUT:
                        kept = tile_keep_mask(dropout_key, dropout_first, query[:, None], key[None, :], threshold)
                        weight = tl.where(kept, weight, 0.0)
                    accumulator = dot(rounded(weight, v.dtype), v, accumulator * rescale[:, None], PRECISION)
                    maximum = new_maximum

        # a row with keys, but without weight, is beyond what fp32 exponents hold (scores of 1e9): NaN, not 0
        total = tl.where((total == 0.0) & (maximum > float("-inf")), float("nan"), total)
        empty = total == 0.0
        accumulator = accumulator * (keep_scale / tl.where(empty, 1.0, total))[:, None]
        lse = tl.where(empty, float("-inf"), (maximum + tl.log2(tl.where(empty, 1.0, total))) * LN2)
        out_rows = row_pointer(out_pointer, sequence, head, start_q, stride_ob, stride_os, stride_oh)
        store_rows(out_rows, first, stride_os, query < queries, accumulator, VALUE_DIM, BLOCK_M, BLOCK_V)
        lse_row = lse_pointer + per_row_offset(sequence, head, start_q, heads, rows, PACKED) + query
        tl.store(lse_row, lse, mask=query < queries)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, problem: FlashAttentionParams) -> tuple[Tensor, Tensor]:
    """Compute the output, like `q` with the head width of `v`, and the log-sum-exp.

    The log-sum-exp is (batch, heads, queries) or packed (heads, rows).
    """
    q, k, v = with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)
    out, lse = allocate_outputs(q, v, problem)
    batch, heads = problem.batch_size(q), q.shape[-2]
    if not (batch and q.shape[-3]):
        return out, lse
    config = select_config("forward", q, v, problem)
    tiles, slots = tile_schedule(problem.cu_seqlens_q, q.shape[-3], config.queries, batch)
    with device_guard(q):
        forward_kernel[(slots * heads,)](
            **common_kernel_arguments(q, k, v, problem),
            **stride_arguments("o", out),
            **launch_options(config),
            sinks_pointer=None if problem.sinks is None else problem.sinks.to(lse.dtype).contiguous(),
            HAS_SINK=problem.sinks is not None,
            out_pointer=out,
            lse_pointer=lse,
            tiles_pointer=tiles,
            heads_per_group=heads // k.shape[-2],
        )
    return out, lse


def allocate_outputs(q: Tensor, v: Tensor, problem: FlashAttentionParams) -> tuple[Tensor, Tensor]:
    """Allocate output and log-sum-exp; if packed, initialized to 0 and -inf for rows outside of all sequences."""
    shape = (q.shape[-2], q.shape[0]) if problem.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse_dtype, out_shape = accumulator_dtype(q.dtype), (*q.shape[:-1], v.shape[-1])
    if problem.packed:
        return q.new_zeros(out_shape), q.new_full(shape, float("-inf"), dtype=lse_dtype)
    return q.new_empty(out_shape), q.new_empty(shape, dtype=lse_dtype)
