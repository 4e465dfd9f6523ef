"""Records in which the parts of a model say what they send to other ranks, each beside its `forward`. Without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

CommunicationAxis = Literal[
    "tensor", "context", "context heads", "context ring", "expert", "data", "replicas", "expert data", "pipeline",
    "embeddings", "position biases",
]  # fmt: skip
"""Ranks that communicate. `context heads` and `context ring` are the two parts of `a2a+p2p`. `data` are those with the
same part of the model, on the axes data and context, or the shards of it; `replicas` those with the same shard; `expert
data` those with the same experts; `embeddings` and `position biases` the pipeline ranks that have the same ones."""
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
Pass = Literal["forward", "backward", "recompute", "update"]


class Collective(NamedTuple):
    """Collective operation of a rank, or several of one kind.

    Attributes:
        axis: ranks that take part.
        kind: operation; `send` is one message to a neighbour.
        num_bytes: of the whole tensor: what an all-reduce, reduce-scatter, all-to-all or send reads, and what an
            all-gather writes.
        during: pass in which it runs.
        number: operations that these bytes are divided among.
        overlaps: other work of the rank runs beside it.
    """

    axis: CommunicationAxis
    kind: CollectiveKind
    num_bytes: int
    during: Pass
    number: int = 1
    overlaps: bool = False

    def times(self, number: int) -> Collective:
        """Return as many of it."""
        return self._replace(num_bytes=self.num_bytes * number, number=self.number * number)

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank sends to the others: those of ring algorithms, which send the least."""
        if self.kind == "send":
            return float(self.num_bytes)
        return self.num_bytes * (ranks - 1) / ranks * (2 if self.kind == "all-reduce" else 1)


def recomputed(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Return the collectives of a forward pass that the backward pass runs again."""
    return tuple(each._replace(during="recompute", overlaps=False) for each in collectives if each.during == "forward")


def bytes_by_collective(collectives: Iterable[Collective]) -> dict[tuple[CommunicationAxis, CollectiveKind], int]:
    """Return the bytes (`Collective.num_bytes`) of each axis and kind."""
    found: Counter[tuple[CommunicationAxis, CollectiveKind]] = Counter()
    for each in collectives:
        found[each.axis, each.kind] += each.num_bytes
    return {key: size for key, size in found.items() if size}
