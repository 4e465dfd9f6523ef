"""Output projection and cross-entropy over a vocabulary that is split over the tensor-parallel ranks.

As `kernels.cross_entropy`, in chunks of tokens, so that no rank holds the logits of all tokens, and none those of the
whole vocabulary: the ranks exchange four numbers for each token (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.cross_entropy import default_chunk_tokens, run_chunks, scale_saved
from ...kernels.vocabulary_part import EXPONENTIALS, LARGEST, SUM, TARGET, part_gradient, part_statistics
from .collectives import TensorParallel
from .traffic import Collective


class LossOptions(NamedTuple):
    """Options of the loss, as in `kernels.cross_entropy.linear_cross_entropy`.

    Attributes:
        valid_vocab: vocabulary size without padding, over all ranks.
        smoothing: share of the target that is spread evenly over all tokens, the label included.
    """

    valid_vocab: int
    smoothing: float
    softcap: float
    ignore_index: int
    chunk_tokens: int


class _VocabularyParallelLoss(torch.autograd.Function):
    """The gradients are computed in the forward pass, chunk by chunk, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        denominator: Tensor,
        ranks: TensorParallel,
        options: LossOptions,
    ) -> Tensor:
        first, (needs_hidden, needs_weight, needs_bias) = ranks.rank * len(weight), ctx.needs_input_grad[:3]
        results = run_chunks(
            hidden,
            weight,
            labels,
            bias,
            chunk_tokens=options.chunk_tokens,
            frozen=not needs_weight and not needs_bias,
            loss_and_gradient=partial(_loss_and_gradient, first=first, ranks=ranks, options=options),
            valid_vocab=min(max(options.valid_vocab - first, 0), len(weight)),
            with_gradient=needs_hidden or needs_weight or needs_bias,
            denominator=denominator,
        )
        ctx.save_for_backward(ranks.sum(results.hidden) if needs_hidden else results.hidden, *results[2:])
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for losses in results.losses:
            total += losses.sum()
        return total / denominator

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        scaled = zip(scale_saved(ctx.saved_tensors, gradient), ctx.needs_input_grad, strict=False)
        return (*(each if needed else None for each, needed in scaled), None, None, None, None)


def _loss_and_gradient(
    logits: Tensor,
    labels: Tensor,
    *,
    valid_vocab: int,
    with_gradient: bool,
    denominator: Tensor,
    first: int,
    ranks: TensorParallel,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:
    """Return the losses of a chunk and the gradient of its logits, or these; see `kernels.vocabulary_part`."""
    shared: dict[str, Any] = {"valid_vocab": valid_vocab, "first": first, "ignore_index": options.ignore_index}
    shared |= {"smoothing": options.smoothing, "softcap": options.softcap}
    statistics = ranks.gather(part_statistics(logits, labels, vocabulary=options.valid_vocab, **shared))
    largest = statistics[:, LARGEST].amax(dim=0)
    total = (statistics[:, EXPONENTIALS] * (statistics[:, LARGEST] - largest).exp()).sum(dim=0)
    log_sum_exp = largest + total.log()
    spread = options.smoothing / options.valid_vocab
    losses = log_sum_exp - (1 - options.smoothing) * statistics[:, TARGET].sum(dim=0)
    if options.smoothing:
        losses -= spread * statistics[:, SUM].sum(dim=0)
    losses = losses * (labels != options.ignore_index)
    if not with_gradient:
        return losses, logits
    return losses, part_gradient(logits, labels, log_sum_exp, denominator, spread=spread, **shared)


def vocabulary_parallel_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ranks: TensorParallel,
    valid_vocab: int,
    denominator: Tensor,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return the sum over tokens of the cross-entropy, divided by `denominator`; the same on all ranks.

    Args:
        hidden: (tokens, hidden_size), the same on all ranks, as is its gradient.
        weight: (padded_vocab / ranks, hidden_size), this rank's rows.
        labels: (tokens,) int64.
        ranks: the ranks that share the vocabulary.
        valid_vocab: vocabulary size without padding, over all ranks.
        denominator: scalar on the device, not differentiated.
        bias: (padded_vocab / ranks,), or None.
        softcap, label_smoothing, ignore_index, chunk_tokens: as in `linear_cross_entropy`.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs).
    """
    smoothing = label_smoothing * valid_vocab / (valid_vocab - 1) if label_smoothing else 0.0
    chunk = chunk_tokens or default_chunk_tokens(len(weight), cuda=hidden.is_cuda)
    options = LossOptions(valid_vocab, smoothing, softcap, ignore_index, chunk)
    return _VocabularyParallelLoss.apply(hidden, weight, bias, labels, denominator, ranks, options)


# ---------------------------------------------------------------- cost


def vocabulary_loss_traffic(
    tokens: int, vocab: int, hidden: int, itemsize: int, ranks: int, *, cuda: bool
) -> tuple[Collective, ...]:
    """Return the traffic of the loss of a micro batch over a vocabulary of which each rank has `vocab` rows.

    Args:
        tokens: output positions.
        vocab: rows of the rank, with padding.
        hidden: width of the residual stream.
        itemsize: bytes per element of `hidden`.
        ranks: number of the ranks.
        cuda: the loss runs on a GPU.
    """
    accumulate, chunks = max(4, itemsize), -(-tokens // default_chunk_tokens(vocab, cuda=cuda))
    return (
        Collective("tensor", "all-gather", 4 * tokens * ranks * accumulate, "forward", number=chunks),  # statistics
        Collective("tensor", "all-reduce", tokens * hidden * itemsize, "forward"),
    )
