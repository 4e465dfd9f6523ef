"""Cross-entropy of a chunk of logits and its gradient, which replaces the logits in place; used by `cross_entropy.py`.

The reference is in `cross_entropy.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, next_power_of_2, tl

# ---------------------------------------------------------------- Triton


@jit
def _capped(logit, softcap):
    """Return softcap * tanh(logit / softcap) and its derivative; tanh by exp saturates at -1 and 1."""
    tanh = 1.0 - 2.0 / (tl.exp(logit * (2.0 / softcap)) + 1.0)
    return softcap * tanh, 1.0 - tanh * tanh


@jit
def _row_statistics(
    row_pointer, valid_vocab, softcap, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest logit of a row, the sum of exp(logit - largest), and with SMOOTHED that of the logits.

    Without valid columns these are -inf, 0 and 0.
    """
    offsets = tl.arange(0, BLOCK)
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
    shift = tl.where(row_maximum == float("-inf"), 0.0, row_maximum)
    return row_maximum, tl.sum(total * tl.exp(maximum - shift), 0), tl.sum(sums, 0)


@jit
def _store_row_gradient(
    row_pointer, label, logsumexp, factor, valid_vocab, padded_vocab, smoothing, spread, softcap, z_loss,
    SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace a row of logits by the gradient of its loss times `factor`; `label` is a column, or none of them."""
    offsets = tl.arange(0, BLOCK)
    for start in range(0, padded_vocab, BLOCK):
        column = start + offsets
        logit = tl.load(
            row_pointer + column,
            mask=column < valid_vocab,
            other=float("-inf"),
            eviction_policy="evict_first",  # so that the L2 cache keeps rows that are to be read again
        ).to(tl.float32)
        slope = 1.0
        if CAPPED:
            logit, slope = _capped(logit, softcap)
            logit = tl.where(column < valid_vocab, logit, float("-inf"))
        gradient = tl.exp(logit - logsumexp)
        if Z_LOSS:  # d logsumexp^2 = 2 logsumexp softmax
            gradient *= 1.0 + 2.0 * z_loss * logsumexp
        if SMOOTHED:
            gradient -= tl.where(column < valid_vocab, spread, 0.0)
            gradient -= tl.where(column == label, 1.0 - smoothing, 0.0)
        else:
            gradient -= tl.where(column == label, 1.0, 0.0)
        gradient *= slope * factor
        tl.store(
            row_pointer + column,
            gradient.to(row_pointer.dtype.element_ty),
            mask=column < padded_vocab,
            eviction_policy="evict_first",
        )


@jit
def _store_zeros(row_pointer, padded_vocab, BLOCK: tl.constexpr):
    """Write zeros to a row."""
    offsets = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), tl.float32).to(row_pointer.dtype.element_ty)
    for start in range(0, padded_vocab, BLOCK):
        tl.store(row_pointer + start + offsets, zeros, mask=start + offsets < padded_vocab)


@jit
def _loss_and_gradient_kernel(
    logits_pointer,
    labels_pointer,
    losses_pointer,
    denominator_pointer,
    row_weights_pointer,
    row_stride,
    valid_vocab,
    padded_vocab,
    ignore_index,
    smoothing,
    softcap,
    z_loss,
    WITH_GRADIENT: tl.constexpr,
    SMOOTHED: tl.constexpr,
    CAPPED: tl.constexpr,
    DIVIDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace one row of logits (tokens, padded_vocab) per program by softmax minus target, in place.

    The target is 1 - smoothing at the label, plus smoothing spread evenly over the valid columns. With CAPPED the
    softmax is that of softcap * tanh(logit / softcap), whose derivative multiplies the gradient. Z_LOSS adds
    z_loss * logsumexp^2. Before it is rounded the gradient, not the loss, is divided by the scalar at
    denominator_pointer with DIVIDED, and multiplied by the row's weight with WEIGHTED.

    losses_pointer: (tokens,) fp32, logsumexp minus the target-weighted logits; ignored labels get loss 0 and a
    gradient row of 0. row_weights_pointer: (tokens,).
    """
    row = tl.program_id(0).to(tl.int64)
    row_pointer = logits_pointer + row * row_stride
    label = tl.load(labels_pointer + row)
    if label == ignore_index:
        tl.store(losses_pointer + row, 0.0)
        if WITH_GRADIENT:
            _store_zeros(row_pointer, padded_vocab, BLOCK)
    else:
        row_maximum, row_total, row_sum = _row_statistics(row_pointer, valid_vocab, softcap, SMOOTHED, CAPPED, BLOCK)
        logsumexp = row_maximum + tl.log(row_total)
        # an out-of-range label makes the loss NaN: labels are not read on the host, which could raise
        is_token = (label >= 0) & (label < valid_vocab)
        target = tl.load(row_pointer + label, mask=is_token, other=float("nan")).to(tl.float32)
        if CAPPED:
            target = _capped(target, softcap)[0]
        spread = 0.0
        if SMOOTHED:
            spread = smoothing / valid_vocab
            target = (1.0 - smoothing) * target + spread * row_sum
        loss = logsumexp - target
        if Z_LOSS:
            loss += z_loss * logsumexp * logsumexp
        tl.store(losses_pointer + row, loss)
        if WITH_GRADIENT:
            factor = 1.0
            if DIVIDED:
                factor = 1.0 / tl.load(denominator_pointer).to(tl.float32)
            if WEIGHTED:
                factor *= tl.load(row_weights_pointer + row).to(tl.float32)
            _store_row_gradient(
                row_pointer, label, logsumexp, factor, valid_vocab, padded_vocab, smoothing, spread, softcap, z_loss,
                SMOOTHED, CAPPED, Z_LOSS, BLOCK,
            )  # fmt: skip


def triton_loss_and_gradient_(
    logits: Tensor,
    labels: Tensor,
    *,
    valid_vocab: int,
    ignore_index: int,
    with_gradient: bool,
    smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    denominator: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return losses (tokens,) in fp32, and the logits (tokens, padded_vocab), with `with_gradient` their gradient.

    It replaces them in place, divided by `denominator`, a scalar on the same device, and multiplied by `row_weights`,
    (tokens,); None for 1.
    """
    tokens, padded_vocab = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    block = min(next_power_of_2(padded_vocab), 4096)
    _loss_and_gradient_kernel[(tokens,)](
        logits,
        labels.contiguous(),
        losses,
        denominator,
        None if row_weights is None else row_weights.contiguous(),
        logits.stride(0),
        valid_vocab,
        padded_vocab,
        ignore_index,
        smoothing,
        softcap,
        z_loss,
        WITH_GRADIENT=with_gradient,
        SMOOTHED=smoothing > 0,
        CAPPED=softcap > 0,
        DIVIDED=denominator is not None,
        WEIGHTED=row_weights is not None,
        Z_LOSS=z_loss > 0,
        BLOCK=block,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return losses, logits


# ---------------------------------------------------------------- plain torch


def torch_loss_and_gradient(
    logits: Tensor,
    labels: Tensor,
    *,
    valid_vocab: int,
    ignore_index: int,
    with_gradient: bool,
    smoothing: float,
    softcap: float,
    z_loss: float,
    denominator: Tensor | None = None,
    row_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return losses and gradient like the kernel, out of place, in plain PyTorch and fp32 (fp64 for fp64 logits)."""
    logits = logits[:, :valid_vocab].to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    tanh = torch.tanh(logits / softcap) if softcap else None
    logits = logits if tanh is None else softcap * tanh
    kept = labels != ignore_index
    safe_labels = torch.where(kept, labels, 0)
    logsumexp = torch.logsumexp(logits, dim=-1)
    target = logits.gather(1, safe_labels[:, None])[:, 0]
    if smoothing:
        target = (1 - smoothing) * target + smoothing * logits.mean(dim=-1)
    losses = (logsumexp - target + z_loss * logsumexp.square()) * kept
    if not with_gradient:
        return losses, logits
    gradient = logits.sub_(logsumexp[:, None]).exp_()
    if z_loss:
        gradient.mul_((1.0 + 2.0 * z_loss * logsumexp)[:, None])
    gradient.scatter_add_(1, safe_labels[:, None], gradient.new_full((len(labels), 1), smoothing - 1.0))
    if smoothing:
        gradient.sub_(smoothing / valid_vocab)
    if tanh is not None:
        gradient.mul_(tanh.square_().neg_().add_(1.0))
    factor = kept.to(gradient.dtype)
    factor = factor if denominator is None else factor / denominator
    return losses, gradient.mul_((factor if row_weights is None else factor * row_weights)[:, None])
