"""A tensor times a scalar of the device, in place, and without a pass over it where the scalar is 1.

The gradient that comes to a loss from above is 1 in training, but only the device knows that, and the host does not
wait for it: a plain product would read and write everything to change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, tl, triton_runs_on

BLOCK = 2048
MOST_PROGRAMS = 1024  # about as many as a large GPU runs at once: where there is nothing to do, they end in one round

# ---------------------------------------------------------------- reference


def reference_scaled(tensor: Tensor, factor: Tensor) -> Tensor:
    """The product in plain torch, a new tensor: in the dtype of `tensor`, 16 bits multiplied in fp32."""
    return (tensor * factor).to(tensor.dtype)


# ---------------------------------------------------------------- Triton


@jit
def scale_kernel(tensor_pointer, factor_pointer, size, rounds, stride, BLOCK: tl.constexpr):
    """One program multiplies BLOCK of `size` numbers in each of its rounds, `stride` apart.

    tensor_pointer: flat array of `size` numbers; factor_pointer: one number.
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
    """Multiply a dense tensor by a scalar on its device, in place; autograd is not told.

    Args:
        tensor: any shape, without gaps in memory; fp32, bf16 or fp16.
        factor: one element, of any floating dtype.
    """
    size = tensor.numel()
    if size == 0:
        return
    blocks = -(-size // BLOCK)
    programs = min(blocks, MOST_PROGRAMS)
    rounds = -(-blocks // programs)
    scale_kernel[(programs,)](tensor, factor, size, rounds, programs * BLOCK, BLOCK=BLOCK, num_warps=8)


# ---------------------------------------------------------------- what may be scaled so


def scales_in_place(tensor: Tensor) -> bool:
    """Whether `triton_scale_` serves a tensor that a backward pass saved and gives away.

    Not where operations are traced: a tensor may have no memory then, and a kernel that is launched leaves no trace.
    Nor where the product is to be differentiated again.
    """
    traced = type(tensor) is not Tensor or torch.compiler.is_compiling()
    return triton_runs_on(tensor) and not traced and not torch.is_grad_enabled()
