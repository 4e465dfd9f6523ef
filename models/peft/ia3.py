"""IA3: learned scales of the outputs or inputs of frozen linear layers (arXiv 2205.05638)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..layers.fp8_linear import Fp8Linear
from ..parallel.collectives import sum_shared_gradient
from ..parallel.linear import ColumnParallelLinear, RowParallelLinear, shared_rows
from ..parallel.partition import Partition, even_partition, set_partitions
from .added_parameters import PeftModule


class IA3Scales(PeftModule):
    """Scales of a frozen linear layer, its other base class."""

    peft_parameters: ClassVar[tuple[str, ...]] = ("ia3",)
    ia3: nn.Parameter

    def initial_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Initialize the scales to 1."""
        return torch.ones(shape)


class IA3Output(IA3Scales):
    """Learned scales of the last outputs of a linear layer: keys and values of a fused projection."""

    def scales(self) -> Tensor:
        """Return the scales, one for each of the last outputs."""
        return self.ia3

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        output, scales = super().forward(input), self.scales()
        unscaled, scaled = output.split((output.shape[-1] - len(scales), len(scales)), dim=-1)
        return torch.cat([unscaled, scaled * scales.to(output.dtype)], dim=-1)

    def merge(self, name: str, weight: Tensor, peft_parameters: Mapping[str, Tensor]) -> Tensor:
        """Multiply the rows of weight and bias by their scales."""
        scales = peft_parameters["ia3"].to(weight)
        row_scales = torch.cat([scales.new_ones(len(weight) - len(scales)), scales])
        return weight * (row_scales if weight.ndim == 1 else row_scales[:, None])


class IA3Input(IA3Scales):
    """Learned scale of each input of a linear layer: the inner activations of an MLP."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return super().forward(input * self.ia3.to(input.dtype))

    def merge(self, name: str, weight: Tensor, peft_parameters: Mapping[str, Tensor]) -> Tensor:
        """Multiply the columns of the weight by their scales."""
        return weight * peft_parameters["ia3"].to(weight) if name == "weight" else weight


class IA3OutputLinear(IA3Output, Fp8Linear):
    """Frozen linear layer with learned scales of its last outputs.

    Args:
        base: layer on the meta device, whose weight and bias are reused.
        scaled: number of scaled outputs, the last ones.
    """

    def __init__(self, base: nn.Linear, scaled: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.ia3 = nn.Parameter(torch.empty(scaled))


class IA3InputLinear(IA3Input, Fp8Linear):
    """Frozen linear layer with a learned scale of each input.

    Args:
        base: layer on the meta device, whose weight and bias are reused.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.ia3 = nn.Parameter(torch.empty(base.in_features))


class IA3ColumnParallelLinear(IA3Output, ColumnParallelLinear):
    """`IA3OutputLinear` of which each rank has its part of the outputs, and their scales.

    Args:
        base: layer on the meta device.
        scaled: number of scaled outputs of this rank: its last two sections.
    """

    def __init__(self, base: ColumnParallelLinear, scaled: int) -> None:
        super().__init__(base, base.ranks, base.rows, gathers=base.gathers)
        scales = self.ranks.part(Partition(0, base.rows.sections[-2:]))
        set_partitions(
            self, {name: self.ranks.part(base.rows) for name, _ in self.named_parameters()} | {"ia3": scales}
        )
        self.ia3 = nn.Parameter(torch.empty(scaled))
        self.shared_scales = shared_rows(scales)

    def scales(self) -> Tensor:
        """Return this rank's scales."""
        return sum_shared_gradient(self.ia3, self.shared_scales, self.ranks)


class IA3RowParallelLinear(IA3Input, RowParallelLinear):
    """`IA3InputLinear` of which each rank has its part of the inputs, and their scales.

    Args:
        base: layer on the meta device.
    """

    def __init__(self, base: RowParallelLinear) -> None:
        super().__init__(base, base.ranks)
        scales = even_partition(0, self.ranks.size, self.columns.full_size)
        set_partitions(self, {"weight": self.ranks.part(self.columns), "ia3": self.ranks.part(scales)})
        self.ia3 = nn.Parameter(torch.empty(base.in_features))


def scale_outputs(base: nn.Linear, scaled: int) -> nn.Linear:
    """Return a linear layer with scales of its last outputs in place of `base`, see `IA3OutputLinear`."""
    if isinstance(base, ColumnParallelLinear):
        return IA3ColumnParallelLinear(base, scaled)
    return IA3OutputLinear(base, scaled)


def scale_inputs(base: nn.Linear) -> nn.Linear:
    """Return a linear layer with a scale of each input in place of `base`, see `IA3InputLinear`."""
    return IA3RowParallelLinear(base) if isinstance(base, RowParallelLinear) else IA3InputLinear(base)
