"""Base class of PEFT modules, and the initialization of their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..config.peft import InitMethod


class Added(nn.Module):
    """Module with trainable parameters that the base model does not have.

    Attributes:
        peft_parameters: names of the PEFT parameters in the module; empty if all of its parameters are.
    """

    peft_parameters: ClassVar[tuple[str, ...]] = ()

    def initial_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the initial value of the PEFT parameter `name` of this module, in fp32 on the CPU."""
        raise NotImplementedError

    def merged(self, name: str, weight: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """Return a frozen parameter of the module with the PEFT parameters merged into it.

        Args:
            name: name of the frozen parameter in the module.
            weight: its value, in at least fp32.
            peft_parameters: PEFT parameters by their names in the module.
        """
        raise NotImplementedError


def added_parameters(model: nn.Module) -> list[str]:
    """Return the names of the PEFT parameters of a model."""
    return [f"{prefix}.{name}" for prefix, _, name in _named_peft_parameters(model)]


def peft_initializers(model: nn.Module) -> dict[str, Callable[[str, torch.Size, torch.Generator], Tensor]]:
    """Return the initializers of all PEFT parameters by name, for `init.InitRules.initializers`."""

    def value(module: Added, short_name: str, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        return module.initial_parameter(short_name, shape, generator)

    return {f"{prefix}.{name}": partial(value, module, name) for prefix, module, name in _named_peft_parameters(model)}


def _named_peft_parameters(model: nn.Module) -> Iterator[tuple[str, Added, str]]:
    """Yield module name, module, and parameter name in the module."""
    for prefix, module in model.named_modules():
        if isinstance(module, Added):
            for name, _ in module.named_parameters(recurse=not module.peft_parameters):
                if not module.peft_parameters or name in module.peft_parameters:
                    yield prefix, module, name


def drawn(method: InitMethod, shape: torch.Size, generator: torch.Generator, parts: int = 1) -> Tensor:
    """Initialize a matrix (..., rows, columns) with one of NeMo's methods.

    Args:
        method: `xavier`: normal with variance 2 / (rows + columns) (Glorot and Bengio 2010); `normal`: normal with
            standard deviation 0.2; `kaiming`: uniform in +-1 / sqrt(columns), as in `nn.Linear`; `zero`.
        shape: of the matrix, or of one for each expert.
        generator: random generator.
        parts: number of matrices concatenated along the rows, each initialized as a matrix of its own.
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
