"""IA3 scaling vectors as tensors of Hugging Face peft, one per module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.hf.weight_layout import Geometry
from .peft_map import Target


@dataclass(frozen=True, slots=True)
class IA3Vector:
    """IA3 scaling vector of one Hugging Face module.

    Attributes:
        module: module name.
        values: [1, in] or [out, 1], as saved by peft.
        scales_inputs: scales the input of the module; otherwise its output.
    """

    module: str
    values: Tensor
    scales_inputs: bool


def ia3_parameter_name(target: Target) -> str:
    """Return the parameter name of the IA3 vector of a stoker linear layer."""
    return target.placed.ours.removesuffix("weight") + "ia3"


def to_peft_vectors(ours: Mapping[str, Tensor], targets: Sequence[Target], geometry: Geometry) -> Iterator[IA3Vector]:
    """Yield the peft vectors of all stoker IA3 vectors.

    Args:
        ours: stoker IA3 vectors by name.
        targets: linear layers of the model.
        geometry: attention geometry of the model.
    """
    for target in targets:
        factors = ours.get(ia3_parameter_name(target))
        if factors is None:
            continue
        if target.placed.ours.endswith(".down.weight"):
            yield IA3Vector(target.modules[0], factors[None], scales_inputs=True)
            continue
        whole = torch.cat([factors.new_ones(target.rows - len(factors)), factors])[:, None]
        for module, part in zip(target.modules, target.split_rows(whole, geometry), strict=True):
            if len(target.modules) == 1 or not module.endswith((".q_proj", ".query", ".q")):
                yield IA3Vector(module, part, scales_inputs=False)
