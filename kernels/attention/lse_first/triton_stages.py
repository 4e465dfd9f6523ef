"""The three stages in Triton, each over one chunk of keys; the third is done by the kernels of flash attention.

A query i of the whole sequence sees key j of a chunk where j <= i + shift; `shift` is None, for every key, without a
causal mask. Exponents are in base 2: a score times log2(e).
"""

# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportAssignmentType=false
# the checker does not know that constants decide at compile time and that tl.static_range unrolls

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...interpreter_rounding import rounded
from ...launch import jit, next_power_of_2, tl, triton
from ..flash.hopper.supported_calls import serves_scores
from ..flash.kernel_arguments import (
    Problem,
    accumulator_dtype,
    config_of,
    on_device,
    options_of,
    strides,
    with_plain_rows,
)
from ..flash.portable.backward import Saved, dkdv_kernel, dq_kernel, prepare_backward
from ..flash.portable.tile import (
    LN2,
    LOG2E,
    dense_place,
    dot,
    load_lse,
    load_rows,
    per_row_start,
    row_start,
    store_rows,
)
from ..flash.portable.tile_configs import device_capability
from .tile_configs import Stage, stage_config

# ---------------------------------------------------------------- what the kernels share


@jit
def visited_keys(
    first, queries, keys, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Where the tiles end that a block of queries sees whole, and where those that it sees in part."""
    stop = keys
    whole = keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        stop = tl.minimum(keys, tl.minimum(first + BLOCK_M, queries) + shift)
        whole = tl.minimum(whole, tl.maximum(first + shift + 1, 0) // BLOCK_N * BLOCK_N)
    return whole, stop


@jit
def seen(tile, query, key, keys, shift, hidden, CAUSAL: tl.constexpr):
    """A tile at the edge, `hidden` where a query does not see a key; `query` and `key` broadcast to it."""
    visible = key < keys
    if CAUSAL:
        visible = visible & (key <= query + shift)
    return tl.where(visible, tile, hidden)


# ---------------------------------------------------------------- stage 1


@jit
def lse_kernel(
    q_pointer, k_pointer, lse_pointer,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    heads, heads_per_group, queries, keys, shift, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MERGE: tl.constexpr, NEGATIVE: tl.constexpr,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the log-sum-exp of BLOCK_M queries of a head over the chunk; with MERGE added to what is there.

    q: (batch, queries, heads, HEAD_DIM); k: (batch, keys, groups, HEAD_DIM); lse: (batch, heads, queries), natural.
    The arithmetic around the exponentials is what takes the time. So the highest product is sought, not the highest
    score, and scaling and shifting an exponent are one multiply-add; hence `scale` is positive, and with NEGATIVE its
    sign is that of the products.
    """
    sequence, head, first = dense_place(tl.program_id(0), queries, heads, BLOCK_M, CAUSAL)
    query = first + tl.arange(0, BLOCK_M)
    q_rows = row_start(q_pointer, sequence, head, 0, stride_qb, stride_qs, stride_qh)
    k_rows = row_start(k_pointer, sequence, head // heads_per_group, 0, stride_kb, stride_ks, stride_kh)
    q = load_rows(q_rows, first, stride_qs, query < queries, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    highest_product = tl.full((BLOCK_M,), float("-inf"), ACCUMULATE)
    highest = highest_product
    total = tl.zeros((BLOCK_M,), ACCUMULATE)
    factor = scale * LOG2E
    whole, stop = visited_keys(first, queries, keys, shift, BLOCK_M, BLOCK_N, CAUSAL)
    for EDGE in tl.static_range(2):
        for start in range(whole if EDGE else 0, stop if EDGE else whole, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            k = load_rows(k_rows, start, stride_ks, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            product = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE), PRECISION)
            if NEGATIVE:
                product = -product
            if EDGE:
                product = seen(product, query[:, None], key[None, :], keys, shift, float("-inf"), CAUSAL)
            highest_product = tl.maximum(highest_product, tl.max(product, 1))
            # rounded here and carried: the same highest product must shift the total by nothing
            higher = highest_product * factor
            # a row that has seen no key yet holds -inf, and -inf - -inf would be NaN
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp2(highest - safe) + tl.sum(tl.exp2(product * factor - safe[:, None]), 1)
            highest = higher
    lse_row = lse_pointer + per_row_start(sequence, head, 0, heads, queries, False) + query
    if MERGE:
        before = tl.load(lse_row, mask=query < queries, other=float("-inf")) * LOG2E
        higher = tl.maximum(highest, before)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(highest - safe) + tl.exp2(before - safe)
        highest = higher
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), (highest + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    tl.store(lse_row, lse, mask=query < queries)


# ---------------------------------------------------------------- stage 2


@jit
def output_kernel(
    q_pointer, k_pointer, v_pointer, lse_pointer, out_pointer,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh,
    heads, heads_per_group, queries, keys, shift, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, MERGE: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: what the chunk gives to the output of BLOCK_M queries of a head; with MERGE added to what is there.

    The weights are exp(score - lse) with the log-sum-exp over all keys, so no maximum is kept and nothing rescaled.
    """
    sequence, head, first = dense_place(tl.program_id(0), queries, heads, BLOCK_M, CAUSAL)
    query = first + tl.arange(0, BLOCK_M)
    group = head // heads_per_group
    q_rows = row_start(q_pointer, sequence, head, 0, stride_qb, stride_qs, stride_qh)
    k_rows = row_start(k_pointer, sequence, group, 0, stride_kb, stride_ks, stride_kh)
    v_rows = row_start(v_pointer, sequence, group, 0, stride_vb, stride_vs, stride_vh)
    out_rows = row_start(out_pointer, sequence, head, 0, stride_ob, stride_os, stride_oh)
    q = load_rows(q_rows, first, stride_qs, query < queries, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    lse = load_lse(lse_pointer, per_row_start(sequence, head, 0, heads, queries, False) + query, query < queries)
    accumulator = tl.zeros((BLOCK_M, BLOCK_D), ACCUMULATE)
    whole, stop = visited_keys(first, queries, keys, shift, BLOCK_M, BLOCK_N, CAUSAL)
    for EDGE in tl.static_range(2):
        for start in range(whole if EDGE else 0, stop if EDGE else whole, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            k = load_rows(k_rows, start, stride_ks, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            v = load_rows(v_rows, start, stride_vs, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            product = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE), PRECISION)
            exponent = product * (scale * LOG2E)
            if EDGE:
                exponent = seen(exponent, query[:, None], key[None, :], keys, shift, float("-inf"), CAUSAL)
            weight = tl.exp2(exponent - lse[:, None])
            accumulator = dot(rounded(weight, v.dtype), v, accumulator, PRECISION)
    if MERGE:
        before = load_rows(out_rows, first, stride_os, query < queries, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        accumulator = before + accumulator
    store_rows(out_rows, first, stride_os, query < queries, accumulator, HEAD_DIM, BLOCK_M, BLOCK_D)


# ---------------------------------------------------------------- launches


def stage_arguments(q: Tensor, k: Tensor, stage: Stage, shift: int | None, scale: float) -> dict[str, Any]:
    """Keyword arguments of every kernel that reads queries and keys; both have plain rows."""
    exact = q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return {
        "q_pointer": q,
        "k_pointer": k,
        **strides("q", q),
        **strides("k", k),
        "heads": q.shape[2],
        "heads_per_group": q.shape[2] // k.shape[2],
        "queries": q.shape[1],
        "keys": k.shape[1],
        "shift": shift or 0,
        "scale": scale,
        "CAUSAL": shift is not None,
        **_shape_constants(q),
        "PRECISION": "ieee" if exact else "tf32",
        **options_of(stage_config(stage, q.shape[-1], q.dtype, device_capability(q.device))),
    }


def _shape_constants(q: Tensor) -> dict[str, Any]:
    wide = accumulator_dtype(q.dtype) == torch.float64
    return {
        "HEAD_DIM": q.shape[-1],
        "BLOCK_D": max(16, next_power_of_2(q.shape[-1])),
        "ACCUMULATE": tl.float64 if wide else tl.float32,
    }


def _blocks(rows: int, block: int, q: Tensor, heads: int) -> tuple[int]:
    return (triton.cdiv(rows, block) * q.shape[0] * heads,)


def lse_of_chunk_(lse: Tensor, q: Tensor, k: Tensor, *, shift: int | None, scale: float, merge: bool) -> None:
    """Stage 1: write the log-sum-exp over a chunk into `lse` (batch, heads, queries), or merge it in."""
    if serves_scores(q, k, scale):
        from ..flash.hopper.launchers import launch_lse_

        launch_lse_(lse, q, k, shift=shift, scale=scale, merge=merge)
        return
    q, k = with_plain_rows(q), with_plain_rows(k)
    # of a scale of 0 something is left, so that nothing hidden becomes -inf times 0
    arguments = stage_arguments(q, k, "lse", shift, max(abs(scale), 1e-30)) | {"NEGATIVE": scale < 0}
    grid = _blocks(q.shape[1], arguments["BLOCK_M"], q, q.shape[2])
    with on_device(q):
        lse_kernel[grid](lse_pointer=lse, MERGE=merge, **arguments)


def output_of_chunk_(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, shift: int | None, scale: float, merge: bool
) -> None:
    """Stage 2: write what a chunk gives to the output into `out` (like q), or add it."""
    q, k, v = with_plain_rows(q), with_plain_rows(k), with_plain_rows(v)
    arguments = stage_arguments(q, k, "output", shift, scale) | strides("v", v) | strides("o", out)
    grid = _blocks(q.shape[1], arguments["BLOCK_M"], q, q.shape[2])
    with on_device(q):
        output_kernel[grid](v_pointer=v, lse_pointer=lse, out_pointer=out, MERGE=merge, **arguments)


def delta_of(out: Tensor, out_gradient: Tensor, lse: Tensor, lse_gradient: Tensor | None) -> Tensor:
    """Sum over a head of output times gradient, less the gradient of the lse: (batch, heads, queries)."""
    return prepare_backward(out, out, out, out, lse, out_gradient, lse_gradient).delta


def gradients_of_chunk_(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_gradient: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    shift: int | None,
    scale: float,
    merge: bool,
) -> None:
    """Stage 3: write what a chunk gives to `dq`, or add it, and the whole gradients of the chunk into `dk` and `dv`.

    To the kernels of flash attention a chunk with a causal mask is a window: its last query sees so many keys to the
    right as come after the chunk.
    """
    queries, heads, keys, groups = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    right = -1 if shift is None else shift - (keys - queries)
    problem = Problem(
        bias=None,
        distance_bias=None,
        alibi_slopes=None,
        key_padding_mask=None,
        rng=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        left=-1,
        right=right,
        scale=scale,
        softcap=0.0,
        dropout_p=0.0,
        max_queries=queries,
        max_keys=keys,
    )
    q, k, v, out_gradient = (with_plain_rows(tensor) for tensor in (q, k, v, out_gradient))
    saved = Saved(q, k, v, out_gradient, lse, delta)
    part = torch.empty_like(dq) if merge else dq
    config = config_of("dq", q, problem)
    with on_device(q):
        dq_kernel[_blocks(queries, config.queries, q, heads)](
            **saved.arguments(problem),
            **strides("dq", part),
            **options_of(config),
            q_gradient_pointer=part,
            tiles_pointer=None,
            bias_gradient_pointer=None,
            far_pointer=None,
            slope_gradient_pointer=None,
            stride_far=0,
            heads_per_group=heads // groups,
            WRITE_BIAS_GRADIENT=False,
            FAR_SUMS=False,
            SLOPE_SUMS=False,
        )
    if merge:
        dq += part
    config = config_of("dkdv", q, problem)
    with on_device(q):
        dkdv_kernel[_blocks(keys, config.keys, q, groups)](
            **saved.arguments(problem),
            **strides("dk", dk),
            **strides("dv", dv),
            **options_of(config),
            k_gradient_pointer=dk,
            v_gradient_pointer=dv,
            tiles_pointer=None,
            HEADS_PER_GROUP=heads // groups,
        )
