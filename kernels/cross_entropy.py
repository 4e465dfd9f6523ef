"""Fused output projection and cross-entropy, computed in chunks of tokens.

The logits of the whole batch are never materialized in fp32: the forward pass projects each chunk, overwrites its
logits with their gradient and multiplies that back to the gradients of hidden states and weight, which the backward
pass only returns. Three matrix products in all, as without fusion (the idea of Liger Kernel, arXiv 2410.10989; chunks
here are kept large enough for full GEMM speed). The denominator of the loss is applied to the gradient of the logits,
which saves scaling the other gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cross_entropy_kernels import torch_loss_and_gradient, triton_loss_and_gradient_
from .custom_op import custom_op
from .launch import next_power_of_2, supports_fp32_output, triton_runs_on
from .scale_in_place import can_scale_in_place, reference_scale, triton_scale_

CPU_CHUNK_BYTES = 32 << 20  # about the size of a laptop's cache
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
    z_loss: float = 0.0,
    reduction: Literal["sum", "none"] = "sum",
) -> Tensor:
    """Reference in plain PyTorch, with all logits at once."""
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = F.linear(hidden, weight[:valid_vocab], None if bias is None else bias[:valid_vocab]).to(accumulate)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses, kept = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none"), labels != ignore_index
    if label_smoothing:
        all_tokens = -logits.log_softmax(dim=-1).sum(dim=-1) * kept
        losses = (1 - label_smoothing) * losses + label_smoothing / (valid_vocab - 1) * (all_tokens - losses)
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(dim=-1).square() * kept
    if reduction == "none":
        return losses
    return losses.sum() if denominator is None else losses.sum() / denominator


# ---------------------------------------------------------------- custom operation


def _addmm_fp32_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of 16-bit matrices to the fp32 matrix `total`, in place."""
    torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


class ChunkResults(NamedTuple):
    """Losses of each chunk, and the gradients of `hidden`, `weight` and `bias`, empty where not needed."""

    losses: list[Tensor]
    hidden: Tensor
    weight: Tensor
    bias: Tensor


def _add_product(total: Tensor | None, first: Tensor, second: Tensor, dtype: torch.dtype, *, in_gemm: bool) -> Tensor:
    """Add `first @ second` to the sum of the chunks before, if any; return the sum in this dtype."""
    if total is None:
        return torch.mm(first, second, out_dtype=torch.float32) if in_gemm else (first @ second).to(dtype)
    if in_gemm:
        _addmm_fp32_(total, first, second)
    else:
        total += first @ second
    return total


def run_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    *,
    chunk_tokens: int,
    frozen: bool,
    row_weights: Tensor | None = None,
    loss_and_gradient: Callable[..., tuple[Tensor, Tensor]] | None = None,
    **options: Any,
) -> ChunkResults:
    """Compute losses and gradients chunk by chunk.

    Args:
        hidden, weight, labels, bias: as in `linear_cross_entropy`.
        chunk_tokens: tokens of a chunk.
        frozen: leave the gradients of `weight` and `bias` empty.
        row_weights: of each token, (tokens,), by which its gradient is multiplied.
        loss_and_gradient: makes losses and gradient of the logits and labels of a chunk, in the memory of the logits if
            Triton runs on them; None for all of the vocabulary.
        **options: of `loss_and_gradient`, see `torch_loss_and_gradient`.
    """
    with_gradient, valid_vocab = options["with_gradient"], options["valid_vocab"]
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    use_triton = triton_runs_on(hidden)
    of_chunk = loss_and_gradient or (triton_loss_and_gradient_ if use_triton else torch_loss_and_gradient)
    used_weight, used_bias = weight, bias
    if not use_triton:
        used_weight, used_bias = weight[:valid_vocab], None if bias is None else bias[:valid_vocab]
    chunks: list[Tensor] = []
    hidden_gradient = torch.empty_like(hidden) if with_gradient else hidden.new_empty(0)
    one_chunk = chunk_tokens >= len(hidden)
    accumulate_in_gemm = not one_chunk and can_accumulate_in_gemm(
        *weight.shape, width=hidden.element_size(), cuda=use_triton
    )
    bias_sum = None if bias is None or frozen else torch.zeros(bias.shape, dtype=accumulate, device=bias.device)
    weight_sum: Tensor | None = None
    for start in range(0, len(hidden), chunk_tokens):
        hidden_chunk = hidden[start : start + chunk_tokens]
        labels_chunk = labels[start : start + chunk_tokens]
        if row_weights is not None:
            options["row_weights"] = row_weights[start : start + chunk_tokens]
        losses, gradient = of_chunk(F.linear(hidden_chunk, used_weight, used_bias), labels_chunk, **options)
        chunks.append(losses)
        if with_gradient:
            if bias_sum is not None:
                bias_sum[: gradient.shape[1]] += gradient.sum(dim=0, dtype=accumulate)
            gradient = gradient.to(hidden.dtype)
            torch.mm(gradient, used_weight, out=hidden_gradient[start : start + chunk_tokens])
            if one_chunk and not frozen:
                weight_sum = gradient.t() @ hidden_chunk
            elif not frozen:
                weight_sum = _add_product(
                    weight_sum, gradient.t(), hidden_chunk, accumulate, in_gemm=accumulate_in_gemm
                )
        del gradient  # before there are the logits of the next chunk
    if not with_gradient or frozen:
        return ChunkResults(chunks, hidden_gradient, hidden.new_empty(0), hidden.new_empty(0))
    # without tokens there was no chunk
    weight_gradient = torch.zeros_like(weight) if weight_sum is None else weight_sum.to(weight.dtype)
    if len(weight_gradient) < len(weight):  # the plain PyTorch path leaves out the padding rows
        weight_gradient = F.pad(weight_gradient, (0, 0, 0, len(weight) - len(weight_gradient)))
    bias_gradient = hidden.new_empty(0) if bias is None or bias_sum is None else bias_sum.to(bias.dtype)
    return ChunkResults(chunks, hidden_gradient, weight_gradient, bias_gradient)


@custom_op("stoker::linear_cross_entropy")
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
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return sum of losses / `denominator` and its gradients for `hidden`, `weight` and `bias`.

    The gradients are empty without `with_gradient`; those of `weight` and `bias` are also empty with `frozen`.
    """
    results = run_chunks(
        hidden,
        weight,
        labels,
        bias,
        chunk_tokens=chunk_tokens,
        frozen=frozen,
        valid_vocab=valid_vocab,
        ignore_index=ignore_index,
        with_gradient=with_gradient,
        smoothing=smoothing,
        softcap=softcap,
        z_loss=z_loss,
        denominator=denominator,
    )
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=accumulate, device=hidden.device)
    for each in results.losses:
        total += each.sum(dtype=accumulate)
    if denominator is not None:
        total /= denominator
    return total, *results[1:]


@torch.library.register_fake("stoker::linear_cross_entropy")
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
    z_loss: float = 0.0,
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


def scale_saved(gradients: tuple[Tensor, ...], loss_gradient: Tensor) -> tuple[Tensor, ...]:
    """Return gradients that the forward pass has saved times that of the loss; in their memory where it can be."""
    if not can_scale_in_place(gradients[0]):
        return tuple(reference_scale(gradient, loss_gradient) for gradient in gradients)
    for gradient in gradients:
        triton_scale_(gradient, loss_gradient)
    # a second backward pass raises autograd's version error instead of scaling the gradients twice
    torch.autograd.graph.increment_version(gradients)
    return gradients


def _scale_gradients(ctx: Any, loss_gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    hidden_gradient, weight_gradient, bias_gradient = scale_saved(ctx.saved_tensors, loss_gradient)
    if ctx.frozen:
        return (hidden_gradient, *(None,) * 12)
    return (hidden_gradient, weight_gradient, *(None,) * 5, bias_gradient if ctx.has_bias else None, *(None,) * 5)


torch.library.register_autograd("stoker::linear_cross_entropy", _scale_gradients, setup_context=_save_gradients)


@custom_op("stoker::linear_cross_entropy_per_token")
def _loss_per_token(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    valid_vocab: int,
    ignore_index: int,
    chunk_tokens: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
) -> Tensor:
    """Return the losses (tokens,), without gradients: what each is multiplied with is known in the backward only."""
    chunks = run_chunks(
        hidden,
        weight,
        labels,
        bias,
        chunk_tokens=chunk_tokens,
        frozen=True,
        valid_vocab=valid_vocab,
        ignore_index=ignore_index,
        with_gradient=False,
        smoothing=smoothing,
        softcap=softcap,
        z_loss=z_loss,
        denominator=None,
    ).losses
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return torch.cat(chunks).to(dtype) if chunks else hidden.new_empty(0, dtype=dtype)


@torch.library.register_fake("stoker::linear_cross_entropy_per_token")
def _(hidden: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))


@custom_op("stoker::linear_cross_entropy_per_token_backward")
def _loss_per_token_backward(
    losses_gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    valid_vocab: int,
    ignore_index: int,
    chunk_tokens: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    frozen: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `hidden`, `weight` and `bias` from those of the losses; the logits are recomputed."""
    return run_chunks(
        hidden,
        weight,
        labels,
        bias,
        chunk_tokens=chunk_tokens,
        frozen=frozen,
        row_weights=losses_gradient,
        valid_vocab=valid_vocab,
        ignore_index=ignore_index,
        with_gradient=True,
        smoothing=smoothing,
        softcap=softcap,
        z_loss=z_loss,
        denominator=None,
    )[1:]


@torch.library.register_fake("stoker::linear_cross_entropy_per_token_backward")
def _(
    losses_gradient: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    none, frozen = hidden.new_empty(0), options[-1]
    of_bias = none if bias is None or frozen else torch.empty_like(bias)
    return torch.empty_like(hidden), none if frozen else torch.empty_like(weight), of_bias


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward_per_token(ctx: Any, losses_gradient: Tensor) -> tuple[Tensor | None, ...]:
    needs_hidden, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
    hidden, weight, bias = _loss_per_token_backward(
        losses_gradient, *ctx.saved_tensors, *ctx.options, not (needs_weight or needs_bias)
    )
    of_inputs = (hidden if needs_hidden else None, weight if needs_weight else None, None, bias if needs_bias else None)
    return (*of_inputs, *(None,) * len(ctx.options))


torch.library.register_autograd(
    "stoker::linear_cross_entropy_per_token", _backward_per_token, setup_context=_save_inputs
)


# ---------------------------------------------------------------- public function


def default_chunk_tokens(vocab: int, *, cuda: bool) -> int:
    """Return the tokens per chunk that keep its logits below a fixed size, at least 256 (2048 on a GPU)."""
    limit, smallest, width = (GPU_CHUNK_BYTES, 2048, 2) if cuda else (CPU_CHUNK_BYTES, 256, 4)
    return max(smallest, next_power_of_2(limit // (vocab * width) + 1) // 2)


def can_accumulate_in_gemm(vocab: int, hidden_size: int, *, width: int, cuda: bool) -> bool:
    """Return True if the GEMM can accumulate weight gradients of chunks in fp32: on a GPU, for 16-bit inputs."""
    return cuda and width == 2 and supports_fp32_output(vocab, hidden_size)


def chunked_logits_bytes(tokens: int, vocab: int, hidden: int, e: int, product: int, *, cuda: bool) -> int:
    """Return the peak bytes of the logits and of the gradient of the head, which takes `product` bytes or none.

    The gradient of one chunk is in the compute dtype of `e` bytes, its sum over chunks in at least fp32.
    """
    chunk = min(default_chunk_tokens(vocab, cuda=cuda), tokens)
    logits = chunk * vocab * e
    if chunk == tokens:
        return logits + product
    accumulator = vocab * hidden * max(4, e) if product else 0
    if can_accumulate_in_gemm(vocab, hidden, width=e, cuda=cuda):
        # the matmul adds to the sum, which is rounded once the last logits are freed
        return max(logits, product) + accumulator
    # a product beside the sum: of each chunk, or, if the first product becomes the sum, of those after it
    with_product = logits if e < 4 or tokens > 2 * chunk else (tokens - chunk) * vocab * e
    return max(logits, with_product + product) + accumulator


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
    z_loss: float = 0.0,
    reduction: Literal["sum", "none"] = "sum",
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the sum over tokens of the cross-entropy between softmax(hidden @ weight.T + bias) and `labels`.

    Passing `denominator` instead of dividing the result saves a pass over each gradient.

    Args:
        hidden: (tokens, hidden_size), fp64, fp32, bf16 or fp16.
        weight: (padded_vocab, hidden_size), same dtype.
        labels: (tokens,) int64, each below `valid_vocab`, or `ignore_index` to contribute nothing. Any other label
            makes the loss NaN on a GPU and raises RuntimeError on a CPU.
        valid_vocab: vocabulary size without padding; the padding rows of `weight` get probability 0 and gradient 0.
        bias: (padded_vocab,), same dtype, or None.
        softcap: replace each logit by softcap * tanh(logit / softcap); 0 for none.
        label_smoothing: e in [0, 1); the target is 1 - e at the label and e / (valid_vocab - 1) at each other token
            (as in Megatron; `torch.nn.functional.cross_entropy` includes the label in the smoothed share).
        ignore_index: label to ignore.
        denominator: scalar divisor of the sum, of any dtype on the device of the inputs, not differentiated; None
            for 1. In fp16 gradients underflow with a large one.
        z_loss: coefficient z of z * logsumexp(logits)^2, added to the loss of each label that is not ignored, which
            keeps the logits from drifting (PaLM, arXiv 2204.02311, section 5: 1e-4); the logits after `softcap`.
        reduction: `sum`, or `none` for the loss of each token. The sum computes the gradients with the loss, in three
            matmuls; for `none` the backward pass recomputes the logits, in four.
        chunk_tokens: tokens per chunk; None chooses by vocabulary and device.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs), 0 without tokens; with `reduction` none (tokens,), 0 where the label is
        ignored. Differentiable once with respect to `hidden`, `weight` and `bias`: on a GPU a second backward pass
        through the graph of a sum raises RuntimeError.

    Raises:
        ValueError: shapes do not match, `valid_vocab` is not in 1..padded_vocab, `softcap` is negative,
            `label_smoothing` is not in [0, 1) or there is no other token to smooth over, `z_loss` is negative,
            `reduction` is unknown, or `denominator` is not a scalar or given with `reduction` none.
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
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"`z_loss` ({z_loss}) must be 0, for none, or a positive number.")
    if reduction not in ("sum", "none"):
        raise ValueError(f"`reduction` ({reduction}) must be sum or none.")
    if denominator is not None and reduction == "none":
        raise ValueError("`denominator` must be None with `reduction` none: divide the losses instead.")
    # the kernel smooths over all tokens including the label: e V / (V - 1) leaves e for the others
    uniform_smoothing = label_smoothing * valid_vocab / (valid_vocab - 1) if label_smoothing else 0.0
    chunk = chunk_tokens or default_chunk_tokens(len(weight), cuda=hidden.is_cuda)
    if reduction == "none":
        return _loss_per_token(
            hidden, weight, labels, bias, valid_vocab, ignore_index, chunk, uniform_smoothing, softcap, float(z_loss)
        )
    trains_weight = weight.requires_grad or (bias is not None and bias.requires_grad)
    return _linear_cross_entropy(
        hidden,
        weight,
        labels,
        valid_vocab,
        ignore_index,
        chunk,
        torch.is_grad_enabled() and (trains_weight or hidden.requires_grad),
        bias,
        uniform_smoothing,
        softcap,
        not trains_weight,
        denominator,
        float(z_loss),
    )[0]
