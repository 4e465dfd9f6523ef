"""Cross-entropy of a chunk of logits and its gradient, which replaces the logits in place; used by `cross_entropy.py`.

The reference is in `cross_entropy.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import constant, jit, next_power_of_2, tl

VECTOR_SIZE = 8
VECTOR = constant(VECTOR_SIZE)
"""Neighbouring columns that a thread loads at once; only their largest one rescales its sum of exponentials."""
LOWEST = constant(-3.0e38)
"""Smaller than any logit that is not -inf."""

# ---------------------------------------------------------------- Triton


@jit
def _capped(logit, softcap):
    """Return softcap * tanh(logit / softcap) and its derivative; tanh by exp saturates at -1 and 1."""
    tanh = 1.0 - 2.0 / (tl.exp(logit * (2.0 / softcap)) + 1.0)
    return softcap * tanh, 1.0 - tanh * tanh


@jit
def _load_logits(
    row_pointer, column, valid_vocab, padded_vocab, softcap, CAPPED: tl.constexpr, WHOLE: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """Load columns of a row, -inf where there is no token; return them in fp32 and the derivative of the softcap.

    WHOLE: all columns are tokens. POLICY: eviction policy of the L2 cache.
    """
    if WHOLE:
        logit = tl.load(row_pointer + column, eviction_policy=POLICY)
    else:
        # the width of the row as mask, which has whole vectors if it is a multiple of them
        exists = column < padded_vocab
        logit = tl.load(row_pointer + column, mask=exists, other=0.0, eviction_policy=POLICY)
    logit = logit.to(tl.float32)
    slope = 1.0
    if CAPPED:
        logit, slope = _capped(logit, softcap)
    if not WHOLE:
        logit = tl.where(column < valid_vocab, logit, float("-inf"))
    return logit, slope


@jit
def _add_logits(maximum, total, sums, logit, valid, SMOOTHED: tl.constexpr, BLOCK: tl.constexpr):
    """Add the logits of a block to the statistics of their lanes, VECTOR of them each."""
    lanes = tl.reshape(logit, (BLOCK // VECTOR, VECTOR))
    higher = tl.maximum(maximum, tl.max(lanes, axis=1))
    total = total * tl.exp(maximum - higher) + tl.sum(tl.exp(lanes - higher[:, None]), axis=1)
    if SMOOTHED:
        sums += tl.sum(tl.reshape(tl.where(valid, logit, 0.0), (BLOCK // VECTOR, VECTOR)), axis=1)
    return higher, total, sums


@jit
def _row_statistics(
    row_pointer, valid_vocab, padded_vocab, softcap, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest logit of a row, the sum of exp(logit - largest), and with SMOOTHED that of the logits.

    Without valid columns these are -inf, 0 and 0.
    """
    offsets = tl.arange(0, BLOCK)
    # finite, as exp(-inf - -inf) would be NaN
    maximum = tl.full((BLOCK // VECTOR,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK // VECTOR,), tl.float32)
    sums = tl.zeros((BLOCK // VECTOR,), tl.float32)
    whole = valid_vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        logit, _ = _load_logits(row_pointer, start + offsets, valid_vocab, padded_vocab, softcap, CAPPED, True, "")
        maximum, total, sums = _add_logits(maximum, total, sums, logit, True, SMOOTHED, BLOCK)
    if whole < valid_vocab:
        column = whole + offsets
        logit, _ = _load_logits(row_pointer, column, valid_vocab, padded_vocab, softcap, CAPPED, False, "")
        maximum, total, sums = _add_logits(maximum, total, sums, logit, column < valid_vocab, SMOOTHED, BLOCK)
    row_maximum = tl.max(maximum, 0)
    row_total = tl.sum(total * tl.exp(maximum - row_maximum), 0)
    return tl.where(row_maximum == LOWEST, float("-inf"), row_maximum), row_total, tl.sum(sums, 0)


@jit
def _gradient_of(
    logit, slope, valid, logsumexp, factor, spread, z_loss, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the loss times `factor`, without what the label's column has more."""
    gradient = tl.exp(logit - logsumexp)
    if Z_LOSS:  # d logsumexp^2 = 2 logsumexp softmax
        gradient *= 1.0 + 2.0 * z_loss * logsumexp
    if SMOOTHED:
        gradient -= tl.where(valid, spread, 0.0)
    return gradient * (slope * factor)


@jit
def _store_row_gradient(
    row_pointer, label, logsumexp, factor, valid_vocab, padded_vocab, smoothing, spread, softcap, z_loss,
    SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace a row of logits by the gradient of its loss times `factor`; `label` is a column, or none of them."""
    offsets = tl.arange(0, BLOCK)
    dtype: tl.constexpr = row_pointer.dtype.element_ty
    has_label = (label >= 0) & (label < valid_vocab)
    target = tl.load(row_pointer + label, mask=has_label, other=0.0).to(tl.float32)
    tl.debug_barrier()  # every thread has read the label's logit, here and before, when another one overwrites it
    whole = valid_vocab // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        column = start + offsets
        logit, slope = _load_logits(
            row_pointer, column, valid_vocab, padded_vocab, softcap, CAPPED, True, "evict_first"
        )
        gradient = _gradient_of(logit, slope, True, logsumexp, factor, spread, z_loss, SMOOTHED, Z_LOSS)
        tl.store(row_pointer + column, gradient.to(dtype), eviction_policy="evict_first")
    for start in range(whole, padded_vocab, BLOCK):
        column = start + offsets
        logit, slope = _load_logits(
            row_pointer, column, valid_vocab, padded_vocab, softcap, CAPPED, False, "evict_first"
        )
        valid = column < valid_vocab
        gradient = _gradient_of(logit, slope, valid, logsumexp, factor, spread, z_loss, SMOOTHED, Z_LOSS)
        tl.store(row_pointer + column, gradient.to(dtype), mask=column < padded_vocab, eviction_policy="evict_first")
    # the label's column is written again, after all threads have written theirs: comparing every column takes longer
    slope = 1.0
    if CAPPED:
        target, slope = _capped(target, softcap)
    gradient = _gradient_of(target, slope, True, logsumexp, factor, spread, z_loss, SMOOTHED, Z_LOSS)
    gradient -= (1.0 - smoothing) * (slope * factor)
    tl.debug_barrier()
    tl.store(row_pointer + label, gradient.to(dtype), mask=has_label)


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
        row_maximum, row_total, row_sum = _row_statistics(
            row_pointer, valid_vocab, padded_vocab, softcap, SMOOTHED, CAPPED, BLOCK
        )
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


def launch_options(columns: int) -> dict[str, int]:
    """Return the columns of a block and the launch options: one or two vectors per thread, up to 1,024 threads.

    A row is read twice. With two programs of that size per multiprocessor it is in the L2 cache the second time. Two
    vectors that are not aligned, of single loads, would not fit in the registers of a thread.
    """
    vectors = 2 if columns % 16 == 0 else 1
    block = min(max(next_power_of_2(columns), 512), 8192 * vectors)
    return {"BLOCK": block, "num_warps": block // (vectors * 32 * VECTOR_SIZE), "enable_fp_fusion": True}


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
        **launch_options(padded_vocab),
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
