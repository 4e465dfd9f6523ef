"""Grouped matmul of rows sorted by expert with the matrix of their expert, and its gradients, without host syncs.

Three backends: our Triton kernels, which also fuse gather and activation; torch's grouped matmul (CUTLASS on sm_90 and
later, where it is the fastest for bf16: docs/benchmarks.md); a loop over the experts, which reads their ends on the
host and supports every device and dtype.
R rows, E experts; expert e has the rows from ends[e - 1] to ends[e].
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_op import custom_op
from ..launch import INTERPRETED, device_capability, triton, triton_runs_on
from .grouped_kernels import grouped_matmul_kernel, grouped_outer_kernel
from .tile_configs import has_few_rows, is_aligned, tile_config
from .tile_map import Tiles, find_tiles

Backend = Literal["auto", "triton", "torch", "loop"]

torch_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
"""torch's grouped matmul, public from 2.10 on."""

_NO_CUTLASS = (70, 72, 75, 80, 86, 87, 89)
"""Compute capabilities for which torch loops over the experts and synchronizes with the host."""


# ---------------------------------------------------------------- Triton


def _programs(device: torch.device, tiles: int, resident: int) -> int:
    """Return the programs of a persistent launch: as many as run concurrently on the device."""
    if INTERPRETED:
        return min(tiles, 3)
    return min(tiles, resident * torch.cuda.get_device_properties(device).multi_processor_count)


def _precision(dtype: torch.dtype) -> str:
    """Return the input precision of `tl.dot`, following `torch.set_float32_matmul_precision` for fp32."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


def row_tiles(ends: Tensor, rows: int, dtype: torch.dtype, *widths: int) -> Tiles:
    """Return the tiles of `triton_grouped_matmul` for these ends and operands of these widths."""
    low, aligned = has_few_rows(rows, len(ends)), is_aligned(*widths)
    config = tile_config("rows", dtype, device_capability(ends.device), few_rows=low, aligned=aligned)
    return find_tiles(ends, rows, config.block_m)


def triton_grouped_matmul(
    left: Tensor,
    matrices: Tensor,
    ends: Tensor,
    tiles: Tiles,
    *,
    order: Tensor | None = None,
    topk: int = 1,
    bias: Tensor | None = None,
    activation: str = "",
    gated: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Multiply each row by the matrix of its expert; rows after the last expert's are 0.

    Args:
        left: (R, K); with `order` (T, K), where row r reads token order[r] // topk.
        matrices: (E, K, N), any strides.
        ends: exclusive end row of each expert, (E,) int32.
        tiles: tiles of these ends, from `row_tiles`.
        order: assignment of each row, (R,) int32, to gather rows from tokens.
        topk: k.
        bias: (E, N), added in fp32.
        activation: nonlinearity whose result is returned as well, "" for none.
        gated: the result is [gate | up], and the activated one act(gate) * up.

    Returns:
        (R, N), and with `activation` the activated rows, (R, N), gated (R, N / 2), else None.
    """
    left = left if left.stride(-1) == 1 else left.contiguous()
    bias = None if bias is None else bias.contiguous()
    experts, depth, wide = matrices.shape
    width = wide // 2 if gated else wide
    rows = len(left) if order is None else len(order)
    out = left.new_empty(rows, wide)
    active = left.new_empty(rows, width) if activation else None
    if not out.numel():
        return out, active
    config = tile_config(
        "gated" if gated else "activated" if activation else "rows",
        left.dtype,
        device_capability(left.device),
        aligned=is_aligned(depth, width, left.stride(0)),
        exact_gelu=activation == "gelu",
    )
    max_tiles = len(tiles.experts) * triton.cdiv(width, config.block_n)
    grid = (_programs(left.device, max_tiles, config.programs_per_sm),)
    grouped_matmul_kernel[grid](
        left,
        order,
        matrices,
        bias,
        out,
        active,
        ends,
        tiles.experts,
        tiles.rows,
        tiles.num_tiles,
        rows,
        experts,
        width,
        depth,
        topk,
        left.stride(0),
        *matrices.stride(),
        GATHER=order is not None,
        BIAS=bias is not None,
        GATED=gated,
        ACTIVATION=activation,
        PRECISION=_precision(left.dtype),
        EVEN_DEPTH=depth % config.block_k == 0,
        EVEN_WIDTH=width % config.block_n == 0,
        GROUP_M=config.group_m,
        BLOCK_M=tiles.block,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    return out, active


def triton_grouped_outer(
    left: Tensor,
    right: Tensor,
    ends: Tensor,
    tiles: Tiles,
    *,
    order: Tensor | None = None,
    topk: int = 1,
    gather: Literal["left", "right", ""] = "",
) -> Tensor:
    """Sum left[r]^T right[r] over the rows r of each expert: (E, M, N), 0 for an expert without rows.

    Args:
        left: (R, M).
        right: (R, N).
        ends: exclusive end row of each expert, (E,) int32.
        tiles: tiles of these ends, from `row_tiles`.
        order: assignment of each row, (R,) int32.
        topk: k.
        gather: operand that is (T, ...) instead, where row r reads token order[r] // topk.
    """
    left, right = (x if x.stride(-1) == 1 else x.contiguous() for x in (left, right))
    height, width = left.shape[1], right.shape[1]
    out = left.new_empty(len(ends), height, width)
    if not out.numel():
        return out
    aligned = is_aligned(height, width, left.stride(0), right.stride(0))
    config = tile_config("outer", left.dtype, device_capability(left.device), aligned=aligned)
    grid = (len(ends) * triton.cdiv(height, config.block_m) * triton.cdiv(width, config.block_n),)
    grouped_outer_kernel[grid](
        left,
        right,
        order,
        out,
        ends,
        tiles.experts_by_load,
        height,
        width,
        topk,
        left.stride(0),
        right.stride(0),
        GATHER_LEFT=gather == "left",
        GATHER_RIGHT=gather == "right",
        PRECISION=_precision(left.dtype),
        EVEN_HEIGHT=height % config.block_m == 0,
        EVEN_WIDTH=width % config.block_n == 0,
        GROUP_M=config.group_m,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    return out


# ---------------------------------------------------------------- torch


def loop_rows(left: Tensor, matrices: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `triton_grouped_matmul` without gather by a loop over the experts; reads the ends on the host."""
    out = left.new_zeros(len(left), matrices.shape[2])
    first = 0
    for expert, end in enumerate(ends.tolist()):
        rows, matrix, result = left[first:end], matrices[expert], out[first:end]
        if bias is None:
            torch.mm(rows, matrix, out=result)
        else:
            torch.addmm(bias[expert], rows, matrix, out=result)
        first = end
    return out


def loop_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Compute `triton_grouped_outer` without gather by a loop over the experts; reads the ends on the host."""
    out = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    first = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(left[first:end].t(), right[first:end], out=out[expert])
        first = end
    return out


def _zero_after(out: Tensor, ends: Tensor) -> Tensor:
    """Zero the rows after the last expert's."""
    rows = torch.arange(len(out), device=out.device, dtype=ends.dtype)
    return torch.where((rows < ends[-1])[:, None], out, 0)


# ---------------------------------------------------------------- custom operations


@custom_op("stoker::grouped_matmul")
def _grouped_matmul(left: Tensor, matrices: Tensor, ends: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    if not len(left):
        return left.new_empty(0, matrices.shape[2])
    backend = resolve_backend(backend, left, *matrices.shape[1:])
    if backend == "torch" and bias is not None:  # it could add the bias to rounded products only
        backend = "triton" if triton_runs_on(left) else "loop"
    if backend == "triton":
        tiles = row_tiles(ends, len(left), left.dtype, *matrices.shape[1:])
        return triton_grouped_matmul(left, matrices, ends, tiles, bias=bias)[0]
    if backend == "torch":
        return _zero_after(torch_grouped_mm(left.contiguous(), matrices, offs=ends), ends)
    return loop_rows(left, matrices, ends, bias)


@torch.library.register_fake("stoker::grouped_matmul")
def _(left: Tensor, matrices: Tensor, ends: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    return left.new_empty(left.shape[0], matrices.shape[2])


@custom_op("stoker::grouped_outer")
def _grouped_outer(left: Tensor, right: Tensor, ends: Tensor, backend: str) -> Tensor:
    if not len(left):
        return left.new_zeros(len(ends), left.shape[1], right.shape[1])
    backend = resolve_backend(backend, left, left.shape[1], right.shape[1])
    if backend == "triton":
        widths = left.shape[1], right.shape[1]
        return triton_grouped_outer(left, right, ends, row_tiles(ends, len(left), left.dtype, *widths))
    if backend == "torch":
        return torch_grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends).contiguous()
    return loop_outer(left, right, ends)


@torch.library.register_fake("stoker::grouped_outer")
def _(left: Tensor, right: Tensor, ends: Tensor, backend: str) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    left, matrices, ends = ctx.saved_tensors
    left_gradient = bias_gradient = None
    if ctx.needs_input_grad[0]:
        left_gradient = _grouped_matmul(gradient, matrices.transpose(1, 2), ends, None, ctx.backend)
    if not ctx.needs_input_grad[1]:  # frozen
        matrix_gradient = None
    elif matrices.stride(1) == 1:  # a transposed parameter: return the gradient in the layout of the parameter
        matrix_gradient = _grouped_outer(gradient, left, ends, ctx.backend).transpose(1, 2)
    else:
        matrix_gradient = _grouped_outer(left, gradient, ends, ctx.backend)
    if ctx.needs_input_grad[3]:  # the sum over rows as a product with ones: deterministic
        ones = gradient.new_ones(1, 16).expand(gradient.shape[0], 16)
        bias_gradient = _grouped_outer(gradient, ones, ends, ctx.backend)[:, :, 0]
    return left_gradient, matrix_gradient, None, bias_gradient, None


torch.library.register_autograd("stoker::grouped_matmul", _backward, setup_context=_save)


# ---------------------------------------------------------------- public function


def grouped_matmul(
    left: Tensor, matrices: Tensor, ends: Tensor, *, backend: Backend, bias: Tensor | None = None
) -> Tensor:
    """Multiply each row by the matrix of its expert, and add the bias of its expert.

    Args:
        left: rows sorted by expert, (R, K).
        matrices: (E, K, N), same dtype, any strides.
        ends: exclusive end row of each expert, (E,) int32, ascending; ends[-1] may be less than R.
        backend: `triton` (16-bit and fp32 on CUDA), `torch` (if its grouped matmul supports the operands), `loop`
            (any), `auto` (`torch` where supported, else `triton`). torch's grouped matmul adds no bias: with one,
            `torch` is `triton` where that runs, else `loop`.
        bias: (E, N), same dtype, or None.

    Returns:
        (R, N), accumulated in fp32 (fp64) with the bias and rounded once; rows after ends[-1] are 0, whatever `left`
        holds there. Differentiable once with respect to `left`, `matrices` and `bias`; the gradients of an expert
        without rows are 0.

    Raises:
        ValueError: shapes or dtypes do not match, or the backend is not supported.
    """
    if left.ndim != 2 or matrices.ndim != 3 or left.shape[1] != matrices.shape[1]:
        shapes = f"{tuple(left.shape)} and {tuple(matrices.shape)}"
        raise ValueError(f"`left` and `matrices` must be (R, K) and (E, K, N), but are {shapes}.")
    if matrices.dtype != left.dtype:
        raise ValueError(f"`matrices` ({matrices.dtype}) must have the dtype of `left` ({left.dtype}).")
    if ends.shape != matrices.shape[:1] or ends.dtype != torch.int32:
        raise ValueError(f"`ends` {tuple(ends.shape)} of {ends.dtype} must be ({len(matrices)},) of int32.")
    if bias is not None and (bias.shape != matrices.shape[::2] or bias.dtype != left.dtype):
        wanted = f"{tuple(matrices.shape[::2])} of {left.dtype}"
        raise ValueError(f"`bias` {tuple(bias.shape)} of {bias.dtype} must be {wanted}.")
    reason = unsupported_reason(backend, left, matrices.shape[1], matrices.shape[2])
    if reason:
        raise ValueError(f"`backend` ({backend}) {reason}.")
    return _grouped_matmul(left, matrices, ends, bias, backend)


def resolve_backend(backend: str, tensor: Tensor, *widths: int) -> str:
    """Resolve `auto` for tensors like this one; called inside custom ops, where the device is real."""
    if backend != "auto":
        return backend
    return "torch" if tensor.is_cuda and unsupported_reason("torch", tensor, *widths) is None else "triton"


def _loops_in_torch(device: torch.device) -> bool:
    """Return True if torch has no grouped kernel for a device; False under torch.compile, which cannot query it."""
    return not torch.compiler.is_compiling() and device_capability(device) in _NO_CUTLASS


def unsupported_reason(backend: Backend, tensor: Tensor, *widths: int) -> str | None:
    """Return the reason why a backend does not support tensors like this one, or None if it does.

    Args:
        backend: see `grouped_matmul`.
        tensor: an operand; its device and dtype are checked.
        widths: row lengths of all operands and results.
    """
    if backend in ("auto", "triton"):
        supported = triton_runs_on(tensor) or (INTERPRETED and tensor.is_cpu and tensor.dtype != torch.float64)
        return (
            None if supported else f"needs Triton and fp32, bf16 or fp16 on CUDA, not {tensor.dtype} on {tensor.device}"
        )
    if backend == "torch":
        if torch_grouped_mm is None:
            return "needs a torch with a grouped matmul"
        if tensor.dtype == torch.float64:
            return f"cannot multiply {tensor.dtype}"
        if tensor.is_cuda and (tensor.dtype != torch.bfloat16 or _loops_in_torch(tensor.device)):
            return f"needs bf16 on a GPU of sm_90 or later, not {tensor.dtype} on {tensor.device}"
        odd = [width for width in widths if width * tensor.itemsize % 16]
        return f"needs rows of a multiple of 16 bytes, not {odd[0]} of {tensor.dtype}" if odd else None
    return None if backend == "loop" else "must be one of auto, triton, torch, loop"
