"""Learned factors of what a frozen layer gives or reads (IA3, arXiv 2205.05638)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .added_parameters import Added


class ScaledOutputs(nn.Linear, Added):
    """A frozen linear layer whose last rows have factors: keys and values of a fused projection.

    Args:
        base: the layer, on the meta device, whose weight and bias it takes over.
        scaled: how many of its rows, the last ones, have factors.
    """

    added: ClassVar[tuple[str, ...]] = ("ia3",)

    def __init__(self, base: nn.Linear, scaled: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.ia3 = nn.Parameter(torch.empty(scaled))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        output = super().forward(input)
        plain, scaled = output.split((self.out_features - len(self.ia3), len(self.ia3)), dim=-1)
        return torch.cat([plain, scaled * self.ia3.to(output.dtype)], dim=-1)

    def initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Factors of 1."""
        return torch.ones(shape)

    def merged(self, name: str, weight: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """Rows of weight and bias times their factors."""
        factors = added["ia3"].to(weight)
        whole = torch.cat([factors.new_ones(len(weight) - len(factors)), factors])
        return weight * (whole if weight.ndim == 1 else whole[:, None])


class ScaledInputs(nn.Linear, Added):
    """A frozen linear layer of which each input has a factor: the inner activations of an MLP.

    Args:
        base: the layer, on the meta device, whose weight and bias it takes over.
    """

    added: ClassVar[tuple[str, ...]] = ("ia3",)

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.ia3 = nn.Parameter(torch.empty(base.in_features))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return F.linear(input * self.ia3.to(input.dtype), self.weight, self.bias)

    def initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Factors of 1."""
        return torch.ones(shape)

    def merged(self, name: str, weight: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """Columns of the weight times their factors."""
        return weight * added["ia3"].to(weight) if name == "weight" else weight
