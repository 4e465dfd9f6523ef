"""Launches of the Hopper kernels, for the calls that `supported_calls.supports` accepts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...backend_support import MAX_SHORT_QUERIES, fused_backward_support, short_backward_support
from ..kernel_arguments import FlashAttentionParams, device_guard
from .delta import allocate_row_statistics, compute_delta_and_lse_base_2
from .distance_bias import distance_table, num_bands
from .dkdv import hopper_dkdv
from .documents import document_bounds, document_tile_order, with_empty_tail
from .dq import hopper_dq
from .forward import hopper_forward
from .fused_backward import hopper_fused_backward
from .launch_cache import TileDescriptor, launch_kernel
from .lse_forward import hopper_lse
from .short_backward import hopper_short_backward
from .supported_calls import make_tma_compatible
from .tile_scheduler import concurrent_heads, paired_tile_order, tile_order

LOG2E = 1.4426950408889634
_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
_SUMS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=4)
_ROW = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


class QueryTileConfig(NamedTuple):
    """Queries and keys of a consumer's tile, pipeline stages of keys and values, and consumer warp groups."""

    queries: int
    keys: int
    stages: int
    consumers: int = 2

    def constants(self) -> dict[str, int]:
        """Return the constexpr arguments of the kernels."""
        return {"BLOCK_M": self.queries, "BLOCK_N": self.keys, "STAGES": self.stages}


class KeyTileConfig(NamedTuple):
    """Queries and keys of a consumer's tile, stages of queries, tiles of keys per program, and their stages."""

    queries: int
    keys: int
    stages: int
    tiles: int = 2
    key_stages: int = 2

    def constants(self) -> dict[str, int]:
        """Return the constexpr arguments of the kernel."""
        names = ("BLOCK_M", "BLOCK_N", "STAGES", "TILES", "KEY_STAGES")
        return dict(zip(names, self, strict=True))


_FORWARD = {64: QueryTileConfig(64, 128, 2), 128: QueryTileConfig(64, 128, 2), 256: QueryTileConfig(64, 64, 2)}
# three consumers if registers suffice: not with slopes or frequent bias lookups; nor causal, where masked edges grow
_FORWARD_FULL = _FORWARD | {64: QueryTileConfig(64, 128, 2, consumers=3)}
_MANY_KEYS = 4096
_DQ = {64: QueryTileConfig(64, 128, 2), 128: QueryTileConfig(64, 64, 2), 256: QueryTileConfig(64, 64, 1)}
_DQ_SLOPES = _DQ | {64: QueryTileConfig(64, 64, 3)}  # slope sums over a wider tile need too many registers
_DKDV = {
    64: KeyTileConfig(64, 64, 2),
    128: KeyTileConfig(64, 64, 2),
    256: KeyTileConfig(64, 64, 2, tiles=1, key_stages=1),
}
# all gradients in one kernel; with 256 columns the accumulators do not fit
_FUSED = {64: KeyTileConfig(128, 64, 2, key_stages=1), 128: KeyTileConfig(64, 64, 2, key_stages=1)}
_LSE = {
    64: QueryTileConfig(64, 128, 4, consumers=3),
    128: QueryTileConfig(64, 128, 4, consumers=3),
    256: QueryTileConfig(64, 64, 3, consumers=3),
}
_DKDV_DISTANCE = _DKDV | {
    128: KeyTileConfig(64, 64, 2, key_stages=1)
}  # diagonal sums need the shared memory of a stage


def _row_tiles(tensor: Tensor, rows: int) -> TileDescriptor:
    """Return the TMA descriptor of tiles of `rows` rows of a tensor (batch, rows, heads, head_dim)."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    if 1 in shape:  # the stride of a dimension of size 1 is arbitrary, but TMA checks it
        strides = [stride if size > 1 else shape[-1] for stride, size in zip(strides, shape, strict=True)]
    return TileDescriptor(tensor, shape, strides, [1, rows, 1, shape[-1]], _TILE)


def _order_of_queries(
    q: Tensor, k: Tensor, blocks: QueryTileConfig, causal: bool, begins: Tensor | None = None
) -> Tensor:
    batch, queries, heads, head_dim = q.shape
    keys, groups = k.shape[1:3]
    rows = blocks.consumers * blocks.queries
    concurrent = concurrent_heads(heads // groups, 2 * keys * head_dim * q.element_size(), causal)
    if begins is not None:
        return document_tile_order(begins, rows, blocks.keys, heads, concurrent, by_keys=False)
    return tile_order(False, queries, keys, rows, blocks.keys, causal, batch * heads, concurrent, q.device)


def _order_of_keys(q: Tensor, k: Tensor, blocks: KeyTileConfig, causal: bool, ends: Tensor | None = None) -> Tensor:
    batch, queries, heads, head_dim = q.shape
    keys, groups = k.shape[1:3]
    rows = blocks.tiles * blocks.keys
    concurrent = concurrent_heads(1, 2 * queries * head_dim * q.element_size() * (heads // groups), causal)
    if ends is not None:
        return document_tile_order(ends, rows, blocks.queries, groups, concurrent, by_keys=True)
    return tile_order(True, queries, keys, rows, blocks.queries, causal, batch * groups, concurrent, q.device)


def _forward_blocks(head_dim: int, queries: int, keys: int, problem: FlashAttentionParams) -> QueryTileConfig:
    frequent_bias = problem.alibi_slopes is not None or (problem.distance_bias is not None and keys < _MANY_KEYS)
    two_suffice = queries <= 2 * _FORWARD[head_dim].queries
    return (_FORWARD if problem.right == 0 or frequent_bias or two_suffice else _FORWARD_FULL)[head_dim]


def _distance(problem: FlashAttentionParams) -> tuple[Tensor | None, int, int]:
    """Return table, reach and extent of the distance bias, see `distance_table`."""
    if problem.distance_bias is None:
        return None, 0, 0
    table, extent = distance_table(problem.distance_bias, problem.scale)
    return table, problem.distance_bias.shape[1] // 2, extent


def as_one_batch(problem: FlashAttentionParams, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return packed tensors with a first dimension of 1 and an empty tail, others as they are."""
    ends = problem.cu_seqlens_q
    return tensors if ends is None else tuple(with_empty_tail(tensor, ends)[None] for tensor in tensors)


def _documents(problem: FlashAttentionParams, rows: int) -> tuple[Tensor, Tensor] | None:
    return None if problem.cu_seqlens_q is None else document_bounds(problem.cu_seqlens_q, rows)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, problem: FlashAttentionParams) -> tuple[Tensor, Tensor]:
    """Compute the output, like `q` and contiguous, and the log-sum-exp, (batch, heads, queries) or (heads, rows)."""
    out = q.new_empty(q.shape)
    lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32)
    q, k, v = (make_tma_compatible(tensor) for tensor in as_one_batch(problem, q, k, v))
    _, queries, heads, head_dim = q.shape
    keys, groups = k.shape[1:3]
    documents = _documents(problem, queries)
    causal = problem.right == 0
    blocks = _forward_blocks(head_dim, queries, keys, problem)
    order = _order_of_queries(q, k, blocks, causal, documents and documents[0])
    table, reach, extent = _distance(problem)
    with device_guard(q):
        launch_kernel(hopper_forward, len(order), q.dtype, q.device, dict(
            q_descriptor=_row_tiles(q, blocks.queries),
            k_descriptor=_row_tiles(k, blocks.keys),
            v_descriptor=_row_tiles(v, blocks.keys),
            out_descriptor=_row_tiles(out.view(q.shape), blocks.queries),
            lse_pointer=lse,
            distance_pointer=lse if table is None else table,
            slopes_pointer=lse if problem.alibi_slopes is None else problem.alibi_slopes.contiguous(),
            sinks_pointer=lse if problem.sinks is None else problem.sinks.contiguous(),
            begins_pointer=order if documents is None else documents[0],
            order_pointer=order,
            order_width=order.shape[1],
            heads=heads,
            heads_per_group=heads // groups,
            queries=queries,
            keys=keys,
            scale=problem.scale * LOG2E,
            reach=reach,
            extent=extent,
            **blocks.constants(),
            CONSUMERS=blocks.consumers,
            HEAD_DIM=head_dim,
            CAUSAL=causal,
            HAS_DISTANCE=table is not None,
            HAS_SLOPE=problem.alibi_slopes is not None,
            HAS_SINK=problem.sinks is not None,
            DOCUMENTS=documents is not None,
            SEPARATE_OUT=head_dim <= 128,
        ))  # fmt: skip
    return out, lse


def launch_lse_(lse: Tensor, q: Tensor, k: Tensor, *, shift: int | None, scale: float, merge: bool) -> None:
    """Write the log-sum-exp to `lse` (batch, heads, queries), or merge it; `shift` is None without a causal mask."""
    q, k = make_tma_compatible(q), make_tma_compatible(k)
    queries, heads, head_dim = q.shape[1:]
    keys, groups = k.shape[1:3]
    blocks = _LSE[head_dim]
    order = _order_of_queries(q, k, blocks, shift == keys - queries)
    with device_guard(q):
        launch_kernel(hopper_lse, len(order), q.dtype, q.device, dict(
            q_descriptor=_row_tiles(q, blocks.queries),
            k_descriptor=_row_tiles(k, blocks.keys),
            lse_pointer=lse,
            order_pointer=order,
            order_width=order.shape[1],
            heads=heads,
            heads_per_group=heads // groups,
            queries=queries,
            offset=shift or 0,
            keys=keys,
            scale=scale * LOG2E,
            **blocks.constants(),
            HEAD_DIM=head_dim,
            CAUSAL=shift is not None,
            MERGE=merge,
        ))  # fmt: skip


class HopperBackwardInputs(NamedTuple):
    """Inputs of the backward kernels.

    `out` is contiguous; `lse` (natural) is (batch, heads, queries) and so is `lse_gradient`, or None for 0; `base_2`,
    `delta` and `zeros` are from `compute_delta_and_lse_base_2`; `zeros` is None where `launch_dq` writes the other two;
    `distance` is from `_distance`, `documents` from `document_bounds`, None if not packed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    out_gradient: Tensor
    lse: Tensor
    lse_gradient: Tensor | None
    base_2: Tensor
    delta: Tensor
    zeros: Tensor | None
    distance: tuple[Tensor | None, int, int]
    documents: tuple[Tensor, Tensor] | None


def prepare_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, out_gradient: Tensor, lse_gradient: Tensor | None,
    problem: FlashAttentionParams, *, begins_with_dq: bool,
) -> HopperBackwardInputs:  # fmt: skip
    """Return the inputs of the backward kernels.

    Row statistics are left to `launch_dq` if the backward begins with it and its kernel has the registers to compute
    them: for 256 dimensions and for slopes its loop would spill.
    """
    q, k, v, out_gradient = (make_tma_compatible(tensor) for tensor in (q, k, v, out_gradient))
    out, lse_gradient = out.contiguous(), None if lse_gradient is None else lse_gradient.contiguous()
    if begins_with_dq and q.shape[3] <= 128 and problem.alibi_slopes is None:
        (delta, base_2), zeros = allocate_row_statistics(lse), None
    else:
        delta, base_2, zeros = compute_delta_and_lse_base_2(out, lse, out_gradient, lse_gradient)
    distance, documents = _distance(problem), _documents(problem, q.shape[1])
    return HopperBackwardInputs(
        q, k, v, out, out_gradient, lse, lse_gradient, base_2, delta, zeros, distance, documents
    )


def launch_dq(
    saved: HopperBackwardInputs, problem: FlashAttentionParams, gradient: Tensor, *,
    correct_delta: bool, far_sums: bool, slope_sums: bool,
) -> Tensor | None:  # fmt: skip
    """Compute the gradient of q; with `far_sums` or `slope_sums` return the row sums of `hopper_dq`.

    `gradient` may be a slice along heads of a contiguous tensor. `saved.base_2` and `saved.delta` are written if
    `saved.zeros` is None; `correct_delta`, implied by both, corrects the latter.
    """
    q, k = saved.q, saved.k
    batch, queries, heads, head_dim = q.shape
    keys, groups = k.shape[1:3]
    table, reach, extent = saved.distance
    blocks, causal = (_DQ_SLOPES if slope_sums else _DQ)[head_dim], problem.right == 0
    order = _order_of_queries(q, k, blocks, causal, saved.documents and saved.documents[0])
    row_sums = saved.lse.new_empty(batch, heads, queries) if far_sums or slope_sums else None
    with device_guard(q):
        launch_kernel(hopper_dq, len(order), q.dtype, q.device, dict(
            q_descriptor=_row_tiles(q, blocks.queries),
            k_descriptor=_row_tiles(k, blocks.keys),
            v_descriptor=_row_tiles(saved.v, blocks.keys),
            do_descriptor=_row_tiles(saved.out_gradient, blocks.queries),
            dq_descriptor=_row_tiles(gradient, blocks.queries),
            out_pointer=saved.out,
            lse_pointer=saved.lse,
            lse_gradient_pointer=saved.lse if saved.lse_gradient is None else saved.lse_gradient,
            base_2_pointer=saved.base_2,
            delta_pointer=saved.delta,
            distance_pointer=saved.lse if table is None else table,
            slopes_pointer=saved.lse if problem.alibi_slopes is None else problem.alibi_slopes.contiguous(),
            row_sums_pointer=saved.lse if row_sums is None else row_sums,
            begins_pointer=order if saved.documents is None else saved.documents[0],
            order_pointer=order,
            order_width=order.shape[1],
            heads=heads,
            heads_per_group=heads // groups,
            queries=queries,
            pitch=saved.delta.shape[2],
            keys=keys,
            scale=problem.scale,
            scale_log2=problem.scale * LOG2E,
            reach=reach,
            extent=extent,
            **blocks.constants(),
            HEAD_DIM=head_dim,
            CAUSAL=causal,
            HAS_DISTANCE=table is not None,
            HAS_SLOPE=problem.alibi_slopes is not None,
            CORRECT_DELTA=correct_delta or far_sums or slope_sums,
            HAS_LSE_GRADIENT=saved.lse_gradient is not None,
            FAR_SUMS=far_sums,
            SLOPE_SUMS=slope_sums,
            SEPARATE_OUT=head_dim <= 128,
            ROW_STATISTICS=saved.zeros is None,
            DOCUMENTS=saved.documents is not None,
        ))  # fmt: skip
    return row_sums


def _operands_of_keys(saved: HopperBackwardInputs, query_rows: int, key_rows: int) -> dict[str, TileDescriptor]:
    """Return the descriptors of what a kernel over tiles of keys loads, by argument."""
    batch, queries, heads, _ = saved.q.shape
    rows = {"q": (saved.q, query_rows), "k": (saved.k, key_rows), "v": (saved.v, key_rows)}
    rows["do"] = (saved.out_gradient, query_rows)
    found = {f"{name}_descriptor": _row_tiles(tensor, count) for name, (tensor, count) in rows.items()}
    for name, numbers in (("lse", saved.base_2), ("delta", saved.delta)):
        shape, strides = [batch * heads, queries], [numbers.shape[2], 1]
        found[f"{name}_descriptor"] = TileDescriptor(numbers, shape, strides, [1, query_rows], _ROW)
    return found


def launch_dkdv(
    saved: HopperBackwardInputs, problem: FlashAttentionParams, k_gradient: Tensor, v_gradient: Tensor, *,
    diagonals: bool,
) -> Tensor | None:  # fmt: skip
    """Compute the gradients of k and v, like `launch_dq`; with `diagonals` return the sums of `store_diagonals`."""
    q, k = saved.q, saved.k
    batch, queries, heads, head_dim = q.shape
    keys, groups = k.shape[1:3]
    table, reach, extent = saved.distance
    blocks, causal = (_DKDV_DISTANCE if diagonals else _DKDV)[head_dim], problem.right == 0
    order = _order_of_keys(q, k, blocks, causal, saved.documents and saved.documents[1])
    bands, key_blocks = num_bands(reach), -(-keys // (blocks.tiles * blocks.keys)) * blocks.tiles
    sums = saved.lse.new_zeros(batch, heads, key_blocks, bands, 128) if diagonals else None
    with device_guard(q):
        launch_kernel(hopper_dkdv, len(order), q.dtype, q.device, dict(
            **_operands_of_keys(saved, blocks.queries, blocks.keys),
            dk_pointer=k_gradient,
            dv_pointer=v_gradient,
            distance_pointer=saved.lse if table is None else table,
            slopes_pointer=saved.lse if problem.alibi_slopes is None else problem.alibi_slopes.contiguous(),
            diagonals_pointer=saved.lse if sums is None else sums,
            ends_pointer=order if saved.documents is None else saved.documents[1],
            order_pointer=order,
            order_width=order.shape[1],
            groups=groups,
            row_heads=k_gradient.stride(1) // head_dim,
            heads_per_group=heads // groups,
            query_tiles=-(-queries // blocks.queries),
            queries=queries,
            keys=keys,
            scale=problem.scale,
            scale_log2=problem.scale * LOG2E,
            reach=reach,
            extent=extent,
            bands=bands,
            key_blocks=key_blocks,
            **blocks.constants(),
            HEAD_DIM=head_dim,
            CAUSAL=causal,
            HAS_DISTANCE=table is not None,
            HAS_SLOPE=problem.alibi_slopes is not None,
            DIAGONALS=diagonals,
            DOCUMENTS=saved.documents is not None,
        ))  # fmt: skip
    return sums


def fused_order(q: Tensor, k: Tensor, problem: FlashAttentionParams) -> Tensor | None:
    """Return the tile order of `launch_fused_backward`; None for calls that the other kernels are to take."""
    (batch, queries), head_dim = q.shape[:2], q.shape[3]
    keys, groups = k.shape[1:3]
    causal = problem.right == 0
    relative_bias = problem.distance_bias is not None or problem.alibi_slopes is not None
    if not fused_backward_support(
        head_dim, queries, keys, causal=causal, relative_bias=relative_bias, atomic=problem.atomic
    ):
        return None
    if causal:
        return paired_tile_order(keys // 128, batch * groups, q.device)
    return _order_of_keys(q, k, _FUSED[head_dim], causal)


def launch_fused_backward(
    saved: HopperBackwardInputs, problem: FlashAttentionParams, order: Tensor, q_gradient: Tensor, k_gradient: Tensor,
    v_gradient: Tensor,
) -> None:  # fmt: skip
    """Compute the gradients of q, k and v, like `launch_dq`; `order` is from `fused_order`."""
    q, k = saved.q, saved.k
    queries, heads, head_dim = q.shape[1:]
    keys, groups = k.shape[1:3]
    blocks, causal = _FUSED[head_dim], problem.right == 0
    sums = saved.lse.new_zeros(q.shape) if problem.atomic and not causal else saved.lse.new_empty(q.shape)
    with device_guard(q):
        launch_kernel(hopper_fused_backward, len(order), q.dtype, q.device, dict(
            **_operands_of_keys(saved, blocks.queries, blocks.keys),
            sums_descriptor=TileDescriptor(sums, list(sums.shape), list(sums.stride()), [1, 64, 1, 64], _SUMS),
            dq_descriptor=TileDescriptor(q_gradient, list(q.shape), list(q_gradient.stride()), [1, 64, 1, 64], _TILE),
            dk_pointer=k_gradient,
            dv_pointer=v_gradient,
            turns_pointer=saved.zeros,
            order_pointer=order,
            order_width=order.shape[1],
            groups=groups,
            row_heads=k_gradient.stride(1) // head_dim,
            heads_per_group=heads // groups,
            query_tiles=-(-queries // blocks.queries),
            queries=queries,
            keys=keys,
            scale=problem.scale,
            scale_log2=problem.scale * LOG2E,
            BLOCK_M=blocks.queries,
            STAGES=blocks.stages,
            HEAD_DIM=head_dim,
            CAUSAL=causal,
            ORDERED=not problem.atomic,
        ), cooperative=True)  # fmt: skip


_SHORT = KeyTileConfig(MAX_SHORT_QUERIES, 64, 2)  # two blocks of queries per tile, and stages of keys


def uses_short_backward(q: Tensor, k: Tensor, problem: FlashAttentionParams) -> bool:
    """Return True if `launch_short_backward` computes the gradients."""
    (batch, queries, heads, head_dim), groups = q.shape, k.shape[2]
    relative_bias = problem.distance_bias is not None or problem.alibi_slopes is not None
    causal = problem.right == 0
    return short_backward_support(head_dim, queries, batch, heads, groups, causal=causal, relative_bias=relative_bias)


def launch_short_backward(
    saved: HopperBackwardInputs, problem: FlashAttentionParams, q_gradient: Tensor, k_gradient: Tensor,
    v_gradient: Tensor,
) -> None:  # fmt: skip
    """Compute the gradients of q, k and v, like `launch_dq`, where `uses_short_backward`."""
    q, k, blocks = saved.q, saved.k, _SHORT
    (batch, queries, heads, head_dim), keys = q.shape, k.shape[1]
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    programs = min(batch * heads, processors)
    with device_guard(q):
        launch_kernel(hopper_short_backward, programs, q.dtype, q.device, dict(
            **_operands_of_keys(saved, blocks.queries, blocks.keys),
            dq_descriptor=_row_tiles(q_gradient, 64),
            dk_pointer=k_gradient,
            dv_pointer=v_gradient,
            heads=heads,
            pairs=batch * heads,
            row_heads=k_gradient.stride(1) // head_dim,
            key_tiles=-(-keys // (2 * blocks.keys)),
            queries=queries,
            keys=keys,
            scale=problem.scale,
            scale_log2=problem.scale * LOG2E,
            BLOCK_M=blocks.queries,
            BLOCK_N=blocks.keys,
            STAGES=blocks.stages,
            HEAD_DIM=head_dim,
        ))  # fmt: skip
