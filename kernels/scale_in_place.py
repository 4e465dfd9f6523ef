"""In-place multiplication by a device scalar, without memory traffic if the scalar is 1.

The output gradient of a loss is usually 1 in training, but only the device knows its value: a plain multiplication
would read and write everything to change nothing, and checking on the host would synchronize.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, tl, triton_runs_on

BLOCK = 2048
MAX_PROGRAMS = 1024  # about one wave on a large GPU: with a factor of 1 all programs return at once

# ---------------------------------------------------------------- reference


def reference_scale(tensor: Tensor, factor: Tensor) -> Tensor:
    """Reference in plain PyTorch, out of place: in the dtype of `tensor`, 16-bit inputs multiplied in fp32."""
    return (tensor * factor).to(tensor.dtype)


# ---------------------------------------------------------------- Triton


@jit
def scale_kernel(tensor_pointer, factor_pointer, size, rounds, stride, BLOCK: tl.constexpr):
    """Multiply BLOCK elements per round and program, in a grid-stride loop.

    tensor_pointer: flat array of `size` elements; factor_pointer: one element; stride: elements of all programs.
    """
    factor = tl.load(factor_pointer).to(tl.float32)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        for _ in range(rounds):
            inside = offsets < size
            product = tl.load(tensor_pointer + offsets, mask=inside, other=0.0).to(tl.float32) * factor
            tl.store(tensor_pointer + offsets, product.to(tensor_pointer.dtype.element_ty), mask=inside)
            offsets += stride


def triton_scale_(tensor: Tensor, factor: Tensor) -> None:
    """Multiply a dense tensor by a scalar on its device, in place, without bumping autograd's version counter.

    Args:
        tensor: any shape, dense in memory; fp32, bf16 or fp16.
        factor: one element, of any floating dtype.
    """
    size = tensor.numel()
    if size == 0:
        return
    blocks = -(-size // BLOCK)
    programs = min(blocks, MAX_PROGRAMS)
    rounds = -(-blocks // programs)
    scale_kernel[(programs,)](tensor, factor, size, rounds, programs * BLOCK, BLOCK=BLOCK, num_warps=8)


# ---------------------------------------------------------------- applicability


def can_scale_in_place(tensor: Tensor) -> bool:
    """Return True if a backward pass may scale a saved tensor with `triton_scale_`.

    Not while tracing, where tensors may be fake and kernel launches are not recorded, nor under double backward.
    """
    traced = type(tensor) is not Tensor or torch.compiler.is_compiling()
    return triton_runs_on(tensor) and not traced and not torch.is_grad_enabled()
