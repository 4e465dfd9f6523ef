"""Position embeddings before the stacks, logits and loss after them, for all model families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.autocast import autocast_dtype
from ..kernels.cross_entropy import chunked_logits_bytes, default_chunk_tokens, linear_cross_entropy
from .layers.cost import ByteWidths, Matrix, Weights
from .layers.position_embeddings import PositionEmbedding, SamplePositionEmbedding
from .parallel.collectives import TensorParallel
from .parallel.context import SequenceShard
from .parallel.linear import gather_vocabulary
from .parallel.vocabulary_loss import vocabulary_parallel_loss

TokenFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps logits (N, V) in fp32 (fp64 for an fp64 model), without the vocabulary padding, and labels, int64 (N,), to a
value of each token, (N,). Labels that are ignored are 0, and the values there are left out."""


@dataclass(frozen=True, slots=True)
class OwnFunctions:
    """Functions of the user's own.

    Attributes:
        loss: replaces the cross-entropy in training; None: cross-entropy.
        metrics: summed over all labels in evaluation, beside the cross-entropy.
    """

    loss: TokenFunction | None = None
    metrics: tuple[TokenFunction, ...] = ()


def add_position_embeddings(
    embedded: Tensor, table: PositionEmbedding | None, positions: Tensor | None, shard: SequenceShard | None = None
) -> Tensor:
    """Add learned position embeddings.

    Args:
        embedded: (batch, tokens, hidden_size).
        table: learned position embedding, or None.
        positions: position ids, int64 (batch, tokens), ignored by a `SamplePositionEmbedding`; None counts each row
            from 0.
        shard: which tokens of whole sequences these are; None: all.
    """
    tokens = embedded.shape[1]
    if table is None:
        return embedded
    if shard is not None and (positions is None or isinstance(table, SamplePositionEmbedding)):
        weight = table.table if isinstance(table, SamplePositionEmbedding) else table.weight
        return embedded + F.embedding(shard.positions(tokens, embedded.device), weight)
    if isinstance(table, SamplePositionEmbedding):
        return embedded + table(tokens)
    return embedded + (table.weight[:tokens] if positions is None else table(positions))


def add_decode_position_embeddings(embedded: Tensor, table: PositionEmbedding | None, positions: Tensor) -> Tensor:
    """Add learned position embeddings to the tokens of a decode step.

    Args:
        embedded: (rows, 1, hidden_size).
        table: learned position embedding, or None.
        positions: positions of the tokens, int64 (rows, 1).
    """
    if table is None:
        return embedded
    return embedded + (table.table[positions] if isinstance(table, SamplePositionEmbedding) else table(positions))


def token_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    vocab_size: int,
    softcap: float = 0.0,
    ranks: TensorParallel | None = None,
) -> Tensor:
    """Return logits (..., padded_vocab_size) in the dtype of the model; -inf for the vocabulary padding.

    Args:
        hidden: (..., hidden_size).
        weight: (padded_vocab_size, hidden_size).
        bias: (padded_vocab_size,), or None.
        vocab_size: vocabulary size without padding.
        softcap: bound of the logits, softcap * tanh(logit / softcap); 0 for none.
        ranks: ranks of which each has its rows of the weight and the bias, for inference; None for one.
    """
    logits = F.linear(hidden, weight, bias)
    if ranks is not None:
        logits = gather_vocabulary(logits, ranks)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits[..., vocab_size:] = float("-inf")
    return logits


def token_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    label_smoothing: float,
    denominator: Tensor | float,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    ranks: TensorParallel | None = None,
    own: OwnFunctions = OwnFunctions(),
    training: bool = False,
) -> Tensor:
    """Return the sum of the cross-entropies of all labels divided by `denominator`, without materializing all logits.

    In training a loss of the user's own replaces the cross-entropy, and gets the logits of all tokens at once.

    Args:
        hidden: (batch, tokens, hidden_size).
        weight: (padded_vocab_size, hidden_size).
        labels: int64 (batch, tokens); -100 is ignored.
        vocab_size: vocabulary size without padding.
        label_smoothing: label smoothing factor.
        denominator: a scalar on the device, or a number.
        bias: (padded_vocab_size,), or None.
        softcap: as in `token_logits`.
        ranks: ranks of which each has its rows of the weight and the bias; None for one.
        own: functions of the user's own; `own.loss` needs all rows of the weight.
        training: the model is in training mode.

    Returns:
        A scalar in fp32 (fp64 for an fp64 model); with metrics, in evaluation, (1 + metrics,): the scalar and the sums
        of the metrics, divided likewise.
    """
    if training and own.loss is not None:
        options: Any = {"vocab_size": vocab_size, "bias": bias, "softcap": softcap}
        return _sum_over_labels(own.loss, hidden.flatten(0, 1), weight, labels.flatten(), **options) / denominator
    dtype = autocast_dtype(hidden)  # autocast does not apply to the fused operator: cast here
    if not isinstance(denominator, Tensor):
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        denominator = torch.full((), denominator, dtype=exact, device=hidden.device)
    cross_entropy = linear_cross_entropy if ranks is None else partial(vocabulary_parallel_loss, ranks=ranks)
    loss = cross_entropy(
        hidden.flatten(0, 1).to(dtype),
        weight.to(dtype),
        labels.flatten(),
        valid_vocab=vocab_size,
        bias=None if bias is None else bias.to(dtype),
        softcap=softcap,
        label_smoothing=label_smoothing,
        denominator=denominator,
    )
    if training or not own.metrics:
        return loss
    sums = torch.zeros(len(own.metrics), dtype=loss.dtype, device=loss.device)
    rows, targets = hidden.flatten(0, 1), labels.flatten()
    chunk = default_chunk_tokens(weight.shape[0], cuda=hidden.is_cuda)
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk], weight, targets[start : start + chunk]
        for index, metric in enumerate(own.metrics):
            sums[index] += _sum_over_labels(
                metric, *part, vocab_size=vocab_size, bias=bias, softcap=softcap, ranks=ranks
            )
    return torch.cat([loss[None], sums / denominator])


def _sum_over_labels(
    function: TokenFunction,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    bias: Tensor | None,
    softcap: float,
    ranks: TensorParallel | None = None,
) -> Tensor:
    """Return the sum of a function's values over the labels that are not ignored; hidden (N, H), labels (N,)."""
    counted = labels != -100
    if ranks is None:
        weight, bias = weight[:vocab_size], None if bias is None else bias[:vocab_size]
    logits = F.linear(hidden, weight, bias)
    if ranks is not None:
        logits = gather_vocabulary(logits, ranks)[:, :vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return function(logits, labels.masked_fill(~counted, 0)).to(logits.dtype).masked_fill(~counted, 0).sum()


# ---------------------------------------------------------------- cost


def head_weights(vocab: int, hidden: int) -> Weights:
    """Return the weights of the output head, which may be the token embedding."""
    return Weights((Matrix("head", vocab * hidden),))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMemory:
    """Memory of the output projection fused with cross-entropy; see `kernels.cross_entropy`.

    Attributes:
        forward: peak bytes of the forward pass: chunks of logits, gradients of the head's weight and of its input.
        backward: peak bytes of the backward pass, which scales the gradients (in place on a GPU).
        kept: bytes saved between both.
        num_parameters: number of parameters of the head, whose gradient exists from then on.
    """

    forward: int
    backward: int
    kept: int
    num_parameters: int


def token_loss_memory(
    tokens: int, vocab: int, hidden: int, widths: ByteWidths, *, frozen: bool, cuda: bool, own: bool = False
) -> LossMemory:
    """Return the memory of `token_loss` of one micro batch.

    Args:
        tokens: output positions.
        vocab: padded vocabulary size.
        hidden: width of the residual stream.
        widths: bytes per element.
        frozen: the head has no gradient.
        cuda: the loss runs on a GPU.
        own: a loss of the user's own, which we assume to save the logits and as much again, like a log-softmax.
    """
    e, weights = widths.compute, vocab * hidden
    # under autocast the fp32 input exists beside its copy
    uncast_input = widths.residual if widths.casts_weights else 0
    inputs, input_gradient = tokens * hidden * (e + uncast_input), tokens * hidden * e
    product = 0 if frozen else weights * e
    cast_weight = weights * e if widths.casts_weights else 0
    cast_gradient = weights * widths.weights if widths.casts_weights and not frozen else 0
    if own:
        logits, exact = tokens * vocab, max(4, e)
        kept = inputs + 2 * logits * exact
        return LossMemory(
            forward=kept + logits * e + cast_weight,
            backward=kept + logits * (2 * exact + e) + input_gradient + product + cast_gradient,
            kept=kept,
            num_parameters=0 if frozen else weights,
        )
    logits = chunked_logits_bytes(tokens, vocab, hidden, e, product, cuda=cuda)
    kept = input_gradient + product  # saved for the backward pass
    return LossMemory(
        forward=inputs
        + input_gradient
        + chunked_logits_bytes(tokens, vocab, hidden, e, product, cuda=cuda)
        + cast_weight,
        backward=kept * (1 if cuda and e < 8 else 2) + cast_gradient,
        kept=kept,
        num_parameters=0 if frozen else weights,
    )
