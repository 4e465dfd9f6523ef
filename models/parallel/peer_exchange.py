"""Exchange of rows among expert-parallel ranks whose GPUs read each other's memory, by kernels that write into it.

Every rank has an inbox for the rows of its experts, which holds the worst case, and a box for the results of its own
assignments. Ranks wait for each other on their streams; the host waits only for the number of rows that arrive, while
they are on their way, so that nothing is allocated for more. Every rank calls the same operations in the same order.

n tokens on each rank, h hidden size, k experts per token, E experts of R ranks. Targets as in `kernels.moe.peer_rows`,
of assignments; a source is the target of a result, rank * n k + assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...kernels.custom_op import custom_op
from ...kernels.launch import triton_runs_on
from ...kernels.moe.assignments import Assignments, sorted_assignments
from ...kernels.moe.peer_rows import Peers, send_rows
from ...kernels.moe.permute import reference_combine, triton_combine, use_triton
from .expert import ExpertParallel
from .peer_memory import COUNTER_BYTES, Memory

_EXTRAS = 3
"""Numbers of at most 8 bytes beside each row: gate, source, and what dropout is a function of."""


class MemoryParts(NamedTuple):
    """Bytes of the parts of a rank's memory, or their offsets."""

    counters: int
    counts: int
    inbox: int
    results: int


def max_rows(ranks: int, tokens: int, topk: int, experts: int) -> int:
    """Return the rows that arrive at a rank at most: no token has an expert twice."""
    return ranks * tokens * min(topk, experts // ranks)


def memory_parts(ranks: int, tokens: int, topk: int, experts: int, row: int) -> MemoryParts:
    """Return the memory of a rank for `tokens` tokens of each, of `row` bytes."""
    inbox, results = max_rows(ranks, tokens, topk, experts), tokens * topk
    return MemoryParts(
        ranks * COUNTER_BYTES, _aligned(ranks * experts * 4), _places(inbox, row)[-1], _places(results, row)[-1]
    )


def _aligned(size: int) -> int:
    return -(-size // 256) * 256


def _places(rows: int, row: int) -> list[int]:
    """Return the offsets of `rows` rows and of the extras beside them, and their end."""
    return [0, *(_aligned(rows * row) + number * _aligned(rows * 8) for number in range(_EXTRAS + 1))]


class PeerExchange:
    """Exchange among the ranks of a group; its memory grows with what is sent, a collective of the ranks.

    Args:
        allocate: allocates memory of each rank, of so many bytes.
        ranks: number of ranks.

    Attributes:
        ranks: likewise.
    """

    def __init__(self, allocate: Callable[[int], Memory], ranks: int) -> None:
        self.ranks = ranks
        self._allocate = allocate
        self._sizes = self._offsets = MemoryParts(0, 0, 0, 0)
        self._memory: Any = None
        self._peers: Any = None
        self._rows_of_counts: Any = None
        self._barriers = 0
        self._in_use: set[str] = set()
        self._host: Tensor | None = None

    def reserve(self, needed: MemoryParts, tokens: Tensor) -> None:
        """Provide memory of at least these sizes, for tokens like these."""
        if all(size >= more for size, more in zip(self._sizes, needed, strict=True)):
            return
        self._sizes = MemoryParts(*map(max, needed, self._sizes))
        self._offsets = MemoryParts(*(sum(self._sizes[:index]) for index in range(len(needed))))
        memory = self._memory = self._allocate(sum(self._sizes))
        addresses = torch.tensor([each.data_ptr() for each in memory.of_rank], device=tokens.device)
        by_triton = triton_runs_on(addresses) or use_triton(tokens)
        self._peers, self._barriers = Peers(memory.of_rank, addresses, memory.rank, by_triton), 0
        everyone = torch.arange(self.ranks, dtype=torch.int32, device=tokens.device)
        self._rows_of_counts = everyone * self.ranks + memory.rank
        self._in_use.clear()

    def gather_counts(self, counts: Tensor) -> Tensor:
        """Return the counts (E,) int32 of all ranks, (R, E)."""
        self._claim("counts")
        send_rows(self._peers, counts.view(1, -1), self._rows_of_counts, self._offsets.counts, self.ranks)
        self._barrier()
        self._in_use.add("counts")
        return self._part(self._offsets.counts, counts, self.ranks).clone()

    def send(self, rows: Sequence[Tensor], targets: Tensor, capacity: int, number: Tensor | None) -> Tensor:
        """Send tokens (n, h), and extras (n k, 1), to the targets (n, k); return `number` on the host, if given."""
        host, event = number, None
        if number is not None and number.is_cuda:
            if self._host is None:
                self._host = torch.empty(1, dtype=number.dtype, pin_memory=True)
            host = self._host.copy_(number, non_blocking=True)
            event = torch.cuda.current_stream(number.device).record_event()
        self._claim("inbox")
        first, *places = (self._offsets.inbox + place for place in _places(capacity, _row_bytes(rows[0])))
        extras = list(zip(rows[1:], places, strict=False))
        send_rows(self._peers, rows[0], targets, first, capacity, extras)
        self._barrier()
        if event is not None:
            event.synchronize()
        return torch.empty(0, dtype=torch.int64) if host is None else host.to(torch.int64, copy=True)

    def receive(self, like: Sequence[Tensor], capacity: int, number: int) -> list[Tensor]:
        """Return the `number` rows that have arrived of each that was sent."""
        self._in_use.add("inbox")
        pairs = zip(like, _places(capacity, _row_bytes(like[0])), strict=False)
        return [self._part(self._offsets.inbox + place, each[0], number).clone() for each, place in pairs]

    def give_back(self, rows: Tensor, gates: Tensor | None, sources: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of each token's rows, (n, h), and what was sent for the gates of its assignments, (n, k)."""
        self._claim("results")
        first, second, *_ = (self._offsets.results + each for each in _places(slots.numel(), _row_bytes(rows)))
        extras = [] if gates is None else [(gates, second)]
        send_rows(self._peers, rows, sources, first, slots.numel(), extras)
        self._barrier()
        self._in_use.add("results")
        results = self._peers.part(self._peers.rank, first, rows.dtype, slots.numel(), rows.shape[1])
        total = (triton_combine if use_triton(results) else reference_combine)(results, None, slots)
        if gates is None:
            return total, rows.new_empty(0)
        found = self._peers.part(self._peers.rank, second, gates.dtype, *slots.shape)
        return total, torch.where(slots >= 0, found, 0)

    def _part(self, offset: int, row: Tensor, rows: int) -> Tensor:
        return self._peers.part(self._peers.rank, offset, row.dtype, rows, row.numel())

    def _claim(self, part: str) -> None:
        """Make sure that no rank still reads a part of its memory that is to be written."""
        if part in self._in_use:
            self._barrier()

    def _barrier(self) -> None:
        """Make the current stream wait for all ranks to have come here, with what they have written before."""
        self._barriers += 1
        self._in_use.clear()
        self._memory.meet(self._barriers)


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1] * rows.itemsize


_EXCHANGES: WeakValueDictionary[str, PeerExchange] = WeakValueDictionary()
"""Exchange of each process group that has one, by name, so that compiled layers find it."""


def open_exchange(group: str, allocate: Callable[[int], Memory], ranks: int) -> PeerExchange:
    """Return the exchange of the ranks of a process group, by its name; it lasts as long as it is referenced."""
    _EXCHANGES[group] = exchange = PeerExchange(allocate, ranks)
    return exchange


# ---------------------------------------------------------------- custom operations


@custom_op("stoker::peer_counts")
def _gather_counts(counts: Tensor, tokens: Tensor, topk: int, ranks: int, group: str) -> Tensor:
    exchange = _EXCHANGES[group]
    exchange.reserve(memory_parts(ranks, len(tokens), topk, len(counts), _row_bytes(tokens)), tokens)
    return exchange.gather_counts(counts)


@torch.library.register_fake("stoker::peer_counts")
def _(counts: Tensor, tokens: Tensor, topk: int, ranks: int, group: str) -> Tensor:
    return counts.new_empty(ranks, len(counts))


@custom_op("stoker::peer_send")
def _send(rows: list[Tensor], targets: Tensor, number: Tensor | None, capacity: int, group: str) -> Tensor:
    return _EXCHANGES[group].send(rows, targets, capacity, number)


@torch.library.register_fake("stoker::peer_send")
def _(rows: list[Tensor], targets: Tensor, number: Tensor | None, capacity: int, group: str) -> Tensor:
    return torch.empty(int(number is not None), dtype=torch.int64, device="cpu")


@custom_op("stoker::peer_receive")
def _receive(sent: Tensor, like: list[Tensor], number: int, capacity: int, group: str) -> list[Tensor]:
    """Receive `number` rows like those that were sent; `sent`, what `_send` has returned, orders the two."""
    return _EXCHANGES[group].receive(like, capacity, number)


@torch.library.register_fake("stoker::peer_receive")
def _(sent: Tensor, like: list[Tensor], number: int, capacity: int, group: str) -> list[Tensor]:
    return [each.new_empty(number, each.shape[1]) for each in like]


@custom_op("stoker::peer_return")
def _give_back(rows: Tensor, gates: Tensor | None, sources: Tensor, slots: Tensor, group: str) -> tuple[Tensor, Tensor]:
    return _EXCHANGES[group].give_back(rows, gates, sources, slots)


@torch.library.register_fake("stoker::peer_return")
def _(rows: Tensor, gates: Tensor | None, sources: Tensor, slots: Tensor, group: str) -> tuple[Tensor, Tensor]:
    found = rows.new_empty(0) if gates is None else gates.new_empty(slots.shape)
    return rows.new_empty(slots.shape[0], rows.shape[1]), found


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, gates: Tensor, others: list[Tensor], sent: Tensor, slots: Tensor, *options: Any
    ) -> tuple[Tensor, ...]:
        rows, row_gates, *others = _receive(sent, [tokens, gates.reshape(-1, 1), *others], *options)
        ctx.save_for_backward(others[0], slots)
        ctx.group = options[-1]
        ctx.mark_non_differentiable(*others)
        return rows, row_gates, *others

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, gate_gradient = gradients[:2]
        return *_give_back(gradient, gate_gradient, *ctx.saved_tensors, ctx.group), *(None,) * 6


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sources: Tensor, slots: Tensor, targets: Tensor, capacity: int, group: str
    ) -> Tensor:
        ctx.save_for_backward(targets, sources)
        ctx.options = capacity, group
        return _give_back(rows, None, sources, slots, group)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        targets, sources = ctx.saved_tensors
        sent = _send([gradient], targets, None, *ctx.options)
        return _receive(sent, [gradient], sources.shape[0], *ctx.options)[0], *(None,) * 5


# ---------------------------------------------------------------- public functions


class ArrivedRows(NamedTuple):
    """Rows of this rank's experts from all ranks, sorted by expert, then by rank, in the order of the tokens.

    Attributes:
        rows: (rows, h).
        gates: weights of the experts, (rows, 1).
        dropout_rows: `assignment_rows` (rows, 1), or None.
        experts: experts of the rows, counted from the first one of this rank, int64 (rows, 1).
        assignments: the rows in their order.
        back: what `give_back` needs besides the results.
    """

    rows: Tensor
    gates: Tensor
    dropout_rows: Tensor | None
    experts: Tensor
    assignments: Assignments
    back: tuple[Tensor, Tensor, Tensor, int, str]


def send_to_peers(
    tokens: Tensor, gates: Tensor, chosen: Tensor, kept: Tensor | None, dropout: Tensor | None, ranks: ExpertParallel,
    experts: int,
) -> ArrivedRows:  # fmt: skip
    """Send each token (n, h) to the ranks of its experts.

    Args:
        tokens: (n, h).
        gates: weights of the experts, (n, k).
        chosen: experts of each token, int64 (n, k).
        kept: bool (n, k), False for dropped assignments; None keeps all.
        dropout: `assignment_rows` (n, k), or None.
        ranks: the ranks, whose group has an exchange (`open_exchange`).
        experts: experts of each rank.
    """
    rank, size, group, number = ranks.rank, ranks.size, ranks.group, ranks.size * experts
    _, ends, places = sorted_assignments(chosen, number, kept)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    counts = _gather_counts(ends - starts, tokens.detach(), chosen.shape[1], size, group)
    totals = counts.sum(0, dtype=torch.int32).view(size, experts)
    arriving_ends = totals.cumsum(1, dtype=torch.int32)
    # where place 0 of each expert would be
    first = (arriving_ends - totals).flatten() + counts[:rank].sum(0, dtype=torch.int32) - starts
    capacity, dropped = max_rows(size, *chosen.shape, experts=number), places < 0
    targets = (chosen // experts).to(torch.int32) * capacity + first[chosen] + places
    slots = torch.arange(chosen.numel(), dtype=torch.int32, device=chosen.device).view_as(chosen)
    others = [(slots + rank * chosen.numel()).view(-1, 1)] + ([] if dropout is None else [dropout.reshape(-1, 1)])
    targets, slots = targets.masked_fill(dropped, -1), slots.masked_fill(dropped, -1)
    ends, rows = arriving_ends[rank].contiguous(), [tokens.detach(), gates.detach().reshape(-1, 1), *others]
    sent = _send(rows, targets, ends[-1:].clone(), capacity, group)
    (arriving,) = sent.tolist()
    found: Any = _Receive.apply(tokens, gates, others, sent, slots, arriving, capacity, group)
    received, row_gates, sources, *drawn = found
    order = torch.arange(arriving, dtype=torch.int32, device=chosen.device)
    return ArrivedRows(
        received, row_gates, drawn[0] if drawn else None, torch.searchsorted(ends, order, right=True).view(-1, 1),
        Assignments(order, ends, order.view(-1, 1)), (sources, slots, targets, capacity, group),
    )  # fmt: skip


def give_back(rows: Tensor, back: tuple[Tensor, Tensor, Tensor, int, str]) -> Tensor:
    """Return the sum of each token's results, (n, h), from those of the rows that have arrived, (rows, h)."""
    found: Any = _Return.apply(rows, *back)
    return found
