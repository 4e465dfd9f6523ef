"""Output projection and cross-entropy in one operation, chunk by chunk over the tokens.

The logits of the whole batch never exist in fp32: each chunk is projected, turned into its own gradient in place and
multiplied back at once, so the backward pass only gives them away. Three matrix products in all, as without fusion
(the idea of Liger Kernel, arXiv 2410.10989; chunks here are kept large enough for full GEMM speed). What the sum of
losses is to be divided by goes into the gradient of the logits: nothing is left then to multiply the others with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cross_entropy_kernels import torch_loss_and_gradient, triton_loss_and_gradient_
from .launch import next_power_of_2, sums_wide, triton_runs_on
from .scale_in_place import reference_scaled, scales_in_place, triton_scale_

CPU_CHUNK_BYTES = 32 << 20  # stays near the cache of a laptop
GPU_CHUNK_BYTES = 512 << 20  # 16-bit logits; GEMMs keep thousands of rows up to a vocabulary of 128 k


# ---------------------------------------------------------------- reference


def reference_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    valid_vocab: int,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    denominator: Tensor | None = None,
) -> Tensor:
    """The same value in plain torch with all logits at once: the truth of the tests."""
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = F.linear(hidden, weight[:valid_vocab], None if bias is None else bias[:valid_vocab]).to(accumulate)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    if label_smoothing:
        of_all = -logits.log_softmax(dim=-1)[labels != ignore_index].sum()
        loss = (1 - label_smoothing) * loss + label_smoothing / (valid_vocab - 1) * (of_all - loss)
    return loss if denominator is None else loss / denominator


# ---------------------------------------------------------------- custom operation


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of 16-bit matrices to an fp32 one, in place."""
    torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


@torch.library.custom_op("stoker::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    valid_vocab: int,
    ignore_index: int,
    chunk_tokens: int,
    with_gradient: bool,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    softcap: float = 0.0,
    frozen: bool = False,
    denominator: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum of losses over `denominator`, and its gradients by `hidden`, `weight` and `bias` (empty unless asked for).

    With `frozen` those of `weight` and `bias` are empty in any case.
    """
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    use_triton = triton_runs_on(hidden)
    total = torch.zeros((), dtype=accumulate, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden) if with_gradient else hidden.new_empty(0)
    one_chunk = chunk_tokens >= len(hidden)
    in_matmul = not one_chunk and sums_in_matmul(*weight.shape, width=hidden.element_size(), cuda=use_triton)
    bias_sum = None if bias is None or frozen else torch.zeros(bias.shape, dtype=accumulate, device=bias.device)
    weight_sum: Tensor | None = None
    for start in range(0, len(hidden), chunk_tokens):
        part = hidden[start : start + chunk_tokens]
        part_labels = labels[start : start + chunk_tokens]
        if use_triton:
            logits = F.linear(part, weight, bias)
            losses = triton_loss_and_gradient_(
                logits,
                part_labels,
                valid_vocab=valid_vocab,
                ignore_index=ignore_index,
                with_gradient=with_gradient,
                smoothing=smoothing,
                softcap=softcap,
                denominator=denominator,
            )
            gradient, rows = logits, weight
        else:
            rows = weight[:valid_vocab]
            losses, gradient = torch_loss_and_gradient(
                F.linear(part, rows, None if bias is None else bias[:valid_vocab]),
                part_labels,
                valid_vocab=valid_vocab,
                ignore_index=ignore_index,
                with_gradient=with_gradient,
                smoothing=smoothing,
                softcap=softcap,
                denominator=denominator,
            )
        total += losses.sum(dtype=accumulate)
        if with_gradient:
            if bias_sum is not None:
                bias_sum[: gradient.shape[1]] += gradient.sum(dim=0, dtype=accumulate)
            gradient = gradient.to(hidden.dtype)
            torch.mm(gradient, rows, out=hidden_gradient[start : start + chunk_tokens])
            if frozen:
                continue
            if one_chunk:
                weight_sum = gradient.t() @ part
            elif weight_sum is None and in_matmul:
                weight_sum = torch.mm(gradient.t(), part, out_dtype=torch.float32)
            elif weight_sum is None:
                weight_sum = (gradient.t() @ part).to(accumulate)
            elif in_matmul:
                _add_product_(weight_sum, gradient.t(), part)
            else:
                weight_sum += gradient.t() @ part
    if denominator is not None:
        total /= denominator
    if not with_gradient or frozen:
        return total, hidden_gradient, hidden.new_empty(0), hidden.new_empty(0)
    assert weight_sum is not None
    weight_gradient = weight_sum.to(weight.dtype)
    if len(weight_gradient) < len(weight):
        weight_gradient = F.pad(weight_gradient, (0, 0, 0, len(weight) - len(weight_gradient)))
    bias_gradient = hidden.new_empty(0) if bias is None or bias_sum is None else bias_sum.to(bias.dtype)
    return total, hidden_gradient, weight_gradient, bias_gradient


@_linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    valid_vocab: int,
    ignore_index: int,
    chunk_tokens: int,
    with_gradient: bool,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    softcap: float = 0.0,
    frozen: bool = False,
    denominator: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = hidden.new_empty((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    if not with_gradient:
        return total, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
    if frozen:
        return total, torch.empty_like(hidden), hidden.new_empty(0), hidden.new_empty(0)
    bias_gradient = hidden.new_empty(0) if bias is None else torch.empty_like(bias)
    return total, torch.empty_like(hidden), torch.empty_like(weight), bias_gradient


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.frozen = inputs[10]
    ctx.has_bias = inputs[7] is not None


def _scale_gradients(ctx: Any, loss_gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    gradients: tuple[Tensor, ...] = ctx.saved_tensors
    if scales_in_place(gradients[0]):
        for gradient in gradients:
            triton_scale_(gradient, loss_gradient)
        # whoever goes back through the graph a second time gets autograd's error, not the gradients scaled twice
        torch.autograd.graph.increment_version(gradients)
    else:
        gradients = tuple(reference_scaled(gradient, loss_gradient) for gradient in gradients)
    of_hidden, of_weight, of_bias = gradients
    if ctx.frozen:
        return (of_hidden, *(None,) * 11)
    return (of_hidden, of_weight, *(None,) * 5, of_bias if ctx.has_bias else None, *(None,) * 4)


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


# ---------------------------------------------------------------- public function


def default_chunk_tokens(vocab: int, *, cuda: bool) -> int:
    """Tokens per chunk: as many as keep one chunk of logits below a fixed size, at least 256 (2048 on a GPU)."""
    limit, smallest, width = (GPU_CHUNK_BYTES, 2048, 2) if cuda else (CPU_CHUNK_BYTES, 256, 4)
    return max(smallest, next_power_of_2(limit // (vocab * width) + 1) // 2)


def sums_in_matmul(vocab: int, hidden_size: int, *, width: int, cuda: bool) -> bool:
    """Whether the matmul itself adds up the products of chunks in fp32: on a GPU, for numbers of two bytes."""
    return cuda and width == 2 and sums_wide(vocab, hidden_size)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    valid_vocab: int,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    denominator: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum over tokens of the cross-entropy of softmax(hidden @ weight.T + bias) against `labels`.

    To divide it by `denominator` rather than to divide the result spares a pass over each gradient.

    Args:
        hidden: (tokens, hidden_size), fp64, fp32, bf16 or fp16.
        weight: (padded_vocab, hidden_size), same dtype.
        labels: (tokens,) int64, each below `valid_vocab` or `ignore_index`, which counts nothing. On a GPU any other
            label makes the loss NaN, on a CPU it raises RuntimeError.
        valid_vocab: rows of `weight` that are real tokens; the padding rows get probability 0 and gradient 0.
        bias: (padded_vocab,), same dtype; None for none.
        softcap: softcap * tanh(logit / softcap) takes the place of each logit; 0 for none.
        label_smoothing: e in [0, 1); the target is 1 - e at the label and e / (valid_vocab - 1) at each other token
            (Megatron's form; `torch.nn.functional.cross_entropy` gives a share to the label too).
        ignore_index: the label to leave out.
        denominator: what the sum is divided by, a scalar of any dtype on the device of the others, not differentiated;
            None for 1. In fp16 a large one makes gradients vanish.
        chunk_tokens: tokens projected at once; None: by vocabulary and device.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs), differentiable once in `hidden`, `weight` and `bias`: on a GPU
        a second backward pass through the same graph raises RuntimeError.

    Raises:
        ValueError: shapes do not fit, `valid_vocab` is not in 1..padded_vocab, `softcap` is negative, or
            `label_smoothing` not in [0, 1), or there is no other token to smooth over,
            or `denominator` is no scalar.
    """
    if hidden.ndim != 2 or labels.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"`hidden`, `weight`, `labels` must be (t, h), (v, h) and (t,), but are {shapes}.")
    if not 1 <= valid_vocab <= len(weight):
        raise ValueError(f"`valid_vocab` ({valid_vocab}) must be from 1 to the rows of `weight` ({len(weight)}).")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"`bias` {tuple(bias.shape)} must be (v,) with the {len(weight)} rows of `weight`.")
    if softcap < 0:
        raise ValueError(f"`softcap` ({softcap}) must be 0, for none, or a positive number.")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"`label_smoothing` ({label_smoothing}) must be at least 0 and less than 1.")
    if label_smoothing and valid_vocab == 1:
        raise ValueError(f"`label_smoothing` ({label_smoothing}) must be 0 with a single token.")
    if denominator is not None and denominator.ndim:
        raise ValueError(f"`denominator` must be a scalar, but is of shape {tuple(denominator.shape)}.")
    # spread over all tokens, the label's own share goes back to it
    over_all = label_smoothing * valid_vocab / (valid_vocab - 1) if label_smoothing else 0.0
    chunk = chunk_tokens or default_chunk_tokens(len(weight), cuda=hidden.is_cuda)
    learns = weight.requires_grad or (bias is not None and bias.requires_grad)
    return _linear_cross_entropy(
        hidden,
        weight,
        labels,
        valid_vocab,
        ignore_index,
        chunk,
        torch.is_grad_enabled() and (learns or hidden.requires_grad),
        bias,
        over_all,
        softcap,
        not learns,
        denominator,
    )[0]
