"""Layouts of a stoker parameter as Hugging Face tensors; each is lossless in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes that layouts depend on.

    Attributes:
        heads: query heads.
        groups: key and value heads.
        vocab_size: vocabulary size of the Hugging Face tensors, which have no padding.
    """

    heads: int
    groups: int
    vocab_size: int


class Layout(Protocol):
    """Layout of one stoker parameter as one or several Hugging Face tensors."""

    def shapes(self, shape: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """Return the shapes of the `count` tensors of a parameter of shape `shape`; None if it does not fit."""
        ...

    def join(self, tensors: Sequence[Tensor], shape: Shape, geometry: Geometry) -> Tensor:
        """Build the parameter of shape `shape` from its tensors."""
        ...

    def split(self, parameter: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """Split the parameter into its `count` tensors, contiguous or not."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Identical tensor."""

    def shapes(self, shape: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """See `Layout`."""
        return [shape]

    def join(self, tensors: Sequence[Tensor], shape: Shape, geometry: Geometry) -> Tensor:
        """See `Layout`."""
        return tensors[0]

    def split(self, parameter: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """See `Layout`."""
        return [parameter]


@dataclass(frozen=True, slots=True)
class Transposed:
    """Transposed matrix, (in, out), as in GPT-2's Conv1D."""

    def shapes(self, shape: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """See `Layout`."""
        return [shape[::-1]]

    def join(self, tensors: Sequence[Tensor], shape: Shape, geometry: Geometry) -> Tensor:
        """See `Layout`."""
        return tensors[0].t()

    def split(self, parameter: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """See `Layout`."""
        return [parameter.t()]


@dataclass(frozen=True, slots=True)
class PaddedVocabulary:
    """Vocabulary padding: stoker's parameter has zero rows after the last token, which are dropped on export."""

    def shapes(self, shape: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """See `Layout`."""
        return [(geometry.vocab_size, *shape[1:])]

    def join(self, tensors: Sequence[Tensor], shape: Shape, geometry: Geometry) -> Tensor:
        """See `Layout`."""
        padded = tensors[0].new_zeros(shape)
        padded[: geometry.vocab_size] = tensors[0]
        return padded

    def split(self, parameter: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """See `Layout`."""
        return [parameter[: geometry.vocab_size]]


@dataclass(frozen=True, slots=True)
class ConcatenatedRows:
    """Fused matrix or bias: the tensors concatenated along the rows.

    Args:
        proportions: proportions of the rows, as attributes of `Geometry` (`heads`, `groups`); empty for equal parts.
    """

    proportions: tuple[str, ...] = ()

    def shapes(self, shape: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """See `Layout`."""
        rows = self._rows(shape[0], count, geometry)
        return None if rows is None else [(part, *shape[1:]) for part in rows]

    def join(self, tensors: Sequence[Tensor], shape: Shape, geometry: Geometry) -> Tensor:
        """See `Layout`."""
        return torch.cat(list(tensors))

    def split(self, parameter: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """See `Layout`."""
        return list(parameter.split(self._rows(len(parameter), count, geometry) or [len(parameter)]))

    def _rows(self, total: int, count: int, geometry: Geometry) -> list[int] | None:
        weights = [getattr(geometry, share) for share in self.proportions] or [1] * count
        unit, remainder = divmod(total, sum(weights))
        return None if remainder or len(weights) != count else [unit * weight for weight in weights]


@dataclass(frozen=True, slots=True)
class QKVInterleavedByHead:
    """Fused QKV interleaved by head: rows [q | k | v] of the first head, then of the second, ...

    Stoker's has all queries, then all keys, then all values. Requires as many key heads as query heads.
    """

    def shapes(self, shape: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """See `Layout`."""
        fits = geometry.heads == geometry.groups and shape[0] % (3 * geometry.heads) == 0
        return [shape] if fits else None

    def join(self, tensors: Sequence[Tensor], shape: Shape, geometry: Geometry) -> Tensor:
        """See `Layout`."""
        return tensors[0].unflatten(0, (geometry.heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    def split(self, parameter: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """See `Layout`."""
        return [parameter.unflatten(0, (3, geometry.heads, -1)).transpose(0, 1).flatten(0, 2)]


@dataclass(frozen=True, slots=True)
class PerExpert:
    """Stacked expert weights (experts, rows, columns), stored as one or several matrices per expert, expert by expert.

    Args:
        matrices_per_expert: number of matrices per expert, concatenated along the rows in equal parts.
    """

    matrices_per_expert: int = 1

    def shapes(self, shape: Shape, count: int, geometry: Geometry) -> list[Shape] | None:
        """See `Layout`."""
        if count != shape[0] * self.matrices_per_expert or shape[1] % self.matrices_per_expert:
            return None
        return [(shape[1] // self.matrices_per_expert, *shape[2:])] * count

    def join(self, tensors: Sequence[Tensor], shape: Shape, geometry: Geometry) -> Tensor:
        """See `Layout`."""
        stacked = tensors[0].new_empty(shape)
        for view, tensor in zip(self._views(stacked), tensors, strict=True):
            view.copy_(tensor)
        return stacked

    def split(self, parameter: Tensor, count: int, geometry: Geometry) -> list[Tensor]:
        """See `Layout`."""
        return self._views(parameter)

    def _views(self, stacked: Tensor) -> list[Tensor]:
        return [view for expert in stacked.unbind() for view in expert.chunk(self.matrices_per_expert)]
