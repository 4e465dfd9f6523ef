"""The three stages in Triton, each over one chunk of keys; stage 3 runs the backward kernels of flash attention.

Query i of the whole sequence sees key j of a chunk if j <= i + shift; `shift` is None without a causal mask. Exponents
are in base 2: a score times log2(e).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...launch import device_capability, jit, next_power_of_2, rounded, tl, triton
from ..flash.hopper.supported_calls import supports_scores
from ..flash.kernel_arguments import (
    FlashAttentionParams,
    accumulator_dtype,
    device_guard,
    launch_options,
    stride_arguments,
    with_contiguous_rows,
)
from ..flash.portable.backward import BackwardInputs, launch_dkdv, launch_dq, prepare_backward
from ..flash.portable.tile import (
    LN2,
    LOG2E,
    dense_tile,
    dot,
    load_lse,
    load_rows,
    per_row_offset,
    row_pointer,
    store_rows,
)
from .tile_configs import Stage, stage_config

# ---------------------------------------------------------------- shared by the kernels


@jit
def key_tile_bounds(
    first, queries, keys, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Return the end of the key tiles that are fully visible to a block of queries, and of the partly visible ones."""
    stop = keys
    unmasked_stop = keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        stop = tl.minimum(keys, tl.minimum(first + BLOCK_M, queries) + shift)
        unmasked_stop = tl.minimum(unmasked_stop, tl.maximum(first + shift + 1, 0) // BLOCK_N * BLOCK_N)
    return unmasked_stop, stop


@jit
def mask_edge_tile(tile, query, key, keys, shift, hidden, CAUSAL: tl.constexpr):
    """Mask an edge tile: `hidden` where a key is not visible; `query` and `key` are broadcastable to the tile."""
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
    """Each program computes the log-sum-exp of BLOCK_M queries of a head over the chunk; MERGE merges it into `lse`.

    q: (batch, queries, heads, HEAD_DIM); k: (batch, keys, groups, HEAD_DIM); lse: (batch, heads, queries), natural.
    The arithmetic around the exponentials dominates, so the maximum is taken over the unscaled products, and scaling
    and shifting an exponent are one multiply-add. `scale` must be positive for this; NEGATIVE negates the products.
    """
    sequence, head, first = dense_tile(tl.program_id(0), queries, heads, BLOCK_M, CAUSAL)
    query = first + tl.arange(0, BLOCK_M)
    q_rows = row_pointer(q_pointer, sequence, head, 0, stride_qb, stride_qs, stride_qh)
    k_rows = row_pointer(k_pointer, sequence, head // heads_per_group, 0, stride_kb, stride_ks, stride_kh)
    q = load_rows(q_rows, first, stride_qs, query < queries, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    maximum_product = tl.full((BLOCK_M,), float("-inf"), ACCUMULATE)
    maximum = maximum_product
    total = tl.zeros((BLOCK_M,), ACCUMULATE)
    factor = scale * LOG2E
    unmasked_stop, stop = key_tile_bounds(first, queries, keys, shift, BLOCK_M, BLOCK_N, CAUSAL)
    for EDGE in tl.static_range(2):
        for start in range(unmasked_stop if EDGE else 0, stop if EDGE else unmasked_stop, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            k = load_rows(k_rows, start, stride_ks, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            product = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE), PRECISION)
            if NEGATIVE:
                product = -product
            if EDGE:
                product = mask_edge_tile(product, query[:, None], key[None, :], keys, shift, float("-inf"), CAUSAL)
            maximum_product = tl.maximum(maximum_product, tl.max(product, 1))
            # rounded once and carried, so that an unchanged maximum rescales the total by exactly 1
            new_maximum = maximum_product * factor
            # -inf until the first visible key, and -inf - -inf would be NaN
            safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            total = total * tl.exp2(maximum - safe) + tl.sum(tl.exp2(product * factor - safe[:, None]), 1)
            maximum = new_maximum
    lse_row = lse_pointer + per_row_offset(sequence, head, 0, heads, queries, False) + query
    if MERGE:
        previous = tl.load(lse_row, mask=query < queries, other=float("-inf")) * LOG2E
        new_maximum = tl.maximum(maximum, previous)
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp2(maximum - safe) + tl.exp2(previous - safe)
        maximum = new_maximum
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), (maximum + tl.log2(tl.where(empty, 1.0, total))) * LN2)
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
    """Each program computes the chunk's contribution to the output of BLOCK_M queries of a head; MERGE adds to `out`.

    The weights are exp(score - lse) with the log-sum-exp over all keys, so no running maximum or rescaling is needed.
    """
    sequence, head, first = dense_tile(tl.program_id(0), queries, heads, BLOCK_M, CAUSAL)
    query = first + tl.arange(0, BLOCK_M)
    group = head // heads_per_group
    q_rows = row_pointer(q_pointer, sequence, head, 0, stride_qb, stride_qs, stride_qh)
    k_rows = row_pointer(k_pointer, sequence, group, 0, stride_kb, stride_ks, stride_kh)
    v_rows = row_pointer(v_pointer, sequence, group, 0, stride_vb, stride_vs, stride_vh)
    out_rows = row_pointer(out_pointer, sequence, head, 0, stride_ob, stride_os, stride_oh)
    q = load_rows(q_rows, first, stride_qs, query < queries, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    lse = load_lse(lse_pointer, per_row_offset(sequence, head, 0, heads, queries, False) + query, query < queries)
    accumulator = tl.zeros((BLOCK_M, BLOCK_D), ACCUMULATE)
    unmasked_stop, stop = key_tile_bounds(first, queries, keys, shift, BLOCK_M, BLOCK_N, CAUSAL)
    for EDGE in tl.static_range(2):
        for start in range(unmasked_stop if EDGE else 0, stop if EDGE else unmasked_stop, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            k = load_rows(k_rows, start, stride_ks, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            v = load_rows(v_rows, start, stride_vs, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            product = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE), PRECISION)
            exponent = product * (scale * LOG2E)
            if EDGE:
                exponent = mask_edge_tile(exponent, query[:, None], key[None, :], keys, shift, float("-inf"), CAUSAL)
            weight = tl.exp2(exponent - lse[:, None])
            accumulator = dot(rounded(weight, v.dtype), v, accumulator, PRECISION)
    if MERGE:
        previous = load_rows(out_rows, first, stride_os, query < queries, HEAD_DIM, BLOCK_M, BLOCK_D, True)
        accumulator = previous + accumulator
    store_rows(out_rows, first, stride_os, query < queries, accumulator, HEAD_DIM, BLOCK_M, BLOCK_D)


# ---------------------------------------------------------------- launches


def stage_kernel_arguments(q: Tensor, k: Tensor, stage: Stage, shift: int | None, scale: float) -> dict[str, Any]:
    """Return the keyword arguments common to all kernels of queries and keys; their rows are contiguous."""
    exact = q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return {
        "q_pointer": q,
        "k_pointer": k,
        **stride_arguments("q", q),
        **stride_arguments("k", k),
        "heads": q.shape[2],
        "heads_per_group": q.shape[2] // k.shape[2],
        "queries": q.shape[1],
        "keys": k.shape[1],
        "shift": shift or 0,
        "scale": scale,
        "CAUSAL": shift is not None,
        **_shape_constants(q),
        "PRECISION": "ieee" if exact else "tf32",
        **launch_options(stage_config(stage, q.shape[-1], q.dtype, device_capability(q.device))),
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
    """Stage 1: write the log-sum-exp over a chunk to `lse` (batch, heads, queries), or merge it."""
    if supports_scores(q, k, scale):
        from ..flash.hopper.launchers import launch_lse_

        launch_lse_(lse, q, k, shift=shift, scale=scale, merge=merge)
        return
    q, k = with_contiguous_rows(q), with_contiguous_rows(k)
    # a scale of 0 is replaced by a tiny one: masked products are -inf, and -inf times 0 would be NaN
    arguments = stage_kernel_arguments(q, k, "lse", shift, max(abs(scale), 1e-30)) | {"NEGATIVE": scale < 0}
    grid = _blocks(q.shape[1], arguments["BLOCK_M"], q, q.shape[2])
    with device_guard(q):
        lse_kernel[grid](lse_pointer=lse, MERGE=merge, **arguments)


def output_of_chunk_(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, *, shift: int | None, scale: float, merge: bool
) -> None:
    """Stage 2: write a chunk's contribution to the output to `out` (like q), or add it."""
    q, k, v = with_contiguous_rows(q), with_contiguous_rows(k), with_contiguous_rows(v)
    arguments = (
        stage_kernel_arguments(q, k, "output", shift, scale) | stride_arguments("v", v) | stride_arguments("o", out)
    )
    grid = _blocks(q.shape[1], arguments["BLOCK_M"], q, q.shape[2])
    with device_guard(q):
        output_kernel[grid](v_pointer=v, lse_pointer=lse, out_pointer=out, MERGE=merge, **arguments)


def delta_of(out: Tensor, out_gradient: Tensor, lse: Tensor, lse_gradient: Tensor | None) -> Tensor:
    """Return sum(out * dO) over the head minus the gradient of the lse, (batch, heads, queries)."""
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
    """Stage 3: write or add a chunk's contribution to `dq`, and write the gradients of the chunk to `dk` and `dv`.

    For the flash attention kernels the causal mask of a chunk is a window: aligned with the end of the chunk, a query
    sees as many keys to the right as there are after the chunk.
    """
    queries, keys = q.shape[1], k.shape[1]
    right = -1 if shift is None else shift - (keys - queries)
    problem = FlashAttentionParams(
        *(None,) * 8, left=-1, right=right, scale=scale, softcap=0.0, dropout_p=0.0, max_queries=queries, max_keys=keys
    )
    q, k, v, out_gradient = (with_contiguous_rows(tensor) for tensor in (q, k, v, out_gradient))
    saved = BackwardInputs(q, k, v, out_gradient, lse, delta)
    contribution = torch.empty_like(dq) if merge else dq
    launch_dq(saved, problem, out=contribution)
    if merge:
        dq += contribution
    launch_dkdv(saved, problem, out=(dk, dv))
