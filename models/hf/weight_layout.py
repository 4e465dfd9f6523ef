"""How a parameter of ours lies in tensors of theirs: each layout goes both ways and loses nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The numbers that layouts need.

    Attributes:
        heads: query heads.
        groups: key and value heads.
        vocab_size: rows of their token tables, which have no padding.
    """

    heads: int
    groups: int
    vocab_size: int


class Layout(Protocol):
    """How one parameter of ours lies in one or several tensors of theirs."""

    def shapes(self, ours: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """The shapes of their `count` tensors; None where a parameter of this shape does not lie in so many."""
        ...

    def join(self, theirs: Sequence[Tensor], ours: Shape, geometry: Geometry) -> Tensor:
        """Our parameter, of the shape `ours`."""
        ...

    def split(self, ours: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """Their `count` tensors, contiguous or not."""
        ...


@dataclass(frozen=True, slots=True)
class Equal:
    """The same tensor."""

    def shapes(self, ours: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """One tensor of our shape."""
        return [ours]

    def join(self, theirs: Sequence[Tensor], ours: Shape, geometry: Geometry) -> Tensor:
        """Itself."""
        return theirs[0]

    def split(self, ours: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """Itself."""
        return [ours]


@dataclass(frozen=True, slots=True)
class Transposed:
    """Their matrices are (in, out), as those of GPT-2's Conv1D."""

    def shapes(self, ours: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """Our shape the other way round."""
        return [ours[::-1]]

    def join(self, theirs: Sequence[Tensor], ours: Shape, geometry: Geometry) -> Tensor:
        """Transposed."""
        return theirs[0].t()

    def split(self, ours: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """Transposed."""
        return [ours.t()]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ours has rows of padding behind the last token; they are zeros, and are left out on the way back."""

    def shapes(self, ours: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """A row for each token."""
        return [(geometry.vocab_size, *ours[1:])]

    def join(self, theirs: Sequence[Tensor], ours: Shape, geometry: Geometry) -> Tensor:
        """With rows of padding."""
        padded = theirs[0].new_zeros(ours)
        padded[: geometry.vocab_size] = theirs[0]
        return padded

    def split(self, ours: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """Without the rows of padding."""
        return [ours[: geometry.vocab_size]]


@dataclass(frozen=True, slots=True)
class Stacked:
    """Ours is one matrix (or bias) of the rows of several.

    Args:
        shares: how many rows each has, in proportion: `heads`, `groups`, or 1; empty where all have equally many.
    """

    shares: tuple[str, ...] = ()

    def shapes(self, ours: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """A part of the rows each."""
        rows = self._rows(ours[0], count, geometry)
        return None if rows is None else [(part, *ours[1:]) for part in rows]

    def join(self, theirs: Sequence[Tensor], ours: Shape, geometry: Geometry) -> Tensor:
        """One after the other."""
        return torch.cat(list(theirs))

    def split(self, ours: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """Cut between them."""
        return list(ours.split(self._rows(len(ours), count, geometry) or [len(ours)]))

    def _rows(self, whole: int, count: int, geometry: Geometry) -> list[int] | None:
        weights = [getattr(geometry, share) for share in self.shares] or [1] * count
        unit, rest = divmod(whole, sum(weights))
        return None if rest or len(weights) != count else [unit * weight for weight in weights]


@dataclass(frozen=True, slots=True)
class HeadByHead:
    """Their rows are [q | k | v] of the first head, then of the second, ...; ours all queries, all keys, all values."""

    def shapes(self, ours: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """One tensor of our shape, of as many key heads as query heads."""
        fits = geometry.heads == geometry.groups and ours[0] % (3 * geometry.heads) == 0
        return [ours] if fits else None

    def join(self, theirs: Sequence[Tensor], ours: Shape, geometry: Geometry) -> Tensor:
        """Rows in our order."""
        return theirs[0].unflatten(0, (geometry.heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    def split(self, ours: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """Rows in their order."""
        return [ours.unflatten(0, (3, geometry.heads, -1)).transpose(0, 1).flatten(0, 2)]


@dataclass(frozen=True, slots=True)
class OneByExpert:
    """Ours is (experts, rows, columns); theirs are one or several matrices of each expert, all of expert 0 first.

    Args:
        parts: matrices of an expert, whose rows are equally many and follow each other in ours.
    """

    parts: int = 1

    def shapes(self, ours: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """A matrix each."""
        if count != ours[0] * self.parts or ours[1] % self.parts:
            return None
        return [(ours[1] // self.parts, *ours[2:])] * count

    def join(self, theirs: Sequence[Tensor], ours: Shape, geometry: Geometry) -> Tensor:
        """One tensor of all experts."""
        whole = theirs[0].new_empty(ours)
        for place, tensor in zip(self._places(whole), theirs, strict=True):
            place.copy_(tensor)
        return whole

    def split(self, ours: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """Matrix by matrix."""
        return self._places(ours)

    def _places(self, whole: Tensor) -> list[Tensor]:
        return [place for expert in whole.unbind() for place in expert.chunk(self.parts)]


def size_of(shape: Shape) -> int:
    """Numbers in a tensor of this shape."""
    return math.prod(shape)
