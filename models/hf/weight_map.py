"""Mapping between stoker parameters and Hugging Face tensors, as a table that is used in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .weight_layout import Geometry, Identity, Layout, Shape

_PLACEHOLDERS = {"n": r"\d+", "kind": "weight|bias"}


@dataclass(frozen=True)
class WeightRule:
    """One row of the table.

    Names have placeholders: `{n}` is the index of a layer, `{kind}` is `weight` or `bias`, and `{e}` (in `hf_names`
    only) is the index of each expert.

    Attributes:
        parameter: name of the stoker parameter.
        hf_names: names of its Hugging Face tensors, in the order of the layout.
        layout: layout of the parameter as these tensors.
    """

    parameter: str
    hf_names: tuple[str, ...]
    layout: Layout = Identity()  # noqa: RUF009  frozen

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the stoker parameters of this row."""
        parts = re.split(r"\{(\w+)\}", self.parameter)
        return re.compile(
            "".join(f"(?P<{p}>{_PLACEHOLDERS[p]})" if i % 2 else re.escape(p) for i, p in enumerate(parts))
        )

    def names(self, values: Mapping[str, str], experts: int) -> list[str]:
        """Return the tensor names of one parameter, with `experts` experts and these values of the placeholders."""
        numbers = range(experts) if any("{e}" in name for name in self.hf_names) else (0,)
        return [name.format(**values, e=number) for number in numbers for name in self.hf_names]


@dataclass(frozen=True, slots=True)
class ParameterMapping:
    """One stoker parameter and its Hugging Face tensors.

    Attributes:
        parameter: name of the parameter.
        shape: shape of the parameter.
        hf_tensors: name and shape of each tensor.
        layout: layout of the parameter as these tensors.
    """

    parameter: str
    shape: Shape
    hf_tensors: tuple[tuple[str, Shape], ...]
    layout: Layout

    def join(self, tensors: Sequence[Tensor], geometry: Geometry) -> Tensor:
        """Build the parameter from its tensors, contiguous.

        Args:
            tensors: in the order of `theirs`, all of one dtype.
            geometry: sizes of the model.
        """
        joined = self.layout.join(tensors, self.shape, geometry).contiguous()
        assert joined.shape == torch.Size(self.shape), self.parameter
        return joined

    def hf_tensor(self, number: int, tensor: Tensor, geometry: Geometry) -> Tensor:
        """Return tensor `number` of `theirs`, contiguous, from the parameter."""
        return self.layout.split(tensor, len(self.hf_tensors), geometry)[number].contiguous()


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Weight mapping of an architecture.

    Attributes:
        rules: the table.
        head: Hugging Face name of the output head, which is absent or a copy of `embedding` in a model that ties it.
        embedding: Hugging Face name of the token embeddings.
        duplicates: tensors that duplicate others in every model and may be absent (pattern, and name of the original).
        buffers: patterns of tensors that are not learned.
        ignored: patterns of weights that are ignored, since they belong to heads for other tasks.
        renames: patterns and replacements for names of other versions.
    """

    rules: tuple[WeightRule, ...]
    head: str
    embedding: str
    duplicates: tuple[tuple[str, str], ...] = ()
    buffers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()

    def canonical_name(self, name: str) -> str:
        """Convert a tensor name of any version to that of the table."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def is_buffer(self, name: str) -> bool:
        """Return True for a tensor that is not learned."""
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)

    def is_ignored(self, name: str) -> bool:
        """Return True for a weight that is ignored, since it belongs to a head for another task."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def original_name(self, name: str, *, tied: bool) -> str | None:
        """Return the tensor that `name` duplicates, or None.

        Args:
            name: name of the tensor.
            tied: the output head is tied to the embeddings.
        """
        if name == self.head:
            return self.embedding if tied else None
        for pattern, original in self.duplicates:
            if re.fullmatch(pattern, name):
                return original
        return None

    def map_parameters(
        self, parameters: Mapping[str, Shape], geometry: Geometry
    ) -> tuple[list[ParameterMapping], list[str]]:
        """Map each parameter of a model to its tensors.

        Args:
            parameters: names and shapes of the stoker parameters.
            geometry: sizes of the model.

        Returns:
            One entry for each parameter that can be mapped, and the names of those that cannot.
        """
        placed: list[ParameterMapping] = []
        unmapped: list[str] = []
        for name, shape in parameters.items():
            entry = self._place(name, shape, geometry)
            if entry is None:
                unmapped.append(name)
            else:
                placed.append(entry)
        return placed, unmapped

    def _place(self, name: str, shape: Shape, geometry: Geometry) -> ParameterMapping | None:
        for row in self.rules:
            match = row.pattern.fullmatch(name)
            if match is None:
                continue
            names = row.names(match.groupdict(), experts=shape[0])
            shapes = row.layout.shapes(shape, len(names), geometry)
            if shapes is not None:
                return ParameterMapping(name, shape, tuple(zip(names, shapes, strict=True)), row.layout)
        return None


def weight_and_bias_rules(
    prefix: str,
    hf_prefix: str,
    names: Iterable[tuple[str, str]],
    layout: Layout = Identity(),  # noqa: B008  frozen
) -> tuple[WeightRule, ...]:
    """Return a row for weight and bias of each pair of modules.

    Args:
        prefix: prefix of the stoker names.
        hf_prefix: prefix of the Hugging Face names.
        names: stoker and Hugging Face names of the modules.
        layout: layout of all of them.
    """
    return tuple(WeightRule(f"{prefix}{a}.{{kind}}", (f"{hf_prefix}{b}.{{kind}}",), layout) for a, b in names)
