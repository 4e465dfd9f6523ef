"""Where what fine-tuning added to a model lies in the tensors of Hugging Face's peft, which has one module for each of
their linear layers.

A pair of LoRA's for a fused weight of ours is cut as the weight is. Where one of their modules holds what are several
projections here, or the other way round, ranks are stacked or matrices repeated: the update is the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.hf.weight_layout import Geometry, OneByExpert, Transposed
from ...models.hf.weight_map import Placed

PREFIX = "base_model.model."
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Pair:
    """LoRA of one of their modules.

    Attributes:
        module: its name.
        down: (r, in), A.
        up: (out, r), B.
        stacked: pairs of ours that it holds one beside the other; its rank and alpha are so many times ours.
    """

    module: str
    down: Tensor
    up: Tensor
    stacked: int = 1

    @property
    def tensors(self) -> dict[str, Tensor]:
        """As peft names and saves them."""
        return {
            f"{PREFIX}{self.module}.lora_A.weight": self.down.contiguous(),
            f"{PREFIX}{self.module}.lora_B.weight": self.up.contiguous(),
        }


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer of ours, or the projection of all experts of a layer, and its modules there.

    Attributes:
        ours: the names of A and B.
        modules: their names; with experts all of expert 0 first.
        placed: the weight.
        is_of_experts: whether A and B have the experts in front.
    """

    ours: tuple[str, str]
    modules: tuple[str, ...]
    placed: Placed
    is_of_experts: bool

    @property
    def per_expert(self) -> int:
        """Modules that hold one projection of ours, of one expert."""
        return len(self.modules) // (self.placed.shape[0] if self.is_of_experts else 1)

    @property
    def rows(self) -> int:
        """Rows of the weight, of one expert."""
        return self.placed.shape[-2]

    @property
    def columns(self) -> int:
        """Columns of the weight, of one expert."""
        return self.placed.shape[-1]

    def outputs_of(self, number: int) -> int:
        """How many numbers module `number` gives."""
        shape = self.placed.theirs[number][1]
        return shape[1] if isinstance(self.placed.layout, Transposed) else shape[0]

    def split_rows(self, matrix: Tensor, geometry: Geometry) -> list[Tensor]:
        """A matrix with the rows of the weight, of one expert, as the rows of its modules."""
        if self.is_of_experts:
            return list(matrix.chunk(self.per_expert))
        if isinstance(self.placed.layout, Transposed):
            return [matrix]
        return self.placed.layout.split(matrix, len(self.modules), geometry)

    def join_rows(self, parts: Sequence[Tensor], geometry: Geometry) -> Tensor:
        """The other way round."""
        if self.is_of_experts:
            return torch.cat(list(parts))
        if isinstance(self.placed.layout, Transposed):
            return parts[0]
        return self.placed.layout.join(parts, (self.rows, parts[0].shape[-1]), geometry)


def targets_of(placed: Sequence[Placed]) -> Iterator[Target]:
    """The matrices of a model that LoRA can update, with the names that A and B would have."""
    for entry in placed:
        modules = tuple(name.removesuffix(_WEIGHT) for name, _ in entry.theirs)
        if isinstance(entry.layout, OneByExpert):
            yield Target((f"{entry.ours}_lora_a", f"{entry.ours}_lora_b"), modules, entry, True)
        elif entry.ours.endswith(_WEIGHT) and len(entry.shape) == 2 and "." in entry.ours.removesuffix(_WEIGHT):
            stem = entry.ours.removesuffix("weight")
            yield Target((f"{stem}lora_a", f"{stem}lora_b"), modules, entry, False)


def to_pairs(target: Target, down: Tensor, up: Tensor, geometry: Geometry) -> Iterator[Pair]:
    """Their pairs of a pair of ours.

    Args:
        target: the linear layer.
        down: A, (parts * r, in), with experts in front where there are some.
        up: B, (out, r), likewise.
        geometry: of the model.
    """
    downs, ups = (down, up) if target.is_of_experts else (down[None], up[None])
    count = target.per_expert
    for expert, (narrow, wide) in enumerate(zip(downs, ups, strict=True)):
        modules = target.modules[expert * count : (expert + 1) * count]
        parts = len(narrow) // wide.shape[1]
        if parts > 1 and count == 1:  # several projections here are one there
            rows = [len(part) for part in _parts_of(target, wide, parts, geometry)]
            stacked = torch.block_diag(*wide.split(rows))
            (turned,) = target.split_rows(stacked, geometry)
            yield Pair(modules[0], narrow, turned, stacked=parts)
            continue
        lows = narrow.chunk(parts) if parts > 1 else [narrow] * count
        for module, low, rows_up in zip(modules, lows, target.split_rows(wide, geometry), strict=True):
            yield Pair(module, low, rows_up)


def _parts_of(target: Target, wide: Tensor, parts: int, geometry: Geometry) -> list[Tensor]:
    """The rows of each projection of a fused weight that one module holds: [q | k | v], or [gate | up]."""
    if parts == 3:
        query = geometry.heads * (len(wide) // (geometry.heads + 2 * geometry.groups))
        key = (len(wide) - query) // 2
        return list(wide.split([query, key, key]))
    return list(wide.chunk(parts))


def from_pairs(
    target: Target, pairs: Mapping[str, tuple[Tensor, Tensor, float]], parts: int, rank: int, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """A and B of ours, of their pairs; the modules that have none get zeros, which stay zeros in training.

    Args:
        target: the linear layer.
        pairs: module to A, B, and what the scale of its update is in that of ours.
        parts: pairs of ours in one linear layer: those of its modules, or 1.
        rank: of ours, at least theirs; what is missing are zeros.
        geometry: of the model.
    """
    some = next(pairs[module] for module in target.modules if module in pairs)
    experts, count = (target.placed.shape[0] if target.is_of_experts else 1), target.per_expert
    down = some[0].new_zeros(experts, parts * rank, target.columns)
    up = some[1].new_zeros(experts, target.rows, rank)
    template = target.split_rows(up[0], geometry)
    for expert in range(experts):
        rows: list[Tensor] = []
        for number, module in enumerate(target.modules[expert * count : (expert + 1) * count]):
            wide = torch.zeros_like(template[number])
            if module in pairs:
                low, high, scale = pairs[module]
                down[expert, number * rank : number * rank + len(low)] = low
                wide[:, : high.shape[1]] = high * scale
            rows.append(wide)
        up[expert] = target.join_rows(rows, geometry)
    return (down, up) if target.is_of_experts else (down[0], up[0])
