"""Multi-tensor sum of squares in one launch, for the global gradient norm, at memory bandwidth.

Each program writes one partial sum, and torch adds these in a fixed order. Without atomics the result is bitwise
reproducible for the same tensors with the same alignment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..launch import jit, tl
from .multi_tensor import element_offsets, find_tensor, is_aligned, load_array_pointer, table_of, triton_dtype

BLOCK = 8192
"""Elements per program: 16 KB of bf16, four independent 16-byte loads per thread."""

# ---------------------------------------------------------------- reference


def reference_sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Reference in plain PyTorch, in fp64."""
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()


# ---------------------------------------------------------------- Triton


@jit(do_not_specialize=["tensors", "search_steps"])
def sum_of_squares_kernel(
    table_pointer,
    partial_pointer,
    tensors,
    search_steps,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the squares of up to BLOCK elements of one tensor per program.

    Shapes: table (3, tensors) int64, whose last column holds addresses; partial (programs,) fp32.
    """
    tensor = find_tensor(table_pointer, tensors, search_steps)
    offsets, size = element_offsets(table_pointer, tensors, tensor, BLOCK, ALIGNED)
    pointer = load_array_pointer(table_pointer, tensors, tensor, 2, DTYPE, ALIGNED)
    values = tl.load(pointer + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    tl.store(partial_pointer + tl.program_id(0), tl.sum(values * values, axis=0))


# ---------------------------------------------------------------- public function


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, in fp32; non-finite elements make it non-finite.

    Args:
        tensors: at least one, of any float dtype up to fp32 and any shape, on one device that runs Triton;
            non-contiguous ones are copied.

    Returns:
        A scalar fp32 tensor.
    """
    tensors = [tensor.contiguous() for tensor in tensors]  # copies must live until the kernel is launched
    device = tensors[0].device
    groups: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
    for tensor in tensors:
        size, address = tensor.numel(), tensor.data_ptr()
        if size:
            groups.setdefault((tensor.dtype, is_aligned(size, address)), []).append((size, address))
    tables = [table_of(group, BLOCK, device) for group in groups.values()]
    partial = torch.empty(sum(table.programs for table in tables), dtype=torch.float32, device=device)
    partials = partial.split([table.programs for table in tables])
    for (dtype, aligned), table, table_partial in zip(groups, tables, partials, strict=True):
        sum_of_squares_kernel[(table.programs,)](
            table.columns,
            table_partial,
            table.tensors,
            table.search_steps,
            DTYPE=triton_dtype(dtype),
            ALIGNED=aligned,
            BLOCK=BLOCK,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return partial.sum()
