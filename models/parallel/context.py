"""Context parallelism: which tokens of each sequence a rank has, and the sharding of batches.

A causal sequence is cut into 2 * ranks runs, of which rank r has runs r and 2 * ranks - 1 - r (zigzag: all ranks see as
many keys); a bidirectional one into as many runs as ranks. All layers but attention see the rank's tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.attention.packed_sequences import document_position_ids
from ..dispatch.context_calls import ContextSplit

_ops: Any = torch.ops._c10d_functional


class Run(NamedTuple):
    """Consecutive tokens of a rank.

    Attributes:
        start: first of them among the tokens of the rank.
        length: their number.
        first: first of them in the whole sequence.
    """

    start: int
    length: int
    first: int


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The context-parallel ranks of this process.

    Attributes:
        rank: rank in the group.
        split: their number and exchange.
        group: name of the process group of all of them.
        head_group: of the consecutive ranks of an all-to-all; `group` itself in `a2a`.
        ring_group: of the ranks of a ring, every `split.head_ranks`-th one; `group` itself in `p2p`.
    """

    rank: int
    split: ContextSplit
    group: str
    head_group: str = ""
    ring_group: str = ""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.split.size

    @property
    def ring_rank(self) -> int:
        """Rank in the ring."""
        return self.rank // self.split.head_ranks

    @property
    def head_rank(self) -> int:
        """Rank in the all-to-all."""
        return self.rank % self.split.head_ranks


def token_runs(tokens: int, rank: int, size: int, *, zigzag: bool) -> list[Run]:
    """Return the runs of a rank's tokens, in ascending order.

    Args:
        tokens: tokens of the rank.
        rank: rank among those that share the sequence.
        size: number of these ranks.
        zigzag: the sequence is causal.
    """
    if not zigzag:
        return [Run(0, tokens, rank * tokens)]
    half = tokens // 2
    return [Run(0, half, rank * half), Run(half, half, (2 * size - 1 - rank) * half)]


def context_token_indices(length: int, rank: int, size: int, *, zigzag: bool) -> Tensor:
    """Return the positions in a sequence of the tokens of a rank, ascending, int64 (length / size,).

    Args:
        length: tokens of the whole sequence, a multiple of `size`, of twice that with `zigzag`.
        rank: rank among those that share the sequence.
        size: number of these ranks.
        zigzag: the sequence is causal.

    Raises:
        ValueError: the length is not such a multiple.
    """
    runs = 2 * size if zigzag else size
    if length % runs:
        raise ValueError(f"`length` ({length}) must be a multiple of {runs} for {size} context-parallel ranks; pad it.")
    found = token_runs(length // size, rank, size, zigzag=zigzag)
    return torch.cat([torch.arange(run.first, run.first + run.length) for run in found])


def shard_batch(batch: Mapping[str, Tensor], rank: int, size: int, *, causal: bool) -> dict[str, Tensor]:
    """Return a rank's tokens of a batch of a model of any family.

    Args:
        batch: fields of whole sequences, each (batch, tokens).
        rank: context-parallel rank.
        size: number of ranks.
        causal: the model is a GPT, or a T5, whose fields of the encoder (`encoder_...`) are bidirectional.
    """
    found: dict[str, Tensor] = {}
    for name, field in batch.items():
        zigzag = causal and not name.startswith("encoder_")
        index = context_token_indices(field.shape[1], rank, size, zigzag=zigzag)
        found[name] = field[:, index.to(field.device)]
    return found


# ---------------------------------------------------------------- orders


def natural_order(by_rank: Tensor, *, zigzag: bool) -> Tensor:
    """Return (batch, ranks * tokens, ...) in the order of the sequence from the tokens (ranks, batch, tokens, ...)."""
    if not zigzag:
        return by_rank.transpose(0, 1).flatten(1, 2)
    early, late = by_rank.unflatten(2, (2, -1)).unbind(2)
    return torch.cat((early, late.flip(0))).transpose(0, 1).flatten(1, 2)


def rank_order(whole: Tensor, ranks: int, *, zigzag: bool) -> Tensor:
    """Return the tokens of each rank (ranks, batch, tokens, ...), the inverse of `natural_order`."""
    if not zigzag:
        return whole.unflatten(1, (ranks, -1)).transpose(0, 1)
    early, late = whole.unflatten(1, (2 * ranks, -1)).transpose(0, 1).chunk(2)
    return torch.stack((early, late.flip(0)), dim=2).flatten(2, 3)


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """A rank's tokens of the sequences of a stack.

    Attributes:
        ranks: the context-parallel ranks.
        zigzag: the stack is causal.
    """

    ranks: ContextParallel
    zigzag: bool

    def whole_length(self, tokens: int) -> int:
        """Return the length of the sequence of which each rank has `tokens`."""
        return tokens * self.ranks.size

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of the rank's `tokens` in the sequence, int64 (tokens,)."""
        runs = token_runs(tokens, self.ranks.rank, self.ranks.size, zigzag=self.zigzag)
        return torch.cat([torch.arange(run.first, run.first + run.length, device=device) for run in runs])

    def local(self, whole: Tensor) -> Tensor:
        """Return the rank's tokens (batch, tokens, ...) of whole sequences."""
        return rank_order(whole, self.ranks.size, zigzag=self.zigzag)[self.ranks.rank]

    def gather(self, tokens: Tensor) -> Tensor:
        """Return small numbers of all ranks' tokens, (batch, whole length, ...), of which autograd sees nothing."""
        sent = tokens.to(torch.uint8) if tokens.dtype == torch.bool else tokens
        sent = sent.contiguous().view(-1)
        gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(sent, self.ranks.size, self.ranks.group))
        return natural_order(gathered.view(self.ranks.size, *tokens.shape), zigzag=self.zigzag).to(tokens.dtype)


def whole_sequences(tokens: Tensor | None, shard: SequenceShard | None) -> Tensor | None:
    """Return small numbers of the tokens of all ranks, (batch, whole length), if ranks share the sequences."""
    return tokens if tokens is None or shard is None else shard.gather(tokens)


def local_position_ids(documents: Tensor, shard: SequenceShard | None) -> Tensor:
    """Return the position ids of the rank's tokens, from 0 in each document, given the document ids of whole
    sequences.
    """
    positions = document_position_ids(documents)
    return positions if shard is None else shard.local(positions)


def labels_of_all(labels: Tensor, shard: SequenceShard | None) -> Tensor:
    """Return where whole sequences have labels, bool (batch, whole length), from a rank's labels, of which -100 is
    ignored.
    """
    return labels >= 0 if shard is None else shard.gather(labels >= 0)


class _UnshardSequences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        return shard.gather(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return ctx.shard.local(gradient), None


def unshard_sequences(tokens: Tensor, shard: SequenceShard) -> Tensor:
    """Return (batch, whole length, ...) from the ranks' tokens (batch, tokens, ...), small numbers.

    The gradients of the ranks are parts of a sum, or each is its share of the same.
    """
    return _UnshardSequences.apply(tokens, shard)
