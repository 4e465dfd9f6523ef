"""Kernels that recompute attention weights from queries, keys and log-sum-exps, and their launches.

Each program processes a block of queries and a few tiles of keys: it loads its queries once, and causal calls, whose
early blocks compute little but write as much as all others, stay balanced. Fully masked tiles are written as zeros
without being computed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..launch import INTERPRETED, jit, rounded, tl, triton
from .flash.kernel_arguments import device_guard, stride_arguments, with_contiguous_rows
from .flash.portable.tile import LOG2E, dense_tile, dot, load_lse, load_rows, per_row_offset, row_pointer
from .lse_first.tile_configs import Stage
from .lse_first.triton_stages import key_tile_bounds, mask_edge_tile, stage_kernel_arguments

TILES = 2 if INTERPRETED else 16
"""Maximum tiles of keys per program."""

# ---------------------------------------------------------------- shared by both kernels


@jit
def _program_tiles(
    queries, keys, heads, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return sequence, head and first query of a program, then the bounds of its keys: begin, unmasked_stop, stop, end.

    Tiles in [begin, unmasked_stop) are fully visible, in [unmasked_stop, stop) partly masked, in [stop, end) fully
    masked; begin and unmasked_stop are multiples of BLOCK_N.
    """
    spans = tl.cdiv(keys, BLOCK_N * TILES)
    program = tl.program_id(0)
    sequence, head, first = dense_tile(program // spans, queries, heads, BLOCK_M, CAUSAL)
    begin = program % spans * (BLOCK_N * TILES)
    end = tl.minimum(keys, begin + BLOCK_N * TILES)
    unmasked_stop, stop = key_tile_bounds(first, queries, keys, shift, BLOCK_M, BLOCK_N, CAUSAL)
    unmasked_stop = tl.minimum(tl.maximum(unmasked_stop, begin), end)
    stop = tl.minimum(tl.maximum(stop, begin), end)
    return sequence, head, first, begin, unmasked_stop, stop, end


@jit
def _weights(
    q, k, lse, query, key, keys, shift, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return exp(score - lse) of a tile; one function for both passes, so that they agree bitwise."""
    exponent = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE), PRECISION) * (scale * LOG2E)
    weights = tl.exp2(exponent - lse[:, None])
    if EDGE:  # masked last, so that rounding does not depend on the tile size, which determines the edge tiles
        weights = mask_edge_tile(weights, query[:, None], key[None, :], keys, shift, 0.0, CAUSAL)
    return weights


@jit
def _store(pointer, start, keys, inside, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile, rounded, at column `start` of the rows (BLOCK_M, keys) at `pointer`, where `inside`."""
    column = start + tl.arange(0, BLOCK_N)
    pointers = pointer + (tl.arange(0, BLOCK_M)[:, None] * keys + column[None, :])
    tl.store(pointers, rounded(tile, pointer.dtype.element_ty), mask=inside[:, None] & (column < keys)[None, :])


# ---------------------------------------------------------------- forward


@jit
def weights_kernel(
    q_pointer, k_pointer, lse_pointer, weights_pointer,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh,
    heads, heads_per_group, queries, keys, shift, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    CAUSAL: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program computes the weights of BLOCK_M queries of a head over BLOCK_N * TILES keys.

    q: (batch, queries, heads, HEAD_DIM); k: (batch, keys, groups, HEAD_DIM); lse: (batch, heads, queries), natural;
    weights: (batch, heads, queries, keys), contiguous, fully written.
    """
    sequence, head, first, begin, unmasked_stop, stop, end = _program_tiles(
        queries, keys, heads, shift, BLOCK_M, BLOCK_N, TILES, CAUSAL
    )
    query = first + tl.arange(0, BLOCK_M)
    inside = query < queries
    q_rows = row_pointer(q_pointer, sequence, head, 0, stride_qb, stride_qs, stride_qh)
    k_rows = row_pointer(k_pointer, sequence, head // heads_per_group, 0, stride_kb, stride_ks, stride_kh)
    row = per_row_offset(sequence, head, 0, heads, queries, False)
    weights_rows = weights_pointer + (row + first) * keys
    q = load_rows(q_rows, first, stride_qs, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    lse = load_lse(lse_pointer, row + query, inside)
    for EDGE in tl.static_range(2):
        for start in range(unmasked_stop if EDGE else begin, stop if EDGE else unmasked_stop, BLOCK_N):
            column = tl.multiple_of(start, BLOCK_N)  # alignment hint, for vectorized stores
            key = column + tl.arange(0, BLOCK_N)
            k = load_rows(k_rows, column, stride_ks, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            weights = _weights(
                q, k, lse, query, key, keys, shift, scale, BLOCK_M, BLOCK_N, EDGE, CAUSAL, ACCUMULATE, PRECISION
            )
            _store(weights_rows, column, keys, inside, weights, BLOCK_M, BLOCK_N)
    if CAUSAL:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
        for start in range(begin + tl.cdiv(stop - begin, BLOCK_N) * BLOCK_N, end, BLOCK_N):
            _store(weights_rows, tl.multiple_of(start, BLOCK_N), keys, inside, zeros, BLOCK_M, BLOCK_N)


# ---------------------------------------------------------------- backward


@jit
def score_gradient_kernel(
    q_pointer, k_pointer, v_pointer, out_gradient_pointer, lse_pointer, delta_pointer, weights_pointer,
    score_gradient_pointer,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_dob, stride_dos, stride_doh,
    heads, heads_per_group, queries, keys, shift, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    CAUSAL: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program computes weights as in `weights_kernel`, and the gradient of q k^T for the same tiles.

    v: like k; out_gradient: like q; delta: like lse; score_gradient: like weights.
    """
    sequence, head, first, begin, unmasked_stop, stop, end = _program_tiles(
        queries, keys, heads, shift, BLOCK_M, BLOCK_N, TILES, CAUSAL
    )
    query = first + tl.arange(0, BLOCK_M)
    inside = query < queries
    group = head // heads_per_group
    q_rows = row_pointer(q_pointer, sequence, head, 0, stride_qb, stride_qs, stride_qh)
    k_rows = row_pointer(k_pointer, sequence, group, 0, stride_kb, stride_ks, stride_kh)
    v_rows = row_pointer(v_pointer, sequence, group, 0, stride_vb, stride_vs, stride_vh)
    do_rows = row_pointer(out_gradient_pointer, sequence, head, 0, stride_dob, stride_dos, stride_doh)
    row = per_row_offset(sequence, head, 0, heads, queries, False)
    weights_rows = weights_pointer + (row + first) * keys
    gradient_rows = score_gradient_pointer + (row + first) * keys
    q = load_rows(q_rows, first, stride_qs, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    out_gradient = load_rows(do_rows, first, stride_dos, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    lse = load_lse(lse_pointer, row + query, inside)
    delta = tl.load(delta_pointer + row + query, mask=inside, other=0.0)
    for EDGE in tl.static_range(2):
        for start in range(unmasked_stop if EDGE else begin, stop if EDGE else unmasked_stop, BLOCK_N):
            column = tl.multiple_of(start, BLOCK_N)
            key = column + tl.arange(0, BLOCK_N)
            k = load_rows(k_rows, column, stride_ks, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            v = load_rows(v_rows, column, stride_vs, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            weights = _weights(
                q, k, lse, query, key, keys, shift, scale, BLOCK_M, BLOCK_N, EDGE, CAUSAL, ACCUMULATE, PRECISION
            )
            weights_gradient = dot(out_gradient, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE), PRECISION)
            _store(weights_rows, column, keys, inside, weights, BLOCK_M, BLOCK_N)
            gradient = weights * (weights_gradient - delta[:, None]) * scale
            _store(gradient_rows, column, keys, inside, gradient, BLOCK_M, BLOCK_N)
    if CAUSAL:
        zeros = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
        for start in range(begin + tl.cdiv(stop - begin, BLOCK_N) * BLOCK_N, end, BLOCK_N):
            column = tl.multiple_of(start, BLOCK_N)
            _store(weights_rows, column, keys, inside, zeros, BLOCK_M, BLOCK_N)
            _store(gradient_rows, column, keys, inside, zeros, BLOCK_M, BLOCK_N)


# ---------------------------------------------------------------- launches


def _grid_and_arguments(
    stage: Stage, q: Tensor, k: Tensor, causal: bool, scale: float
) -> tuple[tuple[int], dict[str, Any]]:
    """Return grid and keyword arguments of either kernel; rows of `q` and `k` are contiguous."""
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    arguments = stage_kernel_arguments(q, k, stage, keys - queries if causal else None, scale) | {"TILES": TILES}
    spans = triton.cdiv(keys, arguments["BLOCK_N"] * TILES)
    return (spans * triton.cdiv(queries, arguments["BLOCK_M"]) * batch * heads,), arguments


def _empty_scores(q: Tensor, k: Tensor) -> Tensor:
    """Allocate (batch, heads, queries, keys) in the dtype of `q`."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))


def launch_weights(q: Tensor, k: Tensor, lse: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the attention weights, (batch, heads, queries, keys) in the dtype of `q`; no input may be empty."""
    q, k = with_contiguous_rows(q), with_contiguous_rows(k)
    weights = _empty_scores(q, k)
    grid, arguments = _grid_and_arguments("weights", q, k, causal, scale)
    with device_guard(q):
        weights_kernel[grid](lse_pointer=lse, weights_pointer=weights, **arguments)
    return weights


def launch_score_gradient(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the same weights, and the gradient of q k^T in the same shape and dtype."""
    q, k, v, out_gradient = (with_contiguous_rows(tensor) for tensor in (q, k, v, out_gradient))
    weights, score_gradient = _empty_scores(q, k), _empty_scores(q, k)
    grid, arguments = _grid_and_arguments("score_gradient", q, k, causal, scale)
    with device_guard(q):
        score_gradient_kernel[grid](
            v_pointer=v,
            out_gradient_pointer=out_gradient,
            lse_pointer=lse,
            delta_pointer=delta,
            weights_pointer=weights,
            score_gradient_pointer=score_gradient,
            **stride_arguments("v", v),
            **stride_arguments("do", out_gradient),
            **arguments,
        )
    return weights, score_gradient
