"""Flash attention backward kernels: delta, then dq per tile of queries and dk, dv per tile of keys.

The scores are computed twice, once by each kernel. In return no two programs write the same element, so there are no
atomics and the gradients are bitwise reproducible.
"""

# Triton unrolls static_range and resolves constexpr conditions at compile time, which type checkers do not know:
# pyrefly: ignore-errors[unbound-name]

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....launch import jit, next_power_of_2, rounded, tl
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
    LOG2E,
    absolute_distances,
    dense_tile,
    dot,
    head_terms,
    keys_before,
    load_lse,
    load_rows,
    locate_tile,
    per_row_offset,
    queries_after,
    row_pointer,
    score_exponents,
    score_gradients,
    section_bounds,
    store_rows,
    tile_sections,
    valid_keys,
)

DELTA_BLOCK = 64


@jit
def delta_kernel(
    out_pointer, out_gradient_pointer, lse_pointer, lse_gradient_pointer, delta_pointer,
    stride_ob, stride_os, stride_oh, stride_dob, stride_dos, stride_doh, heads, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_LSE_GRADIENT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Each program computes delta = sum(out * dO) - dLSE of BLOCK_M rows of a head; 0 in fully masked rows.

    delta: like lse. A packed tensor is treated as one sequence, since a row's delta depends on that row only.
    """
    sequence, head, first = dense_tile(tl.program_id(0), rows, heads, BLOCK_M, False)
    row = first + tl.arange(0, BLOCK_M)
    inside = row < rows
    out_rows = row_pointer(out_pointer, sequence, head, 0, stride_ob, stride_os, stride_oh)
    gradient_rows = row_pointer(out_gradient_pointer, sequence, head, 0, stride_dob, stride_dos, stride_doh)
    out = load_rows(out_rows, first, stride_os, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    gradient = load_rows(gradient_rows, first, stride_dos, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    delta = tl.sum(out.to(ACCUMULATE) * gradient.to(ACCUMULATE), 1)
    offset = per_row_offset(sequence, head, 0, heads, rows, False) + row
    lse = tl.load(lse_pointer + offset, mask=inside, other=float("-inf"))
    if HAS_LSE_GRADIENT:
        delta -= tl.load(lse_gradient_pointer + offset, mask=inside, other=0.0)
    tl.store(delta_pointer + offset, tl.where(lse == float("-inf"), 0.0, delta), mask=inside)


@jit
def dq_kernel(
    q_pointer, k_pointer, v_pointer, out_gradient_pointer, lse_pointer, delta_pointer, q_gradient_pointer,
    bias_pointer, distance_pointer, slopes_pointer, sinks_pointer, padding_pointer, rng_pointer,
    cu_seqlens_q, cu_seqlens_k, tiles_pointer,
    lse_gradient_pointer, bias_gradient_pointer, far_pointer, slope_gradient_pointer,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_dqb, stride_dqs, stride_dqh,
    stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    heads, heads_per_group, rows, max_queries, max_keys, left, right, chunk, reach,
    scale, softcap, keep_scale, threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, WRITE_BIAS_GRADIENT: tl.constexpr, CORRECT_DELTA: tl.constexpr,
    HAS_LSE_GRADIENT: tl.constexpr, FAR_SUMS: tl.constexpr, SLOPE_SUMS: tl.constexpr, HAS_SINK: tl.constexpr,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program computes the gradient of BLOCK_M rows of q; grid and shapes as in `forward_kernel`.

    bias_gradient (WRITE_BIAS_GRADIENT): (batch, heads, queries, keys), gradient of each score, 0 on entry. far
    (FAR_SUMS): like lse, per query the sum of its score gradients at distances >= reach.
    slope_gradient (SLOPE_SUMS): like lse, each query's contribution to the gradient of the head's slope.

    delta comes from the rounded output, so the score gradients of a row, which with that of its sink should sum to the
    gradient of its log-sum-exp, have a residual proportional to the weights. Sums over many rows, or times distances,
    amplify it: with CORRECT_DELTA, set for all sums of score gradients, they and delta are corrected by the sum of the
    row.
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
        inside = query < queries
        group = head // heads_per_group
        k_rows = row_pointer(k_pointer, sequence, group, start_k, stride_kb, stride_ks, stride_kh)
        v_rows = row_pointer(v_pointer, sequence, group, start_k, stride_vb, stride_vs, stride_vh)
        q_rows = row_pointer(q_pointer, sequence, head, start_q, stride_qb, stride_qs, stride_qh)
        do_rows = row_pointer(out_gradient_pointer, sequence, head, start_q, stride_dob, stride_dos, stride_doh)
        row = per_row_offset(sequence, head, start_q, heads, rows, PACKED) + query
        q = load_rows(q_rows, first, stride_qs, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        out_gradient = load_rows(do_rows, first, stride_dos, inside, VALUE_DIM, BLOCK_M, BLOCK_V, True)
        lse = load_lse(lse_pointer, row, inside)
        delta = tl.load(delta_pointer + row, mask=inside, other=0.0)

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

        accumulator = tl.zeros((BLOCK_M, BLOCK_D), ACCUMULATE)
        row_sum = tl.zeros((BLOCK_M,), ACCUMULATE)
        high_sum, high_weight = row_sum, row_sum
        slope_gradient, slope_weight = row_sum, row_sum
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
            for EDGE in tl.static_range(2):
                begin, end = (plain_end, edge_end) if EDGE else (plain_start, plain_end)
                for start in tl.range(begin, end, BLOCK_N, num_stages=1 if EDGE and HAS_DISTANCE else None):
                    key = start + tl.arange(0, BLOCK_N)
                    key_mask = valid_keys(padding_base, key, keys, first_seen, EDGE, HAS_PADDING)
                    k = load_rows(k_rows, start, stride_ks, key_mask, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE or HAS_PADDING)
                    v = load_rows(v_rows, start, stride_vs, key_mask, VALUE_DIM, BLOCK_N, BLOCK_V, EDGE or HAS_PADDING)
                    zeros = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
                    exponent, slope = score_exponents(
                        dot(q, tl.trans(k), zeros, PRECISION),
                        query[:, None], key[None, :], key_mask[None, :], queries, keys, offset, left, right, chunk,
                        scale, softcap, far, alibi_slope, bias_base, stride_bias_q, stride_bias_k, distance_base, reach,
                        EDGE, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SOFTCAP, HAS_BIAS, HAS_DISTANCE, HAS_SLOPE,
                        HAS_PADDING,
                    )  # fmt: skip
                    value_product = dot(out_gradient, tl.trans(v), zeros, PRECISION)
                    weight, _, gradient, before_cap = score_gradients(
                        exponent, slope, value_product, lse[:, None], delta[:, None], dropout_key, dropout_first,
                        query[:, None], key[None, :], threshold, keep_scale, HAS_SOFTCAP, HAS_DROPOUT,
                    )  # fmt: skip
                    accumulator = dot(rounded(before_cap, k.dtype), k, accumulator, PRECISION)
                    if WRITE_BIAS_GRADIENT:
                        score_row = (tl.cast(sequence, tl.int64) * heads + head) * queries + query
                        scores = bias_gradient_pointer + score_row[:, None] * keys + key[None, :]
                        rounded_gradient = rounded(gradient, bias_gradient_pointer.dtype.element_ty)
                        tl.store(scores, rounded_gradient, mask=inside[:, None] & (key < keys)[None, :])
                    if CORRECT_DELTA:
                        tile_sum = tl.sum(gradient, 1)
                        row_sum += tile_sum
                    if FAR_SUMS:
                        if EDGE:
                            is_far = key[None, :] - query[:, None] - offset >= reach
                            high_sum += tl.sum(tl.where(is_far, gradient, 0.0), 1)
                            high_weight += tl.sum(tl.where(is_far, weight, 0.0), 1)
                        else:
                            high_sum += tl.where(section == 1, 0.0, tile_sum)
                            high_weight += tl.where(section == 1, 0.0, tl.sum(weight, 1))
                    if SLOPE_SUMS:
                        distances = absolute_distances(query[:, None], key[None, :], offset, gradient)
                        slope_gradient -= tl.sum(gradient * distances, 1)
                        slope_weight -= tl.sum(weight * distances, 1)

        dq_rows = row_pointer(q_gradient_pointer, sequence, head, start_q, stride_dqb, stride_dqs, stride_dqh)
        store_rows(dq_rows, first, stride_dqs, inside, accumulator * scale, HEAD_DIM, BLOCK_M, BLOCK_D)
        if CORRECT_DELTA:
            residual = row_sum
            if HAS_LSE_GRADIENT:
                residual -= tl.load(lse_gradient_pointer + row, mask=inside & (lse != float("inf")), other=0.0)
            if HAS_SINK:  # the gradient of the row's sink is -weight * delta
                residual -= tl.exp2(tl.load(sinks_pointer + head) * LOG2E - lse) * delta
            tl.store(delta_pointer + row, delta + residual, mask=inside)
        if FAR_SUMS:
            tl.store(far_pointer + row, high_sum - residual * high_weight, mask=inside)
        if SLOPE_SUMS:
            tl.store(slope_gradient_pointer + row, slope_gradient - residual * slope_weight, mask=inside)


@jit
def dkdv_kernel(
    q_pointer, k_pointer, v_pointer, out_gradient_pointer, lse_pointer, delta_pointer,
    k_gradient_pointer, v_gradient_pointer,
    bias_pointer, distance_pointer, slopes_pointer, padding_pointer, rng_pointer,
    cu_seqlens_q, cu_seqlens_k, tiles_pointer,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs, stride_dvh,
    stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    heads, rows, max_queries, max_keys, left, right, chunk, reach, scale, softcap, keep_scale, threshold,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_SLOPE: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program computes the gradients of BLOCK_N rows of k and v, summed over the group's query heads in order.

    Scores are transposed here, (keys, queries), so that no product needs a transposed tile of weights. From a key's
    position x, its queries y are at -right <= y - x <= left, so the low and high sides are swapped.
    """
    program = tl.program_id(0)
    groups = heads // HEADS_PER_GROUP
    group, tile_begin, tile_end, tile_step = 0, 0, 1, 1
    if PACKED:
        slots = tl.num_programs(0) // groups
        group = program // slots
        tile_begin, tile_end, tile_step = program % slots, tl.load(tiles_pointer), slots
    for tile in range(tile_begin, tile_end, tile_step):
        sequence, group, first, start_q, queries, start_k, keys = locate_tile(
            program, group, tile, tiles_pointer, cu_seqlens_q, cu_seqlens_k, max_keys, groups, max_queries, max_keys,
            BLOCK_N, False, PACKED,
        )  # fmt: skip
        offset = keys - queries
        key = first + tl.arange(0, BLOCK_N)
        first_seen = 0
        if HAS_LEFT:
            first_seen = tl.maximum(offset - keys_before(offset, left, chunk, HAS_CHUNK), 0)
        padding_base = padding_pointer
        if HAS_PADDING:
            padding_base = padding_pointer + tl.cast(sequence, tl.int64) * max_keys
        key_mask = valid_keys(padding_base, key, keys, first_seen, True, HAS_PADDING)
        k_rows = row_pointer(k_pointer, sequence, group, start_k, stride_kb, stride_ks, stride_kh)
        v_rows = row_pointer(v_pointer, sequence, group, start_k, stride_vb, stride_vs, stride_vh)
        k = load_rows(k_rows, first, stride_ks, key_mask, HEAD_DIM, BLOCK_N, BLOCK_D, True)
        v = load_rows(v_rows, first, stride_vs, key_mask, VALUE_DIM, BLOCK_N, BLOCK_V, True)
        k_gradient = tl.zeros((BLOCK_N, BLOCK_D), ACCUMULATE)
        v_gradient = tl.zeros((BLOCK_N, BLOCK_V), ACCUMULATE)
        last = tl.minimum(first + BLOCK_N, keys) - 1
        bounds = tile_sections(
            first - offset, last - offset, queries, right, right, queries_after(first, left, chunk, HAS_CHUNK),
            queries_after(last, left, chunk, HAS_CHUNK), reach, BLOCK_M, HAS_RIGHT, HAS_LEFT, HAS_DISTANCE,
        )  # fmt: skip
        for head in range(group * HEADS_PER_GROUP, (group + 1) * HEADS_PER_GROUP):
            q_rows = row_pointer(q_pointer, sequence, head, start_q, stride_qb, stride_qs, stride_qh)
            do_rows = row_pointer(out_gradient_pointer, sequence, head, start_q, stride_dob, stride_dos, stride_doh)
            row_offset = per_row_offset(sequence, head, start_q, heads, rows, PACKED)
            bias_base, distance_base, far_low, far_high, alibi_slope, dropout_key, dropout_first = head_terms(
                bias_pointer, distance_pointer, slopes_pointer, rng_pointer, sequence, head,
                stride_bias_b, stride_bias_h, reach, HAS_BIAS, HAS_DISTANCE, HAS_SLOPE, HAS_DROPOUT,
            )  # fmt: skip
            for section in range(
                0 if HAS_RIGHT else (1 if HAS_DISTANCE else 2), 3, 2 if HAS_RIGHT and not HAS_DISTANCE else 1
            ):
                plain_start, plain_end, edge_end = section_bounds(section, bounds)
                far = tl.where(section == 1, far_high, far_low)
                for EDGE in tl.static_range(2):
                    begin, end = (plain_end, edge_end) if EDGE else (plain_start, plain_end)
                    for start in tl.range(begin, end, BLOCK_M, num_stages=1 if EDGE and HAS_DISTANCE else None):
                        query = start + tl.arange(0, BLOCK_M)
                        inside = query < queries
                        q = load_rows(q_rows, start, stride_qs, inside, HEAD_DIM, BLOCK_M, BLOCK_D, EDGE)
                        out_gradient = load_rows(do_rows, start, stride_dos, inside, VALUE_DIM, BLOCK_M, BLOCK_V, EDGE)
                        lse = load_lse(lse_pointer, row_offset + query, inside)
                        delta = tl.load(delta_pointer + row_offset + query, mask=inside, other=0.0)
                        zeros = tl.zeros((BLOCK_N, BLOCK_M), ACCUMULATE)
                        exponent, slope = score_exponents(
                            dot(k, tl.trans(q), zeros, PRECISION),
                            query[None, :], key[:, None], key_mask[:, None], queries, keys, offset, left, right, chunk,
                            scale, softcap, far, alibi_slope, bias_base, stride_bias_q, stride_bias_k, distance_base,
                            reach,
                            EDGE, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SOFTCAP, HAS_BIAS, HAS_DISTANCE, HAS_SLOPE,
                            HAS_PADDING,
                        )  # fmt: skip
                        value_product = dot(v, tl.trans(out_gradient), zeros, PRECISION)
                        _, dropped, _, before_cap = score_gradients(
                            exponent, slope, value_product, lse[None, :], delta[None, :], dropout_key, dropout_first,
                            query[None, :], key[:, None], threshold, keep_scale, HAS_SOFTCAP, HAS_DROPOUT,
                        )  # fmt: skip
                        v_gradient = dot(rounded(dropped, q.dtype), out_gradient, v_gradient, PRECISION)
                        k_gradient = dot(rounded(before_cap, q.dtype), q, k_gradient, PRECISION)

        dk_rows = row_pointer(k_gradient_pointer, sequence, group, start_k, stride_dkb, stride_dks, stride_dkh)
        dv_rows = row_pointer(v_gradient_pointer, sequence, group, start_k, stride_dvb, stride_dvs, stride_dvh)
        # masked keys were loaded as zero rows, whose sums with real gradients are not zero and must be discarded
        k_gradient = tl.where(key_mask[:, None], k_gradient * scale, 0.0)
        v_gradient = tl.where(key_mask[:, None], v_gradient, 0.0)
        store_rows(dk_rows, first, stride_dks, key < keys, k_gradient, HEAD_DIM, BLOCK_N, BLOCK_D)
        store_rows(dv_rows, first, stride_dvs, key < keys, v_gradient, VALUE_DIM, BLOCK_N, BLOCK_V)


class BackwardInputs(NamedTuple):
    """Inputs of the backward kernels.

    `lse`, `delta` and `lse_gradient`, None for 0, have the shape of the log-sum-exp of `launch_forward`; `out_gradient`
    that of its output.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out_gradient: Tensor
    lse: Tensor
    delta: Tensor
    lse_gradient: Tensor | None = None

    def kernel_arguments(self, problem: FlashAttentionParams) -> dict[str, object]:
        """Return the keyword arguments common to all kernels that recompute scores."""
        return {
            **common_kernel_arguments(self.q, self.k, self.v, problem),
            **stride_arguments("do", self.out_gradient),
            "out_gradient_pointer": self.out_gradient,
            "lse_pointer": self.lse,
            "delta_pointer": self.delta,
        }


def prepare_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, out_gradient: Tensor, lse_gradient: Tensor | None
) -> BackwardInputs:
    """Compute delta, which includes the gradient of the log-sum-exp, since d lse / d score is the weight."""
    q, k, v, out_gradient = (
        with_contiguous_rows(q),
        with_contiguous_rows(k),
        with_contiguous_rows(v),
        with_contiguous_rows(out_gradient),
    )
    out, delta = with_contiguous_rows(out), torch.empty_like(lse)
    lse_gradient = None if lse_gradient is None else lse_gradient.contiguous()
    saved = BackwardInputs(q, k, v, out_gradient, lse, delta, lse_gradient)
    rows, heads, head_dim = out.shape[-3:]
    batch = out.shape[0] if out.ndim == 4 else 1
    if not lse.numel():
        return saved
    with device_guard(out):
        delta_kernel[(-(-rows // DELTA_BLOCK) * heads * batch,)](
            out,
            out_gradient,
            lse,
            lse_gradient,
            delta,
            **stride_arguments("o", out),
            **stride_arguments("do", out_gradient),
            heads=heads,
            rows=rows,
            HEAD_DIM=head_dim,
            BLOCK_D=max(16, next_power_of_2(head_dim)),
            BLOCK_M=DELTA_BLOCK,
            HAS_LSE_GRADIENT=lse_gradient is not None,
            ACCUMULATE=tl.float64 if accumulator_dtype(out.dtype) == torch.float64 else tl.float32,
            num_warps=4,
        )
    return saved


def _allocate_like(tensor: Tensor, problem: FlashAttentionParams) -> Tensor:
    """Allocate a gradient; if packed, initialized to 0 for rows outside of all sequences."""
    return tensor.new_zeros(tensor.shape) if problem.packed else tensor.new_empty(tensor.shape)


def launch_dq(
    saved: BackwardInputs,
    problem: FlashAttentionParams,
    *,
    scores_dtype: torch.dtype | None = None,
    correct_delta: bool = False,
    far_sums: bool = False,
    slope_sums: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradient of q, and optionally gradients of biases that the same kernel can accumulate.

    Args:
        saved: from `prepare_backward`.
        problem: parameters of the call.
        scores_dtype: also return the score gradients, in this dtype; dense calls only.
        correct_delta: correct `saved.delta` in place, for later sums of score gradients.
        far_sums: also return the sums of score gradients over distances >= reach; implies `correct_delta`.
        slope_sums: also return the gradient of `alibi_slopes`; implies `correct_delta`.
        out: tensor to write dq to, of any floating dtype; None allocates it.

    Returns:
        dq like q; the score gradients (batch, heads, queries, keys); their sums per query over distances >= reach,
        like lse; the gradient of the slopes (heads,), in fp32 or fp64. None where not requested.
    """
    q = saved.q
    q_gradient = _allocate_like(q, problem) if out is None else out
    batch, heads = problem.batch_size(q), q.shape[-2]
    scores = far = None
    if scores_dtype is not None:
        scores = q.new_zeros((batch, heads, problem.max_queries, problem.max_keys), dtype=scores_dtype)
    if far_sums:
        far = torch.zeros_like(saved.lse)
    if not (batch and q.shape[-3]):
        return q_gradient, scores, far, saved.lse.new_zeros(heads) if slope_sums else None
    slopes = torch.zeros_like(saved.lse) if slope_sums else None
    config = select_config("dq", q, saved.v, problem)
    tiles, slots = tile_schedule(problem.cu_seqlens_q, q.shape[-3], config.queries, batch)
    with device_guard(q):
        dq_kernel[(slots * heads,)](
            **saved.kernel_arguments(problem),
            **stride_arguments("dq", q_gradient),
            **launch_options(config),
            q_gradient_pointer=q_gradient,
            tiles_pointer=tiles,
            sinks_pointer=None if problem.sinks is None else problem.sinks.to(saved.lse.dtype).contiguous(),
            lse_gradient_pointer=saved.lse_gradient,
            bias_gradient_pointer=scores,
            far_pointer=far,
            slope_gradient_pointer=slopes,
            heads_per_group=heads // saved.k.shape[-2],
            WRITE_BIAS_GRADIENT=scores is not None,
            CORRECT_DELTA=correct_delta or far_sums or slope_sums,
            HAS_LSE_GRADIENT=saved.lse_gradient is not None,
            FAR_SUMS=far_sums,
            SLOPE_SUMS=slope_sums,
            HAS_SINK=problem.sinks is not None,
        )
    if slopes is not None:
        slopes = slopes.sum(1) if problem.packed else slopes.sum((0, 2))
    return q_gradient, scores, far, slopes


def launch_dkdv(
    saved: BackwardInputs, problem: FlashAttentionParams, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of k and v, like k and v; in the tensors `out` if given, of any floating dtype."""
    q, k, v = saved.q, saved.k, saved.v
    k_gradient, v_gradient = (_allocate_like(k, problem), _allocate_like(v, problem)) if out is None else out
    batch, heads, groups = problem.batch_size(q), q.shape[-2], k.shape[-2]
    if not (batch and k.shape[-3]):
        return k_gradient, v_gradient
    config = select_config("dkdv", q, saved.v, problem)
    tiles, slots = tile_schedule(problem.cu_seqlens_k, k.shape[-3], config.keys, batch)
    with device_guard(q):
        dkdv_kernel[(slots * groups,)](
            **saved.kernel_arguments(problem),
            **stride_arguments("dk", k_gradient),
            **stride_arguments("dv", v_gradient),
            **launch_options(config),
            k_gradient_pointer=k_gradient,
            v_gradient_pointer=v_gradient,
            tiles_pointer=tiles,
            HEADS_PER_GROUP=heads // groups,
        )
    return k_gradient, v_gradient
