"""IA3's factors in the tensors of Hugging Face's peft: a vector for each module that has some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.hf.weight_layout import Geometry
from .peft_map import Target


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one of their modules.

    Attributes:
        module: its name.
        values: (1, in) or (out, 1), as peft saves them.
        is_of_inputs: of what it reads; otherwise of what it gives.
    """

    module: str
    values: Tensor
    is_of_inputs: bool


def names_of_factors(target: Target) -> str:
    """The name that the factors of a linear layer of ours would have."""
    return target.placed.ours.removesuffix("weight") + "ia3"


def factors_of(ours: Mapping[str, Tensor], targets: Sequence[Target], geometry: Geometry) -> Iterator[Factors]:
    """Their factors of ours.

    Args:
        ours: all factors by name.
        targets: the linear layers of the model.
        geometry: of the model.
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
