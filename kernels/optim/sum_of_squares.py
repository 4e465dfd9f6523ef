"""The sum of squares of many tensors in one launch, for the norm of all gradients, at the speed of memory.

Each program leaves one partial sum, and torch adds these up in an order that is always the same. Without atomics the
same tensors give the same bits, as long as they are as aligned as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..launch import jit, tl
from .multi_tensor import array_of_tensor, elements_of_program, is_aligned, table_of, tensor_of_program, triton_dtype

BLOCK = 8192
"""Elements of a program: 16 KB of bf16, four 16-byte loads of each thread that wait for none of the others."""

# ---------------------------------------------------------------- reference


def reference_sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """In plain torch, in fp64."""
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()


# ---------------------------------------------------------------- Triton


@jit(do_not_specialize=["tensors", "halvings"])
def sum_of_squares_kernel(
    table_pointer,
    partial_pointer,
    tensors,
    halvings,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program sums up to BLOCK elements of one tensor.

    Shapes: table (3, tensors) int64, the last column an address; partial (programs,) fp32.
    """
    tensor = tensor_of_program(table_pointer, tensors, halvings)
    offsets, size = elements_of_program(table_pointer, tensors, tensor, BLOCK, ALIGNED)
    pointer = array_of_tensor(table_pointer, tensors, tensor, 2, DTYPE, ALIGNED)
    values = tl.load(pointer + offsets, mask=offsets < size, other=0.0).to(tl.float32)
    tl.store(partial_pointer + tl.program_id(0), tl.sum(values * values, axis=0))


# ---------------------------------------------------------------- public function


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, in fp32; not finite where one of them is not.

    Args:
        tensors: of any float dtype up to fp32 and of any shapes, on one device that runs Triton; at least one. Those
            that are not contiguous are copied.

    Returns:
        A scalar fp32 tensor.
    """
    tensors = [tensor.contiguous() for tensor in tensors]  # copies must live until the kernel is launched
    device = tensors[0].device
    rows: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
    for tensor in tensors:
        size, address = tensor.numel(), tensor.data_ptr()
        if size:
            rows.setdefault((tensor.dtype, is_aligned(size, address)), []).append((size, address))
    tables = [table_of(of_kind, BLOCK, device) for of_kind in rows.values()]
    partial = torch.empty(sum(table.programs for table in tables), dtype=torch.float32, device=device)
    places = partial.split([table.programs for table in tables])
    for (dtype, aligned), table, place in zip(rows, tables, places, strict=True):
        sum_of_squares_kernel[(table.programs,)](
            table.columns,
            place,
            table.tensors,
            table.halvings,
            DTYPE=triton_dtype(dtype),
            ALIGNED=aligned,
            BLOCK=BLOCK,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return partial.sum()
