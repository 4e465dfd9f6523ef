"""Cross-entropy of a chunk of logits of which a rank has some columns, in two steps with an exchange between them.

The first takes what the softmax of a token needs of these columns, the second replaces the logits by their gradient in
place (Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cross_entropy_kernels import _capped, _row_statistics, _store_row_gradient, _store_zeros, launch_options
from .launch import jit, tl, triton_runs_on

LARGEST, EXPONENTIALS, TARGET, SUM = range(4)
"""Statistics of a token: largest logit, sum of exp(logit - largest), the label's logit (0 if another rank has it), and
with smoothing the sum of the logits.
"""


@jit
def _statistics_kernel(
    logits_pointer, labels_pointer, statistics_pointer, row_stride, valid_vocab, padded_vocab, first, vocabulary,
    ignore_index, softcap, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take the statistics of one row of logits (tokens, columns) per program; labels count from `first`.

    statistics_pointer: (4, tokens) fp32. A label outside of the vocabulary makes them NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    row_pointer = logits_pointer + row * row_stride
    label = tl.load(labels_pointer + row)
    largest, total, sums = 0.0, 1.0, 0.0
    target = 0.0
    if label != ignore_index:
        largest, total, sums = _row_statistics(row_pointer, valid_vocab, padded_vocab, softcap, SMOOTHED, CAPPED, BLOCK)
        local = label - first
        is_here = (local >= 0) & (local < valid_vocab)
        target = tl.load(row_pointer + local, mask=is_here, other=0.0).to(tl.float32)
        if CAPPED:
            target = tl.where(is_here, _capped(target, softcap)[0], 0.0)
        target = tl.where((label < 0) | (label >= vocabulary), float("nan"), target)
    tokens = tl.num_programs(0)
    tl.store(statistics_pointer + row, largest)
    tl.store(statistics_pointer + tokens + row, total)
    tl.store(statistics_pointer + 2 * tokens + row, target)
    tl.store(statistics_pointer + 3 * tokens + row, sums)


@jit
def _part_gradient_kernel(
    logits_pointer, labels_pointer, logsumexp_pointer, denominator_pointer, row_stride, valid_vocab, padded_vocab,
    first, ignore_index, smoothing, spread, softcap, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace one row of logits per program by its gradient over the scalar at denominator_pointer."""
    row = tl.program_id(0).to(tl.int64)
    row_pointer = logits_pointer + row * row_stride
    label = tl.load(labels_pointer + row)
    if label == ignore_index:
        _store_zeros(row_pointer, padded_vocab, BLOCK)
    else:
        logsumexp = tl.load(logsumexp_pointer + row)
        factor = 1.0 / tl.load(denominator_pointer).to(tl.float32)
        _store_row_gradient(
            row_pointer, label - first, logsumexp, factor, valid_vocab, padded_vocab, smoothing, spread, softcap, 0.0,
            SMOOTHED, CAPPED, False, BLOCK,
        )  # fmt: skip


def part_statistics(
    logits: Tensor, labels: Tensor, *, valid_vocab: int, first: int, vocabulary: int, ignore_index: int,
    smoothing: float, softcap: float,
) -> Tensor:  # fmt: skip
    """Return the statistics (4, tokens) of a rank's columns, in fp32 (fp64 for fp64 logits).

    Args:
        logits: (tokens, columns) before the softcap.
        labels: (tokens,) int64, of the whole vocabulary.
        valid_vocab: columns that are tokens.
        first: token of the first column.
        vocabulary: tokens of all ranks; a label that is none of them makes the loss NaN.
        ignore_index: label of tokens that do not count.
        smoothing: as in `linear_cross_entropy`; 0 leaves out the sum of the logits.
        softcap: as there.
    """
    tokens, columns = logits.shape
    if triton_runs_on(logits):
        statistics = logits.new_empty(4, tokens, dtype=torch.float32)
        _statistics_kernel[(tokens,)](
            logits, labels.contiguous(), statistics, logits.stride(0), valid_vocab, columns, first, vocabulary,
            ignore_index, softcap, SMOOTHED=smoothing > 0, CAPPED=softcap > 0, **launch_options(columns),
        )  # fmt: skip
        return statistics
    logits = _capped_logits(logits[:, :valid_vocab], softcap)[0]
    # a column of -inf, so that a rank with nothing but padding has a maximum, and something to index
    padded = F.pad(logits, (0, 1), value=float("-inf"))
    is_here, place = _place(labels, first, valid_vocab)
    largest = padded.amax(dim=1)
    total = (padded - largest.where(largest.isfinite(), 0)[:, None]).exp().sum(dim=1)
    target = torch.where(is_here, padded.gather(1, place)[:, 0], 0.0)
    outside = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    return torch.stack([largest, total, target.where(~outside, torch.nan), logits.sum(dim=1)])


def part_gradient(
    logits: Tensor, labels: Tensor, logsumexp: Tensor, denominator: Tensor, *, valid_vocab: int, first: int,
    ignore_index: int, smoothing: float, spread: float, softcap: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of a rank's logits, in their memory if Triton runs on them.

    Args:
        logits: (tokens, columns), labels, valid_vocab, first, ignore_index, softcap: as in `part_statistics`.
        logsumexp: of the logits of all ranks, (tokens,).
        denominator: scalar, which divides the gradient.
        smoothing: share of the target that is not the label's.
        spread: share of it that each token has.
    """
    if triton_runs_on(logits):
        tokens, columns = logits.shape
        _part_gradient_kernel[(tokens,)](
            logits, labels.contiguous(), logsumexp, denominator, logits.stride(0), valid_vocab, columns, first,
            ignore_index, smoothing, spread, softcap, SMOOTHED=smoothing > 0, CAPPED=softcap > 0,
            **launch_options(columns),
        )  # fmt: skip
        return logits
    logits, slope = _capped_logits(logits[:, :valid_vocab], softcap)
    _, place = _place(labels, first, valid_vocab)
    gradient = F.pad((logits - logsumexp[:, None]).exp() - spread, (0, 1))
    gradient = gradient.scatter_add(1, place, gradient.new_full(place.shape, smoothing - 1.0))[:, :-1]
    gradient = gradient if slope is None else gradient * slope
    return gradient * ((labels != ignore_index).to(gradient.dtype) / denominator)[:, None]


def _capped_logits(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Return logits in fp32 or fp64 and the derivative of the softcap, if there is one."""
    logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if not softcap:
        return logits, None
    tanh = torch.tanh(logits / softcap)
    return softcap * tanh, 1.0 - tanh.square()


def _place(labels: Tensor, first: int, valid_vocab: int) -> tuple[Tensor, Tensor]:
    """Return whether the label of each token is here, and its column, (tokens, 1): the one after the last if not."""
    local = labels - first
    is_here = (local >= 0) & (local < valid_vocab)
    return is_here, torch.where(is_here, local, valid_vocab)[:, None]
