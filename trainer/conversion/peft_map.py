"""Mapping of LoRA and IA3 between stoker's fused linear layers and Hugging Face peft, with one module per linear layer.

The LoRA pair of a fused stoker weight is split like the weight. If one Hugging Face module corresponds to several
projections here, or the reverse, ranks are stacked or matrices repeated, which gives the same update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.hf.weight_layout import Geometry, PerExpert, Transposed
from ...models.hf.weight_map import ParameterMapping

PEFT_PREFIX = "base_model.model."
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """LoRA pair of one Hugging Face module.

    Attributes:
        down: A, [r, in].
        up: B, [out, r].
        stacked: number of stoker pairs stacked in it; its rank and alpha are this multiple of stoker's.
    """

    module: str
    down: Tensor
    up: Tensor
    stacked: int = 1

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by their names in peft."""
        return {
            f"{PEFT_PREFIX}{self.module}.lora_A.weight": self.down.contiguous(),
            f"{PEFT_PREFIX}{self.module}.lora_B.weight": self.up.contiguous(),
        }


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """A stoker linear layer, or one projection of all experts of a layer, and its Hugging Face modules.

    Attributes:
        parameter_names: stoker names of A and B.
        modules: Hugging Face module names; for experts all of expert 0 first.
        is_moe: A and B have a leading expert dimension.
    """

    parameter_names: tuple[str, str]
    modules: tuple[str, ...]
    placed: ParameterMapping
    is_moe: bool

    @property
    def modules_per_expert(self) -> int:
        """Number of modules per stoker linear layer, or per expert."""
        return len(self.modules) // (self.placed.shape[0] if self.is_moe else 1)

    @property
    def rows(self) -> int:
        """Rows of the weight (of one expert)."""
        return self.placed.shape[-2]

    @property
    def columns(self) -> int:
        """Columns of the weight (of one expert)."""
        return self.placed.shape[-1]

    def output_width(self, number: int) -> int:
        """Return the output width of module `number`."""
        shape = self.placed.hf_tensors[number][1]
        return shape[1] if isinstance(self.placed.layout, Transposed) else shape[0]

    def split_rows(self, matrix: Tensor, geometry: Geometry) -> list[Tensor]:
        """Split a matrix with the rows of the weight (of one expert) into the rows of its modules."""
        if self.is_moe:
            return list(matrix.chunk(self.modules_per_expert))
        if isinstance(self.placed.layout, Transposed):
            return [matrix]
        return self.placed.layout.split(matrix, len(self.modules), geometry)

    def join_rows(self, parts: Sequence[Tensor], geometry: Geometry) -> Tensor:
        """Join matrices; the inverse of `split_rows`."""
        if self.is_moe:
            return torch.cat(list(parts))
        if isinstance(self.placed.layout, Transposed):
            return parts[0]
        return self.placed.layout.join(parts, (self.rows, parts[0].shape[-1]), geometry)


def lora_targets(placed: Sequence[ParameterMapping]) -> Iterator[LoRATarget]:
    """Yield the weight matrices of a model that LoRA can adapt."""
    for entry in placed:
        modules = tuple(name.removesuffix(_WEIGHT) for name, _ in entry.hf_tensors)
        if isinstance(entry.layout, PerExpert):
            yield LoRATarget((f"{entry.parameter}_lora_a", f"{entry.parameter}_lora_b"), modules, entry, True)
        elif (
            entry.parameter.endswith(_WEIGHT) and len(entry.shape) == 2 and "." in entry.parameter.removesuffix(_WEIGHT)
        ):
            stem = entry.parameter.removesuffix("weight")
            yield LoRATarget((f"{stem}lora_a", f"{stem}lora_b"), modules, entry, False)


def to_peft_pairs(target: LoRATarget, down: Tensor, up: Tensor, geometry: Geometry) -> Iterator[LoRAPair]:
    """Convert a stoker LoRA pair to Hugging Face pairs.

    Args:
        down: A, [parts * r, in], for experts with a leading dimension E.
        up: B, [out, r], likewise.
    """
    downs, ups = (down, up) if target.is_moe else (down[None], up[None])
    count = target.modules_per_expert
    for expert, (narrow, wide) in enumerate(zip(downs, ups, strict=True)):
        modules = target.modules[expert * count : (expert + 1) * count]
        parts = len(narrow) // wide.shape[1]
        if parts > 1 and count == 1:  # several projections here are one module there
            rows = [len(part) for part in _parts_of(target, wide, parts, geometry)]
            stacked = torch.block_diag(*wide.split(rows))
            (stacked_up,) = target.split_rows(stacked, geometry)
            yield LoRAPair(modules[0], narrow, stacked_up, stacked=parts)
            continue
        lows = narrow.chunk(parts) if parts > 1 else [narrow] * count
        for module, low, rows_up in zip(modules, lows, target.split_rows(wide, geometry), strict=True):
            yield LoRAPair(module, low, rows_up)


def _parts_of(target: LoRATarget, wide: Tensor, parts: int, geometry: Geometry) -> list[Tensor]:
    """Split the rows of a fused weight into its projections: [q | k | v], or [gate | up]."""
    if parts == 3:
        query = geometry.heads * (len(wide) // (geometry.heads + 2 * geometry.groups))
        key = (len(wide) - query) // 2
        return list(wide.split([query, key, key]))
    return list(wide.chunk(parts))


def from_peft_pairs(
    target: LoRATarget, pairs: Mapping[str, tuple[Tensor, Tensor, float]], parts: int, rank: int, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """Convert Hugging Face pairs to a stoker LoRA pair; modules without a pair get zeros, which stay zero in training.

    Args:
        pairs: module to (A, B, its LoRA scale divided by stoker's).
        parts: LoRA pairs per stoker linear layer: one per module, or 1.
        rank: stoker's rank; smaller ranks are padded with zeros.
    """
    some = next(pairs[module] for module in target.modules if module in pairs)
    experts, count = (target.placed.shape[0] if target.is_moe else 1), target.modules_per_expert
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
    return (down, up) if target.is_moe else (down[0], up[0])


# ---------------------------------------------------------------- IA3


@dataclass(frozen=True, slots=True)
class IA3Vector:
    """IA3 scaling vector of one Hugging Face module.

    Attributes:
        values: [1, in] or [out, 1], as saved by peft.
        scales_inputs: scales the input of the module; otherwise its output.
    """

    module: str
    values: Tensor
    scales_inputs: bool


def ia3_parameter_name(target: LoRATarget) -> str:
    """Return the parameter name of the IA3 vector of a stoker linear layer."""
    return target.placed.parameter.removesuffix("weight") + "ia3"


def to_peft_vectors(
    ours: Mapping[str, Tensor], targets: Sequence[LoRATarget], geometry: Geometry
) -> Iterator[IA3Vector]:
    """Yield the peft vectors of all stoker IA3 vectors."""
    for target in targets:
        factors = ours.get(ia3_parameter_name(target))
        if factors is None:
            continue
        if target.placed.parameter.endswith(".down.weight"):
            yield IA3Vector(target.modules[0], factors[None], scales_inputs=True)
            continue
        whole = torch.cat([factors.new_ones(target.rows - len(factors)), factors])[:, None]
        for module, part in zip(target.modules, target.split_rows(whole, geometry), strict=True):
            if len(target.modules) == 1 or not module.endswith((".q_proj", ".query", ".q")):
                yield IA3Vector(module, part, scales_inputs=False)
