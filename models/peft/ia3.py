"""IA3: learned scales of the outputs or inputs of frozen linear layers (arXiv 2205.05638)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .added_parameters import Added


class IA3OutputLinear(nn.Linear, Added):
    """Frozen linear layer with learned scales of its last outputs: keys and values of a fused projection.

    Args:
        base: layer on the meta device, whose weight and bias are reused.
        scaled: number of scaled outputs, the last ones.
    """

    peft_parameters: ClassVar[tuple[str, ...]] = ("ia3",)

    def __init__(self, base: nn.Linear, scaled: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.ia3 = nn.Parameter(torch.empty(scaled))

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        output = super().forward(input)
        unscaled, scaled = output.split((self.out_features - len(self.ia3), len(self.ia3)), dim=-1)
        return torch.cat([unscaled, scaled * self.ia3.to(output.dtype)], dim=-1)

    def initial_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Initialize the scales to 1."""
        return torch.ones(shape)

    def merged(self, name: str, weight: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """Multiply the rows of weight and bias by their scales."""
        scales = added["ia3"].to(weight)
        row_scales = torch.cat([scales.new_ones(len(weight) - len(scales)), scales])
        return weight * (row_scales if weight.ndim == 1 else row_scales[:, None])


class IA3InputLinear(nn.Linear, Added):
    """Frozen linear layer with a learned scale of each input: the inner activations of an MLP.

    Args:
        base: layer on the meta device, whose weight and bias are reused.
    """

    peft_parameters: ClassVar[tuple[str, ...]] = ("ia3",)

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.ia3 = nn.Parameter(torch.empty(base.in_features))

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return F.linear(input * self.ia3.to(input.dtype), self.weight, self.bias)

    def initial_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Initialize the scales to 1."""
        return torch.ones(shape)

    def merged(self, name: str, weight: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """Multiply the columns of the weight by their scales."""
        return weight * added["ia3"].to(weight) if name == "weight" else weight
