"""The kernels that write the scores of attention out again, from queries, keys and log-sum-exps, and their launches.

A program has a block of queries and a few tiles of keys: it reads its queries once, and a causal call, whose early
blocks have little to compute and as much to write as all others, keeps the GPU evenly busy. Tiles that a causal mask
hides are written as zeros and not computed.
"""

# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportAssignmentType=false
# the checker does not know that constants decide at compile time and that tl.static_range unrolls

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..interpreter_rounding import rounded
from ..launch import INTERPRETED, jit, tl, triton
from .flash.kernel_arguments import on_device, strides, with_plain_rows
from .flash.portable.tile import LOG2E, dense_place, dot, load_lse, load_rows, per_row_start, row_start
from .lse_first.tile_configs import Stage
from .lse_first.triton_stages import seen, stage_arguments, visited_keys

TILES = 2 if INTERPRETED else 16
"""Tiles of keys that a program has at most."""

# ---------------------------------------------------------------- what both share


@jit
def _place(
    queries, keys, heads, shift, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Sequence, head and first query of a program, then the bounds of its keys.

    These are where its tiles begin, where those end that all of its queries see whole, where those that they see in
    part, and where all of them end; all but the last two are multiples of BLOCK_N.
    """
    spans = tl.cdiv(keys, BLOCK_N * TILES)
    program = tl.program_id(0)
    sequence, head, first = dense_place(program // spans, queries, heads, BLOCK_M, CAUSAL)
    begin = program % spans * (BLOCK_N * TILES)
    end = tl.minimum(keys, begin + BLOCK_N * TILES)
    whole, stop = visited_keys(first, queries, keys, shift, BLOCK_M, BLOCK_N, CAUSAL)
    whole = tl.minimum(tl.maximum(whole, begin), end)
    stop = tl.minimum(tl.maximum(stop, begin), end)
    return sequence, head, first, begin, whole, stop, end


@jit
def _weights(
    q, k, lse, query, key, keys, shift, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """exp(score - lse) of a tile: one function, so that the backward gets the bits of the forward."""
    exponent = dot(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE), PRECISION) * (scale * LOG2E)
    weights = tl.exp2(exponent - lse[:, None])
    if EDGE:  # only now: tiles of another size, which see other edges, shall round alike
        weights = seen(weights, query[:, None], key[None, :], keys, shift, 0.0, CAUSAL)
    return weights


@jit
def _store(pointer, start, keys, inside, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write a tile, rounded, from column `start` on of the rows (BLOCK_M, keys) at `pointer`, where `inside`."""
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
    """One program: what BLOCK_M queries of a head take of BLOCK_N * TILES keys.

    q: (batch, queries, heads, HEAD_DIM); k: (batch, keys, groups, HEAD_DIM); lse: (batch, heads, queries), natural;
    weights: (batch, heads, queries, keys), contiguous, all of it written.
    """
    sequence, head, first, begin, whole, stop, end = _place(
        queries, keys, heads, shift, BLOCK_M, BLOCK_N, TILES, CAUSAL
    )
    query = first + tl.arange(0, BLOCK_M)
    inside = query < queries
    q_rows = row_start(q_pointer, sequence, head, 0, stride_qb, stride_qs, stride_qh)
    k_rows = row_start(k_pointer, sequence, head // heads_per_group, 0, stride_kb, stride_ks, stride_kh)
    row = per_row_start(sequence, head, 0, heads, queries, False)
    weights_rows = weights_pointer + (row + first) * keys
    q = load_rows(q_rows, first, stride_qs, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    lse = load_lse(lse_pointer, row + query, inside)
    for EDGE in tl.static_range(2):
        for start in range(whole if EDGE else begin, stop if EDGE else whole, BLOCK_N):
            column = tl.multiple_of(start, BLOCK_N)  # lets neighbouring keys be written together
            key = column + tl.arange(0, BLOCK_N)
            k = load_rows(k_rows, column, stride_ks, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            weights = _weights(
                q, k, lse, query, key, keys, shift, scale, BLOCK_M, BLOCK_N, EDGE, CAUSAL, ACCUMULATE, PRECISION
            )
            _store(weights_rows, column, keys, inside, weights, BLOCK_M, BLOCK_N)
    if CAUSAL:
        nothing = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
        for start in range(begin + tl.cdiv(stop - begin, BLOCK_N) * BLOCK_N, end, BLOCK_N):
            _store(weights_rows, tl.multiple_of(start, BLOCK_N), keys, inside, nothing, BLOCK_M, BLOCK_N)


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
    """One program: the weights as in `weights_kernel`, and the gradients of the products of queries and keys.

    v: like k; out_gradient: like q; delta: like lse; score_gradient: like weights.
    """
    sequence, head, first, begin, whole, stop, end = _place(
        queries, keys, heads, shift, BLOCK_M, BLOCK_N, TILES, CAUSAL
    )
    query = first + tl.arange(0, BLOCK_M)
    inside = query < queries
    group = head // heads_per_group
    q_rows = row_start(q_pointer, sequence, head, 0, stride_qb, stride_qs, stride_qh)
    k_rows = row_start(k_pointer, sequence, group, 0, stride_kb, stride_ks, stride_kh)
    v_rows = row_start(v_pointer, sequence, group, 0, stride_vb, stride_vs, stride_vh)
    do_rows = row_start(out_gradient_pointer, sequence, head, 0, stride_dob, stride_dos, stride_doh)
    row = per_row_start(sequence, head, 0, heads, queries, False)
    weights_rows = weights_pointer + (row + first) * keys
    gradient_rows = score_gradient_pointer + (row + first) * keys
    q = load_rows(q_rows, first, stride_qs, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    out_gradient = load_rows(do_rows, first, stride_dos, inside, HEAD_DIM, BLOCK_M, BLOCK_D, True)
    lse = load_lse(lse_pointer, row + query, inside)
    delta = tl.load(delta_pointer + row + query, mask=inside, other=0.0)
    for EDGE in tl.static_range(2):
        for start in range(whole if EDGE else begin, stop if EDGE else whole, BLOCK_N):
            column = tl.multiple_of(start, BLOCK_N)
            key = column + tl.arange(0, BLOCK_N)
            k = load_rows(k_rows, column, stride_ks, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            v = load_rows(v_rows, column, stride_vs, key < keys, HEAD_DIM, BLOCK_N, BLOCK_D, EDGE)
            weights = _weights(
                q, k, lse, query, key, keys, shift, scale, BLOCK_M, BLOCK_N, EDGE, CAUSAL, ACCUMULATE, PRECISION
            )
            of_weights = dot(out_gradient, tl.trans(v), tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE), PRECISION)
            _store(weights_rows, column, keys, inside, weights, BLOCK_M, BLOCK_N)
            gradient = weights * (of_weights - delta[:, None]) * scale
            _store(gradient_rows, column, keys, inside, gradient, BLOCK_M, BLOCK_N)
    if CAUSAL:
        nothing = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATE)
        for start in range(begin + tl.cdiv(stop - begin, BLOCK_N) * BLOCK_N, end, BLOCK_N):
            column = tl.multiple_of(start, BLOCK_N)
            _store(weights_rows, column, keys, inside, nothing, BLOCK_M, BLOCK_N)
            _store(gradient_rows, column, keys, inside, nothing, BLOCK_M, BLOCK_N)


# ---------------------------------------------------------------- launches


def _launch_of(stage: Stage, q: Tensor, k: Tensor, causal: bool, scale: float) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and keyword arguments of either kernel, for queries and keys with plain rows."""
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    arguments = stage_arguments(q, k, stage, keys - queries if causal else None, scale) | {"TILES": TILES}
    spans = triton.cdiv(keys, arguments["BLOCK_N"] * TILES)
    return (spans * triton.cdiv(queries, arguments["BLOCK_M"]) * batch * heads,), arguments


def _written_out(q: Tensor, k: Tensor) -> Tensor:
    """Room for a number for each query and key: (batch, heads, queries, keys)."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))


def launch_weights(q: Tensor, k: Tensor, lse: Tensor, causal: bool, scale: float) -> Tensor:
    """How much each query takes of each key, (batch, heads, queries, keys), like `q`; there is one of both at least."""
    q, k = with_plain_rows(q), with_plain_rows(k)
    weights = _written_out(q, k)
    grid, arguments = _launch_of("weights", q, k, causal, scale)
    with on_device(q):
        weights_kernel[grid](lse_pointer=lse, weights_pointer=weights, **arguments)
    return weights


def launch_score_gradient(
    out_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The same weights and, like them, the gradients of the products of queries and keys."""
    q, k, v, out_gradient = (with_plain_rows(tensor) for tensor in (q, k, v, out_gradient))
    weights, score_gradient = _written_out(q, k), _written_out(q, k)
    grid, arguments = _launch_of("score_gradient", q, k, causal, scale)
    with on_device(q):
        score_gradient_kernel[grid](
            v_pointer=v,
            out_gradient_pointer=out_gradient,
            lse_pointer=lse,
            delta_pointer=delta,
            weights_pointer=weights,
            score_gradient_pointer=score_gradient,
            **strides("v", v),
            **strides("do", out_gradient),
            **arguments,
        )
    return weights, score_gradient
