"""What marks parameters that fine-tuning has added to a model, and how they start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config.peft import InitMethod


class Added(nn.Module):
    """A module with parameters that the model of the checkpoint does not have.

    Attributes:
        added: their names in the module; empty where all of it is new.
    """

    added: ClassVar[tuple[str, ...]] = ()

    def initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """The initial value of one of them, by its name in the module: fp32 on the CPU."""
        raise NotImplementedError

    def merged(self, name: str, weight: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """A frozen parameter of the module with what was added to it, so that the added part can go.

        Args:
            name: of the parameter in the module.
            weight: its value, in fp32 at least.
            added: the added parameters by their names in the module.
        """
        raise NotImplementedError


def added_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters that were added to a model."""
    return [f"{prefix}.{name}" for prefix, _, name in _added(model)]


def initial_values(model: nn.Module) -> dict[str, Callable[[str, torch.Size, torch.Generator], Tensor]]:
    """How each of them starts, by name, as `init.InitRules.added` takes it."""

    def value(module: Added, short: str, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return module.initial(short, shape, generator)

    return {f"{prefix}.{name}": partial(value, module, name) for prefix, module, name in _added(model)}


def _added(model: nn.Module) -> Iterator[tuple[str, Added, str]]:
    for prefix, module in model.named_modules():
        if isinstance(module, Added):
            for name, _ in module.named_parameters(recurse=not module.added):
                if not module.added or name in module.added:
                    yield prefix, module, name


def drawn(method: InitMethod, shape: torch.Size, generator: torch.Generator, parts: int = 1) -> Tensor:
    """A matrix (..., rows, columns) that starts as NeMo's methods say.

    Args:
        method: `xavier`: normal, variance 2 / (rows + columns) (Glorot and Bengio 2010); `normal`: deviation 0.2;
            `kaiming`: uniform within 1 / sqrt(columns), as linear layers of torch's; `zero`.
        shape: of the matrix, or of one for each expert.
        generator: where numbers come from.
        parts: matrices that lie one below the other in it; each starts by itself.
    """
    rows, columns = shape[-2] // parts, shape[-1]
    match method:
        case "zero":
            return torch.zeros(shape)
        case "kaiming":
            bound = 1 / math.sqrt(columns)
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)
        case "normal":
            return torch.empty(shape).normal_(0.0, 0.2, generator=generator)
        case "xavier":
            return torch.empty(shape).normal_(0.0, math.sqrt(2 / (rows + columns)), generator=generator)
