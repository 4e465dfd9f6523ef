"""One AdamW step over a list of tensors, with fp32 main weights and the clip coefficient folded in.

On a GPU one pass reads the gradient, the main weight and both moments, and writes back the three and the 16-bit weight:
28 bytes a parameter instead of 40 for cast, update and copy. All tensors of the same dtypes take one launch, which is
most of the time where they are small. Decoupled weight decay as in arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..interpreter_rounding import rounded
from ..launch import jit, tl, triton_runs_on
from .multi_tensor import array_of_tensor, elements_of_program, is_aligned, table_of, tensor_of_program, triton_dtype

BLOCK = 1024
"""Elements of a program."""

# ---------------------------------------------------------------- reference


def reference_adamw_step(
    params: Sequence[Tensor],
    main: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    grad_scale: Tensor,
    rates: Tensor | None = None,
) -> None:
    """The update in plain torch: arithmetic in the dtype of `main`, in torch.optim.AdamW's order of operations."""
    if grad_scale < 0:
        return
    number = step.item()
    correction1 = 1 - beta1**number
    correction2_root = (1 - beta2**number) ** 0.5
    tensors = zip(params, main, grads, exp_avgs, exp_avg_sqs, strict=True)
    for index, (param, weight, grad, exp_avg, exp_avg_sq) in enumerate(tensors):
        scaled = grad.to(weight.dtype) * grad_scale.to(weight.dtype)
        weight.mul_(1 - lr * weight_decay)
        exp_avg.lerp_(scaled, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        denominator = (exp_avg_sq.sqrt() / correction2_root).add_(eps)
        if rates is not None:
            denominator.div_(rates[index].to(denominator.dtype))
        weight.addcdiv_(exp_avg, denominator, value=-lr / correction1)
        if param is not weight:
            param.copy_(weight)


# ---------------------------------------------------------------- Triton


@jit(do_not_specialize=["tensors", "halvings"])
def _adamw_kernel(
    table_pointer,
    tensors,
    halvings,
    grad_scale_pointer,
    step_size_pointer,
    correction2_root_pointer,
    decay_factor,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    PARAM: tl.constexpr,
    MAIN: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    SEPARATE_MAIN: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program updates BLOCK elements of one tensor.

    Shapes: table (8, tensors) int64, after the size which of the step sizes is the tensor's, then the addresses of its
    five arrays; step size (of different ones,); the others one element.

    1 - beta comes from the host: formed here in fp32 it would be off by 5e-5 for beta2 = 0.999.
    """
    tensor = tensor_of_program(table_pointer, tensors, halvings)
    offsets, size = elements_of_program(table_pointer, tensors, tensor, BLOCK, ALIGNED)
    rate = tl.load(table_pointer + 2 * tensors + tensor)
    main_pointer = array_of_tensor(table_pointer, tensors, tensor, 4, MAIN, ALIGNED)
    grad_pointer = array_of_tensor(table_pointer, tensors, tensor, 5, GRAD, ALIGNED)
    exp_avg_pointer = array_of_tensor(table_pointer, tensors, tensor, 6, EXP_AVG, ALIGNED)
    exp_avg_sq_pointer = array_of_tensor(table_pointer, tensors, tensor, 7, EXP_AVG_SQ, ALIGNED)
    grad_scale = tl.load(grad_scale_pointer)
    step_size = tl.load(step_size_pointer + rate)
    correction2_root = tl.load(correction2_root_pointer)
    inside = offsets < tl.where(grad_scale >= 0, size, 0)
    grad = tl.load(grad_pointer + offsets, mask=inside).to(tl.float32) * grad_scale
    weight = tl.load(main_pointer + offsets, mask=inside).to(tl.float32)
    exp_avg = tl.load(exp_avg_pointer + offsets, mask=inside).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_pointer + offsets, mask=inside).to(tl.float32)
    exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * one_minus_beta2
    denominator = tl.sqrt(exp_avg_sq) / correction2_root + eps
    weight = weight * decay_factor - step_size * exp_avg / denominator
    tl.store(main_pointer + offsets, rounded(weight, MAIN), mask=inside)
    tl.store(exp_avg_pointer + offsets, rounded(exp_avg, EXP_AVG), mask=inside)
    tl.store(exp_avg_sq_pointer + offsets, rounded(exp_avg_sq, EXP_AVG_SQ), mask=inside)
    if SEPARATE_MAIN:
        param_pointer = array_of_tensor(table_pointer, tensors, tensor, 3, PARAM, ALIGNED)
        tl.store(param_pointer + offsets, rounded(weight, PARAM), mask=inside)


def triton_adamw_step(
    params: Sequence[Tensor],
    main: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    grad_scale: Tensor,
    rates: Tensor | None = None,
) -> None:
    """The kernel over all tensors of the same dtypes at once; contiguous tensors only, but for the gradients.

    Tensors for which vector instructions do not serve are a launch of their own, lest the others do without them.
    """
    step_size = (lr / (1 - beta1**step)).float()
    if rates is not None:
        step_size = step_size * rates.float()
    correction2_root = (1 - beta2**step).sqrt().float()
    grads = [grad.contiguous() for grad in grads]  # copies must live until the kernel is launched
    rows: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for index, arrays in enumerate(zip(params, main, grads, exp_avgs, exp_avg_sqs, strict=True)):
        size, addresses = arrays[1].numel(), [tensor.data_ptr() for tensor in arrays]
        if size:
            dtypes = tuple([tensor.dtype for tensor in arrays])
            kind = (dtypes, addresses[0] != addresses[1], is_aligned(size, *addresses))
            rows.setdefault(kind, []).append((size, 0 if rates is None else index, *addresses))
    for (dtypes, separate, aligned), of_kind in rows.items():
        table = table_of(of_kind, BLOCK, main[0].device)
        _adamw_kernel[(table.programs,)](
            table.columns,
            table.tensors,
            table.halvings,
            grad_scale,
            step_size,
            correction2_root,
            1 - lr * weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            *(triton_dtype(dtype) for dtype in dtypes),
            SEPARATE_MAIN=separate,
            ALIGNED=aligned,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )


# ---------------------------------------------------------------- public function


@torch.no_grad()
def adamw_step(
    params: Sequence[Tensor],
    main: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: Tensor,
    grad_scale: Tensor,
    rates: Tensor | None = None,
) -> None:
    """Update weights and moments in place.

    Args:
        params: the weights the model uses, any float dtype, each contiguous.
        main: the weights the arithmetic is done on; `main[i] is params[i]` where there is no separate copy.
        grads: gradients, same shapes, any float dtype.
        exp_avgs: running means of the gradients, dtype of `main`.
        exp_avg_sqs: running means of their squares, dtype of `main`.
        lr: learning rate of this step.
        beta1: decay of the running mean.
        beta2: decay of the running square.
        eps: added to the root of the running square.
        weight_decay: decoupled weight decay; times `lr`.
        step: number of this step, from 1, for the bias corrections; a scalar fp64 tensor, as the host does not know it
            where steps may be skipped.
        grad_scale: scalar fp32 tensor every gradient is multiplied by (the clip coefficient); a negative one leaves
            everything as it is. Where the kernel runs the host reads neither of the two.
        rates: for each tensor a factor of its learning rate, not of its weight decay, [number of tensors] on the
            device; None: 1.
    """
    if not params:
        return
    step_function = triton_adamw_step if triton_runs_on(params[0]) else reference_adamw_step
    step_function(
        params,
        main,
        grads,
        exp_avgs,
        exp_avg_sqs,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
        rates=rates,
    )
