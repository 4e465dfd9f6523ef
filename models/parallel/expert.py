"""The ranks of expert parallelism, and the differentiable exchange of rows among them (GShard, arXiv 2006.16668).

An exchange is started and ended by two functions, so that other work runs between them in both passes: autograd starts
the exchange of the gradients where the forward pass ended it, and waits for it where the forward pass started it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .partition import Partition, RankPart

_ops: Any = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """The expert-parallel ranks of this process, each with an equal share of the experts of every layer.

    Attributes:
        rank: rank in the group; it holds experts rank * E / size to (rank + 1) * E / size - 1.
        size: ranks of the group, which together hold all experts once.
        group: name of the process group.
        replica: index of this rank among those that hold the same experts (`ParallelLayout.expert_data_groups`).
        num_replicas: number of those.
    """

    rank: int
    size: int
    group: str
    replica: int = 0
    num_replicas: int = 1

    def part(self, partition: Partition) -> RankPart:
        """Return this rank's part of a parameter of the experts."""
        return RankPart(partition, self.rank, self.size, self.replica, self.num_replicas, "expert")

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, of which autograd sees nothing."""
        return _ops.wait_tensor(_ops.all_reduce(tensor, "sum", self.group))

    def start_counts(self, counts: Tensor) -> ArrivingCounts:
        """Start to send each rank the numbers of rows for its experts, from this rank's own (E,)."""
        even = [len(counts) // self.size] * self.size
        return ArrivingCounts(counts, _ops.all_to_all_single(counts, even, even, self.group))


class ArrivingCounts(NamedTuple):
    """Numbers of rows in an exchange.

    Attributes:
        own: rows of this rank for each expert, (E,).
        arriving: those of each rank for each of this rank's experts, (E,), not to be read before they have arrived.
    """

    own: Tensor
    arriving: Tensor

    def wait(self, ranks: int) -> tuple[Tensor, list[int], list[int]]:
        """Return (ranks, E / ranks), the rows that arrive for each expert, and the rows sent to and received from each.

        The host waits for the device once, for the only numbers that it needs in both passes. Read from the device,
        `tolist` of a compiled graph would wait for each number.
        """
        arriving = _ops.wait_tensor(self.arriving).view(ranks, -1)
        totals = torch.stack([self.own.view(ranks, -1).sum(1), arriving.sum(1)])
        sent, received = totals.to("cpu").tolist()
        return arriving, sent, received


class Exchange(NamedTuple):
    """Exchange of the rows of a tensor over a process group.

    Attributes:
        kind: collective. `all_to_all` sends rows to each rank, `all_gather` the same rows to all, and `reduce_scatter`,
            its transpose, sums what the ranks have for each.
        ranks: ranks of the group.
        group: name of the process group.
        sent: rows sent to each rank, for `all_to_all`.
        received: rows received from each rank, likewise.
    """

    kind: Literal["all_to_all", "all_gather", "reduce_scatter"]
    ranks: int
    group: str
    sent: list[int]
    received: list[int]

    def transposed(self) -> Exchange:
        """Return the exchange that sends every row back, and that of the gradients."""
        if self.kind == "all_to_all":
            return Exchange("all_to_all", self.ranks, self.group, self.received, self.sent)
        other = "reduce_scatter" if self.kind == "all_gather" else "all_gather"
        return Exchange(other, self.ranks, self.group, [], [])


def all_to_all(ranks: ExpertParallel, sent: list[int], received: list[int]) -> Exchange:
    """Return the exchange of `sent` rows to, and `received` rows from each rank."""
    return Exchange("all_to_all", ranks.size, ranks.group, sent, received)


def all_gather(ranks: ExpertParallel) -> Exchange:
    """Return the exchange in which each rank gets the rows of all."""
    return Exchange("all_gather", ranks.size, ranks.group, [], [])


def begin(rows: Tensor, exchange: Exchange) -> Tensor:
    """Start the exchange of (rows, ...), unknown to autograd; return the rows that arrive, not to be read yet."""
    rows = rows.contiguous()
    if exchange.kind == "all_to_all":
        return _ops.all_to_all_single(rows, exchange.received, exchange.sent, exchange.group)
    if exchange.kind == "all_gather":
        return _ops.all_gather_into_tensor(rows, exchange.ranks, exchange.group)
    return _ops.reduce_scatter_tensor(rows, "sum", exchange.ranks, exchange.group)


def wait(arriving: Tensor) -> Tensor:
    """Return the rows of an exchange when they have arrived, unknown to autograd."""
    return _ops.wait_tensor(arriving)


class _WaitForGradient(torch.autograd.Function):
    """Identity whose backward waits for the gradient that `begin` has started to exchange."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        return wait(gradient)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, arriving: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return wait(arriving)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return begin(gradient, ctx.exchange.transposed()), None, None


class InFlight(NamedTuple):
    """A tensor in an exchange: its rows, and those that arrive."""

    rows: Tensor
    arriving: Tensor
    exchange: Exchange

    def wait(self) -> Tensor:
        """Return the rows that have arrived."""
        return _Receive.apply(*self)


def start(rows: Tensor, exchange: Exchange) -> InFlight:
    """Start the exchange of (rows, ...)."""
    waited: Any = _WaitForGradient.apply(rows)
    return InFlight(waited, begin(rows.detach(), exchange), exchange)
