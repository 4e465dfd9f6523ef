"""The weights of a family as a table: rows of our names and theirs, from which both directions are planned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .weight_layout import Equal, Geometry, Layout, Shape

_HOLES = {"n": r"\d+", "kind": "weight|bias"}


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Names have holes: `{n}` is the number of a layer, `{kind}` is `weight` or `bias`, and `{e}` (theirs only) every
    expert in turn.

    Attributes:
        ours: our parameter.
        theirs: their tensors, in the order in which they lie in ours.
        layout: how they lie there.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = Equal()  # noqa: RUF009  frozen

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches our parameters of this line."""
        parts = re.split(r"\{(\w+)\}", self.ours)
        return re.compile("".join(f"(?P<{p}>{_HOLES[p]})" if i % 2 else re.escape(p) for i, p in enumerate(parts)))

    def names(self, holes: Mapping[str, str], experts: int) -> list[str]:
        """Their names for one parameter of ours that has so many experts."""
        numbers = range(experts) if any("{e}" in name for name in self.theirs) else (0,)
        return [name.format(**holes, e=number) for number in numbers for name in self.theirs]


@dataclass(frozen=True, slots=True)
class Placed:
    """One parameter of ours and the tensors of theirs that it consists of.

    Attributes:
        ours: its name.
        shape: its shape.
        theirs: name and shape of each tensor.
        layout: how they lie in it.
    """

    ours: str
    shape: Shape
    theirs: tuple[tuple[str, Shape], ...]
    layout: Layout

    def join(self, tensors: Sequence[Tensor], geometry: Geometry) -> Tensor:
        """Our parameter of their tensors, contiguous.

        Args:
            tensors: in the order of `theirs`, all of one dtype.
            geometry: of the model.
        """
        joined = self.layout.join(tensors, self.shape, geometry).contiguous()
        assert joined.shape == torch.Size(self.shape), self.ours
        return joined

    def part(self, number: int, tensor: Tensor, geometry: Geometry) -> Tensor:
        """Tensor `number` of `theirs`, contiguous, of our parameter."""
        return self.layout.split(tensor, len(self.theirs), geometry)[number].contiguous()


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """The weights of a family.

    Attributes:
        rows: the table.
        head: their output head, which a model that ties it has none of, or a copy of `embedding`.
        embedding: their token embeddings.
        copies: their tensors that are copies of others in every model (pattern to template), and may be left out.
        buffers: patterns of tensors that hold nothing that was learnt.
        left_out: patterns of weights that our model has no place for, because they serve another purpose.
        renamed: pattern and replacement of names that other versions gave.
    """

    rows: tuple[Row, ...]
    head: str
    embedding: str
    copies: tuple[tuple[str, str], ...] = ()
    buffers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def canonical(self, name: str) -> str:
        """One of their names, as the table has it."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def is_buffer(self, name: str) -> bool:
        """Whether a tensor of theirs holds nothing that was learnt."""
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)

    def is_left_out(self, name: str) -> bool:
        """Whether a tensor of theirs serves a purpose that our model does not have."""
        return any(re.fullmatch(pattern, name) for pattern in self.left_out)

    def original_of(self, name: str, *, tied: bool) -> str | None:
        """The tensor that one of theirs is a copy of, None where it is of its own.

        Args:
            name: of the tensor.
            tied: the head is the table of embeddings.
        """
        if name == self.head:
            return self.embedding if tied else None
        for pattern, original in self.copies:
            if re.fullmatch(pattern, name):
                return original
        return None

    def place(self, parameters: Mapping[str, Shape], geometry: Geometry) -> tuple[list[Placed], list[str]]:
        """Where each parameter of a model lies in their tensors.

        Args:
            parameters: our names and shapes.
            geometry: of the model.

        Returns:
            One entry for each parameter that has a place, and the names of those that have none.
        """
        placed: list[Placed] = []
        homeless: list[str] = []
        for name, shape in parameters.items():
            entry = self._place(name, shape, geometry)
            if entry is None:
                homeless.append(name)
            else:
                placed.append(entry)
        return placed, homeless

    def _place(self, name: str, shape: Shape, geometry: Geometry) -> Placed | None:
        for row in self.rows:
            match = row.pattern.fullmatch(name)
            if match is None:
                continue
            theirs = row.names(match.groupdict(), experts=shape[0])
            shapes = row.layout.shapes(shape, len(theirs), geometry)
            if shapes is not None:
                return Placed(name, shape, tuple(zip(theirs, shapes, strict=True)), row.layout)
        return None


def same_names(ours: str, theirs: str, names: Iterable[tuple[str, str]], layout: Layout = Equal()) -> tuple[Row, ...]:  # noqa: B008  frozen
    """A line for each pair of modules: weight and bias, with the same beginnings.

    Args:
        ours: beginning of our names.
        theirs: beginning of theirs.
        names: modules, ours and theirs.
        layout: of all of them.
    """
    return tuple(Row(f"{ours}{a}.{{kind}}", (f"{theirs}{b}.{{kind}}",), layout) for a, b in names)
