"""One AdamW step over a list of tensors, with fp32 main weights and the clip coefficient folded in.

On a GPU one pass reads the gradient, the main weight and both moments, and writes back the three and the 16-bit weight:
28 bytes a parameter instead of 40 for cast, update and copy. Decoupled weight decay as in arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .launch import jit, tl, triton, triton_runs_on

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


@jit
def _adamw_kernel(
    param_pointer,
    main_pointer,
    grad_pointer,
    exp_avg_pointer,
    exp_avg_sq_pointer,
    grad_scale_pointer,
    step_size_pointer,
    correction2_root_pointer,
    decay_factor,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    size,
    SEPARATE_MAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program updates BLOCK elements; every pointer is a flat array of `size` elements, or of one for a scalar.

    1 - beta comes from the host: formed here in fp32 it would be off by 5e-5 for beta2 = 0.999.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad_scale = tl.load(grad_scale_pointer)
    step_size = tl.load(step_size_pointer)
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
    tl.store(main_pointer + offsets, weight.to(main_pointer.dtype.element_ty), mask=inside)
    tl.store(exp_avg_pointer + offsets, exp_avg.to(exp_avg_pointer.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_pointer + offsets, exp_avg_sq.to(exp_avg_sq_pointer.dtype.element_ty), mask=inside)
    if SEPARATE_MAIN:
        tl.store(param_pointer + offsets, weight.to(param_pointer.dtype.element_ty), mask=inside)


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
    """The kernel over each tensor in turn; contiguous tensors only."""
    block = 1024
    step_size = (lr / (1 - beta1**step)).float()
    step_sizes = [step_size] * len(params) if rates is None else (step_size * rates.float()).unbind()
    correction2_root = (1 - beta2**step).sqrt().float()
    for param, weight, grad, exp_avg, exp_avg_sq, size in zip(
        params, main, grads, exp_avgs, exp_avg_sqs, step_sizes, strict=True
    ):
        grad = grad.contiguous()
        _adamw_kernel[(triton.cdiv(weight.numel(), block),)](
            param,
            weight,
            grad,
            exp_avg,
            exp_avg_sq,
            grad_scale,
            size,
            correction2_root,
            1 - lr * weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            weight.numel(),
            SEPARATE_MAIN=param is not weight,
            BLOCK=block,
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
