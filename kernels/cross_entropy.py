"""Output projection and cross-entropy in one operation, chunk by chunk over the tokens.

The logits of the whole batch never exist in fp32: each chunk is projected, turned into its own gradient in place and
multiplied back at once, so the backward pass only scales two tensors. Three matrix products in all, as without fusion
(the idea of Liger Kernel, arXiv 2410.10989; chunks here are kept large enough for full GEMM speed).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import jit, next_power_of_2, tl, triton_runs_on

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
) -> Tensor:
    """The same value in plain torch with all logits at once: the truth of the tests."""
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = F.linear(hidden, weight[:valid_vocab], None if bias is None else bias[:valid_vocab]).to(accumulate)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    if not label_smoothing:
        return loss
    of_all = -logits.log_softmax(dim=-1)[labels != ignore_index].sum()
    return (1 - label_smoothing) * loss + label_smoothing / (valid_vocab - 1) * (of_all - loss)


# ---------------------------------------------------------------- Triton


@jit
def _capped(logit, softcap):
    """The bounded logit, softcap * tanh(logit / softcap), and its slope; tanh needs no library and ends at -1 and 1."""
    tanh = 1.0 - 2.0 / (tl.exp(logit * (2.0 / softcap)) + 1.0)
    return softcap * tanh, 1.0 - tanh * tanh


@jit
def _loss_and_gradient_kernel(
    logits_pointer,
    labels_pointer,
    losses_pointer,
    row_stride,
    valid_vocab,
    padded_vocab,
    ignore_index,
    smoothing,
    softcap,
    WITH_GRADIENT: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program turns one row of logits (tokens, padded_vocab) into softmax minus target, in place.

    The target is 1 - smoothing at the label, and smoothing spread over the valid columns. With CAPPED the softmax is
    that of softcap * tanh(logit / softcap), and its slope a factor of the gradient.

    losses_pointer: (tokens,) fp32, logsumexp minus the logits weighted with the target; 0 where the label is ignored,
    whose gradient row is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    row_pointer = logits_pointer + row * row_stride
    label = tl.load(labels_pointer + row)
    offsets = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(losses_pointer + row, 0.0)
        if WITH_GRADIENT:
            for start in range(0, padded_vocab, BLOCK):
                inside = start + offsets < padded_vocab
                zeros = tl.zeros((BLOCK,), tl.float32).to(logits_pointer.dtype.element_ty)
                tl.store(row_pointer + start + offsets, zeros, mask=inside)
    else:
        maximum = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, valid_vocab, BLOCK):
            inside = start + offsets < valid_vocab
            logit = tl.load(row_pointer + start + offsets, mask=inside, other=float("-inf")).to(tl.float32)
            if CAPPED:
                logit = tl.where(inside, _capped(logit, softcap)[0], float("-inf"))
            if SMOOTHED:
                sums += tl.where(inside, logit, 0.0)
            higher = tl.maximum(maximum, logit)
            # a lane that has seen no valid column yet holds -inf, and exp(-inf - -inf) would be NaN
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(maximum - shift) + tl.exp(logit - shift)
            maximum = higher
        row_maximum = tl.max(maximum, 0)
        row_total = tl.sum(total * tl.exp(maximum - row_maximum), 0)
        logsumexp = row_maximum + tl.log(row_total)
        # a label that is no token makes the loss NaN: the host, which would raise, does not look at labels
        is_token = (label >= 0) & (label < valid_vocab)
        target = tl.load(row_pointer + label, mask=is_token, other=float("nan")).to(tl.float32)
        if CAPPED:
            target = _capped(target, softcap)[0]
        spread = 0.0
        if SMOOTHED:
            spread = smoothing / valid_vocab
            target = (1.0 - smoothing) * target + spread * tl.sum(sums, 0)
        tl.store(losses_pointer + row, logsumexp - target)
        if WITH_GRADIENT:
            for start in range(0, padded_vocab, BLOCK):
                column = start + offsets
                logit = tl.load(row_pointer + column, mask=column < valid_vocab, other=float("-inf")).to(tl.float32)
                slope = 1.0
                if CAPPED:
                    logit, slope = _capped(logit, softcap)
                    logit = tl.where(column < valid_vocab, logit, float("-inf"))
                gradient = tl.exp(logit - logsumexp)
                if SMOOTHED:
                    gradient -= tl.where(column < valid_vocab, spread, 0.0)
                    gradient -= tl.where(column == label, 1.0 - smoothing, 0.0)
                else:
                    gradient -= tl.where(column == label, 1.0, 0.0)
                gradient *= slope
                tl.store(
                    row_pointer + column,
                    gradient.to(logits_pointer.dtype.element_ty),
                    mask=column < padded_vocab,
                )


def triton_loss_and_gradient_(
    logits: Tensor,
    labels: Tensor,
    *,
    valid_vocab: int,
    ignore_index: int,
    with_gradient: bool,
    smoothing: float = 0.0,
    softcap: float = 0.0,
) -> Tensor:
    """Losses (tokens,) in fp32; `logits` (tokens, padded_vocab) become their gradient in place if asked."""
    tokens, padded_vocab = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    block = min(next_power_of_2(padded_vocab), 4096)
    _loss_and_gradient_kernel[(tokens,)](
        logits,
        labels.contiguous(),
        losses,
        logits.stride(0),
        valid_vocab,
        padded_vocab,
        ignore_index,
        smoothing,
        softcap,
        WITH_GRADIENT=with_gradient,
        SMOOTHED=smoothing > 0,
        CAPPED=softcap > 0,
        BLOCK=block,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return losses


# ---------------------------------------------------------------- custom operation


def _torch_loss_and_gradient(
    logits: Tensor,
    labels: Tensor,
    *,
    valid_vocab: int,
    ignore_index: int,
    with_gradient: bool,
    smoothing: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """What the kernel does, in plain torch and in fp32 (fp64 for fp64 logits)."""
    logits = logits[:, :valid_vocab].to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    tanh = torch.tanh(logits / softcap) if softcap else None
    logits = logits if tanh is None else softcap * tanh
    kept = labels != ignore_index
    safe_labels = torch.where(kept, labels, 0)
    logsumexp = torch.logsumexp(logits, dim=-1)
    target = logits.gather(1, safe_labels[:, None])[:, 0]
    if smoothing:
        target = (1 - smoothing) * target + smoothing * logits.mean(dim=-1)
    losses = (logsumexp - target) * kept
    if not with_gradient:
        return losses, logits
    gradient = logits.sub_(logsumexp[:, None]).exp_()
    gradient.scatter_add_(1, safe_labels[:, None], gradient.new_full((len(labels), 1), smoothing - 1.0))
    if smoothing:
        gradient.sub_(smoothing / valid_vocab)
    if tanh is not None:
        gradient.mul_(tanh.square_().neg_().add_(1.0))
    return losses, gradient.mul_(kept[:, None])


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum of losses, and the gradients of that sum by `hidden`, `weight` and `bias` (empty unless asked for).

    With `frozen` those of `weight` and `bias` are empty in any case.
    """
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    use_triton = triton_runs_on(hidden)
    total = torch.zeros((), dtype=accumulate, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden) if with_gradient else hidden.new_empty(0)
    one_chunk = chunk_tokens >= len(hidden)
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
            )
            gradient, rows = logits, weight
        else:
            rows = weight[:valid_vocab]
            losses, gradient = _torch_loss_and_gradient(
                F.linear(part, rows, None if bias is None else bias[:valid_vocab]),
                part_labels,
                valid_vocab=valid_vocab,
                ignore_index=ignore_index,
                with_gradient=with_gradient,
                smoothing=smoothing,
                softcap=softcap,
            )
        total += losses.sum(dtype=accumulate)
        if with_gradient:
            if bias_sum is not None:
                bias_sum[: gradient.shape[1]] += gradient.sum(dim=0, dtype=accumulate)
            gradient = gradient.to(hidden.dtype)
            torch.mm(gradient, rows, out=hidden_gradient[start : start + chunk_tokens])
            if frozen:
                continue
            product = gradient.t() @ part
            if one_chunk:
                weight_sum = product
            elif weight_sum is None:
                weight_sum = product.to(accumulate)
            else:
                weight_sum += product
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
    hidden_gradient, weight_gradient, bias_gradient = ctx.saved_tensors
    factor = loss_gradient.to(hidden_gradient.dtype) if hidden_gradient.dtype == torch.float64 else loss_gradient
    of_hidden = (hidden_gradient * factor).to(hidden_gradient.dtype)
    if ctx.frozen:
        return (of_hidden, *(None,) * 10)
    return (
        of_hidden,
        (weight_gradient * factor).to(weight_gradient.dtype),
        None,
        None,
        None,
        None,
        None,
        (bias_gradient * factor).to(bias_gradient.dtype) if ctx.has_bias else None,
        None,
        None,
        None,
    )


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


# ---------------------------------------------------------------- public function


def default_chunk_tokens(vocab: int, *, cuda: bool) -> int:
    """Tokens per chunk: as many as keep one chunk of logits below a fixed size, at least 256 (2048 on a GPU)."""
    limit, smallest, width = (GPU_CHUNK_BYTES, 2048, 2) if cuda else (CPU_CHUNK_BYTES, 256, 4)
    return max(smallest, next_power_of_2(limit // (vocab * width) + 1) // 2)


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
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum over tokens of the cross-entropy of softmax(hidden @ weight.T + bias) against `labels`.

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
        chunk_tokens: tokens projected at once; None: by vocabulary and device.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs), differentiable once in `hidden`, `weight` and `bias`.

    Raises:
        ValueError: shapes do not fit, `valid_vocab` is not in 1..padded_vocab, `softcap` is negative, or
            `label_smoothing` not in [0, 1), or there is no other token to smooth over.
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
    )[0]
