"""Sum of what the ranks have sent and of this rank's own values, in fp32 and in the order of the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, tl, triton_runs_on

BLOCK = 4096

# ---------------------------------------------------------------- reference


def reference_sum_over_ranks(own: Tensor, received: Tensor, rank: int, output: Tensor) -> None:
    """Reference in plain PyTorch, with the arguments of `sum_over_ranks`."""
    dtype = torch.promote_types(own.dtype, torch.float32)
    total = torch.zeros_like(own, dtype=dtype)
    for number, values in enumerate(received):
        total += (own if number == rank else values).to(dtype)
    output.copy_(total)


# ---------------------------------------------------------------- Triton


@jit
def sum_over_ranks_kernel(
    own_pointer,
    received_pointer,
    output_pointer,
    size,
    row,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum BLOCK elements per program; `row` is the distance of the rows of what is received."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):  # unrolled
        if rank == RANK:
            total += tl.load(own_pointer + offsets, mask=inside, other=0.0).to(tl.float32)
        else:
            values = tl.load(received_pointer + rank * row + offsets, mask=inside, other=0.0)
            total += values.to(tl.float32)
    tl.store(output_pointer + offsets, total.to(output_pointer.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------- public function


def sum_over_ranks(own: Tensor, received: Tensor, rank: int, output: Tensor) -> None:
    """Write the sum of a vector over the ranks.

    Args:
        own: (n,), the values of this rank.
        received: (ranks, n), those of the others; the row of this rank is not read. Rows are contiguous.
        rank: this rank.
        output: (n,), of any floating dtype; the sum is rounded to it once.
    """
    if not triton_runs_on(own) or own.dtype == torch.float64:
        reference_sum_over_ranks(own, received, rank, output)
        return
    size = own.numel()
    sum_over_ranks_kernel[(-(-size // BLOCK),)](
        own, received, output, size, received.stride(0), RANK=rank, RANKS=len(received), BLOCK=BLOCK, num_warps=8
    )
