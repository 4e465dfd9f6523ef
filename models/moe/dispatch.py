"""Token dispatchers of expert parallelism: bring tokens to the ranks of their experts, and the outputs back.

Both see assignments after capacity has dropped some, and give the same result. Dropped assignments are not sent. Gates
travel with the tokens, so that experts weight their outputs, and no rank saves the outputs it gets back.

| dispatcher | each rank sends | the host waits |
|---|---|---|
| `alltoall` | each token once for each of its experts, to the rank of the expert | for the counts, unless padded |
| `allgather` | all tokens to all ranks, which compute those of their own experts | no |

n tokens on this rank, E experts in all, L on each of R ranks, h hidden size, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...kernels.moe.assignments import Assignments, padded_assignments, sorted_assignments
from ...kernels.moe.permute import combine_rows, gather_rows
from ..parallel.expert import ExpertParallel, InFlight, all_gather, all_to_all, start
from ..parallel.peer_exchange import ArrivedRows, give_back, send_to_peers
from .router import Routing

DispatcherName = Literal["alltoall", "allgather", "flex"]


class ExpertInputs(NamedTuple):
    """Rows for the experts of this rank, as `expert_mlp` takes them.

    Attributes:
        tokens: (rows, h).
        experts: experts of each row, counted from the first one of this rank, (rows, 1), or (rows, k) of `allgather`.
        gates: weights of these experts, of the same shape.
        kept: bool, False where another rank has the expert or none computes it; None keeps all.
        capacity: rows to compute for each expert; None for those there are.
        dropout_rows: `assignment_rows`, of the same shape as the gates; None without dropout.
        assignments: `sorted_assignments` of the experts, if they have been sorted.
    """

    tokens: Tensor
    experts: Tensor
    gates: Tensor
    kept: Tensor | None
    capacity: int | None
    dropout_rows: Tensor | None = None
    assignments: Assignments | None = None


class Dispatched(NamedTuple):
    """Tokens on their way to the experts.

    Attributes:
        tokens: (rows, h); this, the gates and all else are as in `ExpertInputs` where they arrive.
        gates: weights of the experts.
        experts: experts of each row that arrives.
        kept: mask of these.
        capacity: rows to compute for each expert.
        dropout_rows: `assignment_rows` on their way; None without dropout.
        assignments: of the rows that arrive, sorted while they are on their way; None if padded.
        order: assignment of each row that this rank has sent; None of `allgather`.
        places: row of each assignment, (n, k), -1 if dropped; None of `allgather`.
    """

    tokens: InFlight
    gates: InFlight
    experts: Tensor
    kept: Tensor | None
    capacity: int | None
    dropout_rows: InFlight | None
    assignments: Assignments | None
    order: Tensor | None = None
    places: Tensor | None = None

    def receive(self) -> ExpertInputs:
        """Wait for the tokens."""
        rows = None if self.dropout_rows is None else self.dropout_rows.wait()
        return ExpertInputs(
            self.tokens.wait(), self.experts, self.gates.wait(), self.kept, self.capacity, rows, self.assignments
        )

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's expert outputs, (n, h), from the outputs of this rank's experts, (rows, h)."""
        rows = start(rows, self.tokens.exchange.transposed()).wait()
        if self.order is None or self.places is None:
            return rows
        return combine_rows(rows, None, self.places, self.order)


class Arrived(NamedTuple):
    """Tokens that are with their experts: see `Dispatched`."""

    arrived: ArrivedRows

    def receive(self, *, in_order: bool = False) -> ExpertInputs:
        """Return the tokens; `in_order`: without the order of their rows, for `fused_experts`."""
        rows, gates, dropout_rows, experts, assignments, _ = self.arrived
        if in_order:
            assignments = assignments._replace(order=assignments.order[:0])
        return ExpertInputs(rows, experts, gates, None, None, dropout_rows, assignments)

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's expert outputs, (n, h), from the outputs of this rank's experts, (rows, h)."""
        return give_back(rows, self.arrived.back)


Dispatcher = Callable[[Tensor, Routing, ExpertParallel, int, bool, Tensor | None], Dispatched | Arrived]
"""Starts to send the tokens of this rank, (n, h), to the ranks of their experts, of which each has the number given.

With True (`pad`) as many rows are sent as the capacity allows, of which unused ones are 0, so that all sizes are known.
The last argument are the `dropout_rows` of the assignments, (n, k)."""


def dispatch_all_to_all(
    tokens: Tensor,
    routing: Routing,
    ranks: ExpertParallel,
    experts: int,
    pad: bool,
    dropout_rows: Tensor | None = None,
) -> Dispatched:
    """`Dispatcher` that sends a row for each assignment to the rank of its expert."""
    (chosen, gates), number = routing.assignment, ranks.size * experts
    slots = routing.slots if pad else None

    def gather() -> tuple[Tensor, Tensor]:
        return gather_rows(tokens, order, places), gather_rows(gates.reshape(-1, 1), order, places.reshape(-1, 1))

    if slots is not None:
        order, places = padded_assignments(chosen, number, slots, routing.keep_mask)
        sent = received = [experts * slots] * ranks.size
        repeats = slots
        gathered = gather()
    else:
        order, ends, places = sorted_assignments(chosen, number, routing.keep_mask)
        counts = ranks.start_counts(torch.diff(ends, prepend=ends.new_zeros(1)).to(torch.int64))
        # beside the exchange of the counts, unless their number says which rows are sent
        gathered = gather() if routing.keep_mask is None else None
        arriving, sent, received = counts.wait(ranks.size)
        if gathered is None:
            order = order[: sum(sent)]
            gathered = gather()
        repeats = arriving.flatten()
    exchange = all_to_all(ranks, sent, received)
    rows, row_gates = (start(each, exchange) for each in gathered)
    sent_rows = None
    if dropout_rows is not None:
        sent_rows = start(dropout_rows.flatten()[order.clamp(min=0)][:, None], exchange)
    local = torch.arange(experts, device=tokens.device).repeat(ranks.size)
    local = local.repeat_interleave(repeats, output_size=sum(received)).unsqueeze(1)
    capacity = None if slots is None else slots * ranks.size
    arrivals = None if pad else sorted_assignments(local, experts)
    return Dispatched(rows, row_gates, local, None, capacity, sent_rows, arrivals, order, places)


def dispatch_all_gather(
    tokens: Tensor,
    routing: Routing,
    ranks: ExpertParallel,
    experts: int,
    pad: bool,
    dropout_rows: Tensor | None = None,
) -> Dispatched:
    """`Dispatcher` that sends all tokens to all ranks."""
    (chosen, gates), slots, exchange = routing.assignment, routing.slots if pad else None, all_gather(ranks)
    if routing.keep_mask is not None:
        chosen = chosen.masked_fill(~routing.keep_mask, -1)
    everywhere, rows, row_gates = start(chosen, exchange), start(tokens, exchange), start(gates, exchange)
    local = everywhere.wait() - ranks.rank * experts
    here = (local >= 0) & (local < experts)
    capacity = None if slots is None else slots * ranks.size
    sent_rows = None if dropout_rows is None else start(dropout_rows, exchange)
    local = local.clamp(0, experts - 1)
    arrivals = None if pad else sorted_assignments(local, experts, here)
    return Dispatched(rows, row_gates, local, here, capacity, sent_rows, arrivals)


def dispatch_to_peers(
    tokens: Tensor,
    routing: Routing,
    ranks: ExpertParallel,
    experts: int,
    pad: bool,
    dropout_rows: Tensor | None = None,
) -> Arrived:
    """`Dispatcher` that writes a row for each assignment into the memory of the rank of its expert."""
    chosen, gates = routing.assignment
    return Arrived(send_to_peers(tokens, gates, chosen, routing.keep_mask, dropout_rows, ranks, experts))


DISPATCHERS: dict[DispatcherName, Dispatcher] = {
    "alltoall": dispatch_all_to_all,
    "allgather": dispatch_all_gather,
    "flex": dispatch_to_peers,
}
