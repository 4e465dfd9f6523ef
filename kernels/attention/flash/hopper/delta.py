"""Row statistics for the backward kernels on Hopper, of which `dq` computes its own: delta, log-sum-exp in base 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....launch import jit, tl
from ..kernel_arguments import device_guard
from ..portable.tile import LOG2E
from .launch_cache import launch_kernel

_ROWS = 64
kernel: Any = jit(do_not_specialize=("stride_b", "stride_s", "stride_h", "heads", "rows", "pitch"))


@kernel
def hopper_delta(
    out_pointer, out_gradient_pointer, lse_pointer, lse_gradient_pointer, delta_pointer, base_2_pointer, zeros_pointer,
    stride_b, stride_s, stride_h, heads, rows, pitch,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, HAS_LSE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Each program computes delta = sum(out * dO) - dLSE and base_2 = lse * log2(e) of ROWS rows of a head.

    Fully masked rows get 0 and +inf. out: contiguous (batch, rows, heads, HEAD_DIM); the strides, of dO, are in units
    of eight elements (16 bytes). lse, and its gradient: (batch, heads, rows) fp32; delta and base_2: (batch, heads,
    pitch) fp32. zeros: int32, one per program.
    """
    tl.store(zeros_pointer + tl.program_id(0), 0)
    blocks = tl.cdiv(rows, ROWS)
    pair, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * ROWS
    sequence, head = (pair // heads).to(tl.int64), pair % heads
    row = first + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, HEAD_DIM)[None, :]
    out_rows = ((sequence * rows + row) * heads + head) * HEAD_DIM
    gradient_rows = (sequence * stride_b + row.to(tl.int64) * stride_s + head.to(tl.int64) * stride_h) * 8
    out = tl.load(out_pointer + out_rows[:, None] + column, mask=inside[:, None], other=0.0)
    gradient = tl.load(out_gradient_pointer + gradient_rows[:, None] + column, mask=inside[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * gradient.to(tl.float32), 1)
    lse_offset = pair.to(tl.int64) * rows + row
    lse = tl.load(lse_pointer + lse_offset, mask=inside, other=float("-inf"))
    if HAS_LSE_GRADIENT:
        delta -= tl.load(lse_gradient_pointer + lse_offset, mask=inside, other=0.0)
    out_offset = pair.to(tl.int64) * pitch + row
    empty = lse == float("-inf")
    tl.store(delta_pointer + out_offset, tl.where(empty, 0.0, delta), mask=inside)
    tl.store(base_2_pointer + out_offset, tl.where(empty, float("inf"), lse * LOG2E), mask=inside)


def allocate_row_statistics(lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for delta and the log-sum-exp in base 2, both (batch, heads, pitch) with pitch >= rows.

    The padding aligns each head to 16 bytes, as TMA requires.
    """
    batch, heads, rows = lse.shape
    delta, base_2 = (lse.new_empty(batch, heads, -(-rows // 4) * 4) for _ in range(2))
    return delta, base_2


def compute_delta_and_lse_base_2(
    out: Tensor, lse: Tensor, out_gradient: Tensor, lse_gradient: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute delta and the log-sum-exp in base 2, as from `allocate_row_statistics`.

    The third result is zeros for the counters of `hopper_fused_backward`, int32 (batch, heads, rows / 64 rounded up).

    Args:
        out: contiguous (batch, rows, heads, head_dim).
        lse: (batch, heads, rows), natural.
        out_gradient: like `out`, from `make_tma_compatible`.
        lse_gradient: like `lse`, contiguous; None for 0.
    """
    batch, rows, heads, head_dim = out.shape
    delta, base_2 = allocate_row_statistics(lse)
    zeros = torch.empty(batch, heads, -(-rows // _ROWS), dtype=torch.int32, device=out.device)
    # the stride of a dimension of size 1 is arbitrary
    strides = [stride // 8 if size > 1 else 0 for stride, size in zip(out_gradient.stride(), out.shape, strict=True)]
    with device_guard(out):
        launch_kernel(hopper_delta, -(-rows // _ROWS) * batch * heads, out.dtype, out.device, {
            "out_pointer": out,
            "out_gradient_pointer": out_gradient,
            "lse_pointer": lse,
            "lse_gradient_pointer": lse if lse_gradient is None else lse_gradient,
            "delta_pointer": delta,
            "base_2_pointer": base_2,
            "zeros_pointer": zeros,
            "stride_b": strides[0],
            "stride_s": strides[1],
            "stride_h": strides[2],
            "heads": heads,
            "rows": rows,
            "pitch": delta.shape[2],
            "HEAD_DIM": head_dim,
            "ROWS": _ROWS,
            "HAS_LSE_GRADIENT": lse_gradient is not None,
        })  # fmt: skip
    return delta, base_2, zeros
