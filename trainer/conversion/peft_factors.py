"""IA3 scaling vectors as tensors of Hugging Face peft, one per module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.hf.weight_layout import Geometry
from .peft_map import Target


@dataclass(frozen=True, slots=True)
class Factors:
    """IA3 scaling vector of one Hugging Face module.

    Attributes:
        module: module name.
        values: [1, in] or [out, 1], as saved by peft.
        is_of_inputs: scales the input of the module; otherwise its output.
    """

    module: str
    values: Tensor
    is_of_inputs: bool


def names_of_factors(target: Target) -> str:
    """Return the parameter name of the IA3 vector of a stoker linear layer."""
    return target.placed.ours.removesuffix("weight") + "ia3"


def factors_of(ours: Mapping[str, Tensor], targets: Sequence[Target], geometry: Geometry) -> Iterator[Factors]:
    """Yield the peft vectors of all stoker IA3 vectors.

    Args:
        ours: stoker IA3 vectors by name.
        targets: linear layers of the model.
        geometry: attention geometry of the model.
    """
    for target in targets:
        factors = ours.get(names_of_factors(target))
        if factors is None:
            continue
        if target.placed.ours.endswith(".down.weight"):
            yield Factors(target.modules[0], factors[None], is_of_inputs=True)
            continue
        whole = torch.cat([factors.new_ones(target.rows - len(factors)), factors])[:, None]
        for module, part in zip(target.modules, target.split_rows(whole, geometry), strict=True):
            if len(target.modules) == 1 or not module.endswith((".q_proj", ".query", ".q")):
                yield Factors(module, part, is_of_inputs=False)
