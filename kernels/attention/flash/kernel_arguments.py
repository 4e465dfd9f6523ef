"""Parameters of a flash attention call, kernel arguments derived from them, and the tile list of packed sequences."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dropout import dropout_threshold
from ...launch import device_capability, next_power_of_2, tl
from ..argument_checks import AttentionGeometry
from ..inputs import AttentionInputs
from .portable.tile_configs import KernelKind, TileConfig, tile_config

# offsets within a tile are computed in 32 bits: at most 256 rows with this stride
MAX_ROW_STRIDE = 1 << 22
# of a window that only chunks bound: more than any length, and sums of two of them are below 2^31
UNBOUNDED = 1 << 30


class FlashAttentionParams(NamedTuple):
    """Parameters of a checked call besides q, k and v; see `AttentionInputs`.

    `left` and `right` are the window with `causal` folded in, -1 for unbounded. `max_queries` and `max_keys` are the
    lengths of a dense call, or upper bounds for a packed one. `attention_chunk` is 0 for one chunk. With `atomic` the
    gradient of the queries may be added up in the order of arrival.
    """

    bias: Tensor | None
    distance_bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    key_padding_mask: Tensor | None
    rng: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    left: int
    right: int
    scale: float
    softcap: float
    dropout_p: float
    max_queries: int
    max_keys: int
    attention_chunk: int = 0
    atomic: bool = False

    @classmethod
    def from_checked(
        cls, inputs: AttentionInputs, sizes: AttentionGeometry, *, atomic: bool = False
    ) -> FlashAttentionParams:
        """Build from inputs and the result of `check_arguments`."""
        return cls(
            inputs.bias, inputs.distance_bias, inputs.alibi_slopes, inputs.sinks, inputs.key_padding_mask, inputs.rng,
            inputs.cu_seqlens_q, inputs.cu_seqlens_k, sizes.left, sizes.right, sizes.scale, float(inputs.softcap),
            float(inputs.dropout_p), sizes.queries, sizes.keys, sizes.chunk, atomic,
        )  # fmt: skip

    @property
    def packed(self) -> bool:
        """True if the tensors are packed, (total, heads, head_dim)."""
        return self.cu_seqlens_q is not None

    def batch_size(self, q: Tensor) -> int:
        """Number of sequences."""
        return q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


def with_contiguous_rows(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its last dimension is strided or its row stride is too large."""
    if tensor.stride(-1) == 1 and abs(tensor.stride(-3)) <= MAX_ROW_STRIDE:
        return tensor
    return tensor.contiguous()


def stride_arguments(name: str, tensor: Tensor) -> dict[str, int]:
    """Return the strides of batch, rows and heads as keyword arguments; the batch stride of a packed tensor is 0."""
    batch = tensor.stride(0) if tensor.ndim == 4 else 0
    return {f"stride_{name}b": batch, f"stride_{name}s": tensor.stride(-3), f"stride_{name}h": tensor.stride(-2)}


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64 tensors (interpreter only), else fp32."""
    return torch.promote_types(dtype, torch.float32)


def select_config(kind: KernelKind, q: Tensor, v: Tensor, problem: FlashAttentionParams) -> TileConfig:
    """Return the launch configuration of a kernel for these tensors, that of the wider heads."""
    dense_bias = problem.bias is not None
    return tile_config(kind, max(q.shape[-1], v.shape[-1]), q.dtype, device_capability(q.device), dense_bias=dense_bias)


def launch_options(config: TileConfig) -> dict[str, Any]:
    """Return the launch options and tile sizes of a config as keyword arguments."""
    return {
        "BLOCK_M": config.queries,
        "BLOCK_N": config.keys,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,
    }


def device_guard(tensor: Tensor) -> AbstractContextManager[Any]:
    """Device guard: make the tensor's GPU the current device, on which kernels are launched."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def tile_list(cu_seqlens: Tensor, rows: int, block: int) -> Tensor:
    """List the tiles of `block` rows of packed sequences, computed on the device without synchronization.

    Empty sequences have no tile, so padding of `cu_seqlens` costs no programs.

    Args:
        cu_seqlens: int32 (sequences + 1).
        rows: rows of the packed tensor, which bounds the number of tiles.
        block: rows per tile.

    Returns:
        int32 (1 + bound, 2): the number of tiles and 0, then for each tile its sequence and first row within it.
    """
    sequences = cu_seqlens.shape[0] - 1
    bound = rows // block + min(sequences, rows)
    tiles = (cu_seqlens.diff() + (block - 1)) // block
    ends = tiles.cumsum(0)
    tile = torch.arange(bound, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, tile, right=True).clamp_(max=sequences - 1)
    first = (tile - (ends - tiles)[sequence]) * block
    count = torch.stack([ends[-1], torch.zeros_like(ends[-1])])
    return torch.cat([count[None], torch.stack([sequence, first], dim=1)]).int()


def tile_schedule(cu_seqlens: Tensor | None, rows: int, block: int, sequences: int) -> tuple[Tensor | None, int]:
    """Return the tile list of packed sequences, None if dense, and the number of programs per head.

    One program per tile if dense; if packed, about the number of tiles of long sequences.
    """
    if cu_seqlens is None:
        return None, -(-rows // block) * sequences
    tiles = tile_list(cu_seqlens, rows, block)
    return tiles, min(len(tiles) - 1, 2 * -(-rows // block))


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _dropout_rng(rng: Tensor | None) -> Tensor | None:
    """Return `rng` with first places, which are 0 if not given."""
    return rng if rng is None or len(rng) == 5 else F.pad(rng, (0, 3))


def common_kernel_arguments(q: Tensor, k: Tensor, v: Tensor, problem: FlashAttentionParams) -> dict[str, Any]:
    """Return the keyword arguments common to all forward and backward kernels: no outputs, tile lists or configs."""
    heads, head_dim, value_dim = q.shape[-2], q.shape[-1], v.shape[-1]
    bias, distance_bias, padding = problem.bias, problem.distance_bias, problem.key_padding_mask
    slopes = problem.alibi_slopes
    accumulate = accumulator_dtype(q.dtype)
    if bias is not None:
        # keys contiguous: another layout would cost many more loads, and change summation order and results
        bias = bias if bias.stride(-1) == 1 or bias.shape[-1] == 1 else bias.contiguous()
        bias = bias.expand(q.shape[0], heads, problem.max_queries, problem.max_keys)
    exact = q.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return {
        "q_pointer": q,
        "k_pointer": k,
        "v_pointer": v,
        "bias_pointer": bias,
        "distance_pointer": None if distance_bias is None else distance_bias.to(accumulate).contiguous(),
        "slopes_pointer": None if slopes is None else slopes.to(accumulate).contiguous(),
        "padding_pointer": None if padding is None else padding.contiguous().view(torch.uint8),
        "rng_pointer": _dropout_rng(problem.rng) if problem.dropout_p else None,
        "cu_seqlens_q": _contiguous(problem.cu_seqlens_q),
        "cu_seqlens_k": _contiguous(problem.cu_seqlens_k),
        **stride_arguments("q", q),
        **stride_arguments("k", k),
        **stride_arguments("v", v),
        **dict(
            zip(
                ("stride_bias_b", "stride_bias_h", "stride_bias_q", "stride_bias_k"),
                (0, 0, 0, 0) if bias is None else bias.stride(),
                strict=True,
            )
        ),
        "heads": heads,
        "rows": q.shape[-3],
        "max_queries": problem.max_queries,
        "max_keys": problem.max_keys,
        "left": UNBOUNDED if problem.left < 0 and problem.attention_chunk else problem.left,
        "right": problem.right,
        "chunk": problem.attention_chunk or None,
        "reach": 0 if distance_bias is None else distance_bias.shape[1] // 2,
        "scale": problem.scale,
        "softcap": problem.softcap,
        "keep_scale": 1 / (1 - problem.dropout_p),
        "threshold": dropout_threshold(problem.dropout_p),
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "VALUE_DIM": value_dim,
        "BLOCK_V": max(16, next_power_of_2(value_dim)),
        "HAS_LEFT": problem.left >= 0 or problem.attention_chunk > 0,
        "HAS_CHUNK": problem.attention_chunk > 0,
        "HAS_RIGHT": problem.right >= 0,
        "HAS_SOFTCAP": problem.softcap > 0,
        "HAS_BIAS": bias is not None,
        "HAS_DISTANCE": distance_bias is not None,
        "HAS_SLOPE": slopes is not None,
        "HAS_PADDING": padding is not None,
        "HAS_DROPOUT": problem.dropout_p > 0,
        "PACKED": problem.packed,
        "ACCUMULATE": tl.float64 if accumulate == torch.float64 else tl.float32,
        "PRECISION": "ieee" if exact else "tf32",
    }
