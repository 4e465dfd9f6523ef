"""Fused multi-tensor AdamW step with fp32 main weights and gradient clipping.

On a GPU one kernel reads the gradient, the main weight and both moments, and writes back the main weight, the moments
and the 16-bit weight: 28 bytes per parameter instead of 40 for separate cast, update and copy. All tensors of the same
dtypes share one launch, since launches dominate for small tensors. Decoupled weight decay as in arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from ..launch import jit, rounded, tl, triton_runs_on
from .multi_tensor import build_tensor_table, element_offsets, find_tensor, is_aligned, load_array_pointer, triton_dtype

BLOCK = 1024
"""Elements per program."""


class AdamWOptions(TypedDict):
    """Hyperparameters and state of a step.

    Attributes:
        lr: learning rate of this step.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay, multiplied by `lr`.
        step: 1-based step number for the bias corrections; a scalar fp64 tensor, because skipped steps make it
            unknown to the host.
        grad_scale: scalar fp32 factor of every gradient (the clip coefficient); a negative one skips the update. On
            the kernel path `step` and `grad_scale` are not read on the host.
        lr_scales: learning rate factor of each tensor, not applied to weight decay, (tensors,) on the device; None or
            left out for 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Tensor
    grad_scale: Tensor
    lr_scales: NotRequired[Tensor | None]


# ---------------------------------------------------------------- reference


def reference_adamw_step(
    params: Sequence[Tensor],
    main: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    **options: Unpack[AdamWOptions],
) -> None:
    """Reference in plain PyTorch: computed in the dtype of the moments, in torch.optim.AdamW's order of operations."""
    lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
    grad_scale, lr_scales = options["grad_scale"], options.get("lr_scales")
    if grad_scale < 0:
        return
    step_number = options["step"].item()
    correction1 = 1 - beta1**step_number
    correction2_root = (1 - beta2**step_number) ** 0.5
    tensors = zip(params, main, grads, exp_avgs, exp_avg_sqs, strict=True)
    for index, (param, target, grad, exp_avg, exp_avg_sq) in enumerate(tensors):
        weight = target.to(exp_avg.dtype)
        scaled = grad.to(weight.dtype) * grad_scale.to(weight.dtype)
        weight.mul_(1 - lr * options["weight_decay"])
        exp_avg.lerp_(scaled, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(scaled, scaled, value=1 - beta2)
        denominator = (exp_avg_sq.sqrt() / correction2_root).add_(options["eps"])
        if lr_scales is not None:
            denominator.div_(lr_scales[index].to(denominator.dtype))
        weight.addcdiv_(exp_avg, denominator, value=-lr / correction1)
        if target is not weight:
            target.copy_(weight)
        if param is not target:
            param.copy_(weight)


# ---------------------------------------------------------------- Triton


@jit(do_not_specialize=["tensors", "search_steps"])
def _adamw_kernel(
    table_pointer,
    tensors,
    search_steps,
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
    """Update BLOCK elements of one tensor per program.

    Shapes: table (8, tensors) int64, whose columns after the size are the index of the tensor's step size and the
    addresses of its five arrays; step_size (different step sizes,); one element behind each of the other pointers.

    1 - beta is computed on the host: in fp32 it would be off by 5e-5 for beta2 = 0.999.
    """
    tensor = find_tensor(table_pointer, tensors, search_steps)
    offsets, size = element_offsets(table_pointer, tensors, tensor, BLOCK, ALIGNED)
    step_size_index = tl.load(table_pointer + 2 * tensors + tensor)
    main_pointer = load_array_pointer(table_pointer, tensors, tensor, 4, MAIN, ALIGNED)
    grad_pointer = load_array_pointer(table_pointer, tensors, tensor, 5, GRAD, ALIGNED)
    exp_avg_pointer = load_array_pointer(table_pointer, tensors, tensor, 6, EXP_AVG, ALIGNED)
    exp_avg_sq_pointer = load_array_pointer(table_pointer, tensors, tensor, 7, EXP_AVG_SQ, ALIGNED)
    grad_scale = tl.load(grad_scale_pointer)
    step_size = tl.load(step_size_pointer + step_size_index)
    correction2_root = tl.load(correction2_root_pointer)
    # a negative scale skips the step: every load and store is masked
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
        param_pointer = load_array_pointer(table_pointer, tensors, tensor, 3, PARAM, ALIGNED)
        tl.store(param_pointer + offsets, rounded(weight, PARAM), mask=inside)


def triton_adamw_step(
    params: Sequence[Tensor],
    main: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    **options: Unpack[AdamWOptions],
) -> None:
    """Launch the kernel once per group of tensors with the same dtypes; all but the gradients must be contiguous.

    Tensors that are not aligned for vectorized loads get a launch of their own, so that the others keep these loads.
    """
    lr, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
    step, lr_scales = options["step"], options.get("lr_scales")
    step_size = (lr / (1 - beta1**step)).float()
    if lr_scales is not None:
        step_size = step_size * lr_scales.float()
    correction2_root = (1 - beta2**step).sqrt().float()
    grads = [grad.contiguous() for grad in grads]  # copies must live until the kernel is launched
    groups: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for index, arrays in enumerate(zip(params, main, grads, exp_avgs, exp_avg_sqs, strict=True)):
        size, addresses = arrays[1].numel(), [tensor.data_ptr() for tensor in arrays]
        if size:
            dtypes = tuple([tensor.dtype for tensor in arrays])
            group = (dtypes, addresses[0] != addresses[1], is_aligned(size, *addresses))
            groups.setdefault(group, []).append((size, 0 if lr_scales is None else index, *addresses))
    for (dtypes, separate, aligned), rows in groups.items():
        table = build_tensor_table(rows, BLOCK, main[0].device)
        _adamw_kernel[(table.num_programs,)](
            table.columns,
            table.num_tensors,
            table.search_steps,
            options["grad_scale"],
            step_size,
            correction2_root,
            1 - lr * options["weight_decay"],
            1 - beta1,
            beta2,
            1 - beta2,
            options["eps"],
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
    **options: Unpack[AdamWOptions],
) -> None:
    """Update weights and moments in place.

    Args:
        params: model weights, any float dtype, each contiguous.
        main: main weights that the update is computed on; `main[i] is params[i]` without a separate copy.
        grads: gradients, same shapes, any float dtype.
        exp_avgs: first moments, dtype of `main` or fp32.
        exp_avg_sqs: second moments, of the same dtype.
        options: see `AdamWOptions`.
    """
    if not params:
        return
    step_function = triton_adamw_step if triton_runs_on(params[0]) else reference_adamw_step
    step_function(params, main, grads, exp_avgs, exp_avg_sqs, **options)
