"""Output projection and cross-entropy over a vocabulary that is split over the tensor-parallel ranks.

As `kernels.cross_entropy`, in chunks of tokens, so that no rank holds the logits of all tokens, and none those of the
whole vocabulary: the ranks exchange three numbers for each token (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.cross_entropy import default_chunk_tokens
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
        accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        first = ranks.rank * len(weight)
        valid = min(max(options.valid_vocab - first, 0), len(weight))
        total = torch.zeros((), dtype=accumulate, device=hidden.device)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        weight_gradient = torch.zeros(weight.shape, dtype=accumulate, device=weight.device) if needs_weight else None
        bias_gradient = torch.zeros(len(weight), dtype=accumulate, device=weight.device) if needs_bias else None
        for start in range(0, len(hidden), options.chunk_tokens):
            chunk = slice(start, start + options.chunk_tokens)
            logits = F.linear(hidden[chunk], weight[:valid], None if bias is None else bias[:valid]).to(accumulate)
            loss, gradient = _loss_and_gradient(logits, labels[chunk], first, denominator, ranks, options)
            total += loss
            if bias_gradient is not None:
                bias_gradient[:valid] += gradient.sum(dim=0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[chunk] = gradient @ weight[:valid]
            if weight_gradient is not None:
                weight_gradient[:valid] += gradient.t() @ hidden[chunk]
        if hidden_gradient is not None:
            hidden_gradient = ranks.sum(hidden_gradient)
        ctx.save_for_backward(
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None or bias is None else bias_gradient.to(bias.dtype),
        )
        return total / denominator

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors
        scaled = (None if each is None else each * gradient.to(each.dtype) for each in saved)
        return (*scaled, None, None, None, None)


def _loss_and_gradient(
    logits: Tensor, labels: Tensor, first: int, denominator: Tensor, ranks: TensorParallel, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of a chunk and the gradient of its local logits (tokens, valid local vocabulary)."""
    tanh = torch.tanh(logits / options.softcap) if options.softcap else None
    logits = logits if tanh is None else options.softcap * tanh
    kept = labels != options.ignore_index
    local = labels - first
    is_here = kept & (local >= 0) & (local < logits.shape[1])
    # a column of -inf, so that a rank with nothing but padding has a maximum, and something to index
    padded = F.pad(logits, (0, 1), value=float("-inf"))
    place = torch.where(is_here, local, logits.shape[1])[:, None]
    highest = ranks.maximum(padded.amax(dim=1))
    target = torch.where(is_here, padded.gather(1, place)[:, 0], 0.0)
    sums = ranks.sum(torch.stack([(logits - highest[:, None]).exp().sum(dim=1), target, logits.sum(dim=1)]))
    log_sum_exp = highest + sums[0].log()
    spread = options.smoothing / options.valid_vocab
    losses = (log_sum_exp - (1 - options.smoothing) * sums[1] - spread * sums[2]) * kept
    gradient = (logits - log_sum_exp[:, None]).exp() - spread
    gradient = F.pad(gradient, (0, 1)).scatter_add(1, place, gradient.new_full(place.shape, options.smoothing - 1.0))
    gradient = gradient[:, :-1]
    if tanh is not None:
        gradient = gradient * (1.0 - tanh.square())
    return losses.sum(), gradient * (kept.to(gradient.dtype) / denominator)[:, None]


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
    return _VocabularyParallelLoss.apply(hidden, weight, bias, labels, denominator, ranks, options)  # pyright: ignore[reportReturnType]


# ---------------------------------------------------------------- cost


def vocabulary_loss_traffic(
    tokens: int, vocab: int, hidden: int, itemsize: int, *, cuda: bool
) -> tuple[Collective, ...]:
    """Return the traffic of the loss of a micro batch over a vocabulary of which each rank has `vocab` rows.

    Args:
        tokens: output positions.
        vocab: rows of the rank, with padding.
        hidden: width of the residual stream.
        itemsize: bytes per element of `hidden`.
        cuda: the loss runs on a GPU.
    """
    accumulate, chunks = max(4, itemsize), -(-tokens // default_chunk_tokens(vocab, cuda=cuda))
    return (
        # the maximum; the sum of exponentials, the label's logit and the sum of the logits
        Collective("tensor", "all-reduce", 4 * tokens * accumulate, "forward", number=2 * chunks),
        Collective("tensor", "all-reduce", tokens * hidden * itemsize, "forward"),
    )


def vocabulary_loss_bytes(
    tokens: int, vocab: int, hidden: int, itemsize: int, *, frozen: bool, cuda: bool
) -> tuple[int, int]:
    """Return the peak bytes of the forward and of the backward pass of the loss; arguments as above.

    Args:
        frozen: the weight has no gradient.
    """
    chunk, accumulate = min(tokens, default_chunk_tokens(vocab, cuda=cuda)), max(4, itemsize)
    # logits, their fp32 copy, padded copy, exponentials, and gradient in both dtypes
    logits = chunk * vocab * (2 * itemsize + 4 * accumulate)
    kept = tokens * hidden * itemsize + (0 if frozen else vocab * hidden * itemsize)
    weight = 0 if frozen else vocab * hidden * accumulate
    return tokens * hidden * 2 * itemsize + logits + weight, 2 * kept
