"""LoRA linear layers split over the tensor-parallel ranks.

Neither needs communication besides that of its frozen layer, but the gradient of a replicated matrix is a partial sum.

| layer | A (parts * r, in) | B (out, r) | partial gradient |
|---|---|---|---|
| column-parallel | replicated | rows, as the weight | A |
| row-parallel | columns, as the weight | replicated | B |
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from ...kernels.lora.lora_linear import lora_linear
from ..config.peft import LoRASlice
from ..parallel.collectives import lora_column_linear, sum_partial
from ..parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..parallel.partition import set_partitions
from .lora import LoRALinear, LoRAUpdate


class LoRAColumnParallelLinear(ColumnParallelLinear, LoRAUpdate):
    """Frozen column-parallel layer with a LoRA update.

    Args:
        base: layer on the meta device.
        lora: rank, scale and initialization.
        parts: this rank's rows of each projection in the weight.
    """

    partial_gradients: ClassVar[tuple[str, ...]] = ("lora_a",)

    def __init__(self, base: ColumnParallelLinear, lora: LoRASlice, parts: tuple[int, ...]) -> None:
        super().__init__(base, base.ranks, base.rows, gathers=base.gathers)
        self.add_matrices(base, lora, parts)
        rows = self.ranks.part(self.rows)
        split = ("weight", "lora_b") if self.bias is None else ("weight", "bias", "lora_b")
        set_partitions(self, dict.fromkeys(split, rows))

    def forward(self, input: Tensor) -> Tensor:
        """See `ColumnParallelLinear.forward`."""
        return lora_column_linear(
            input,
            self.weight,
            self.bias,
            self.lora_a,
            self.lora_b,
            self.ranks,
            scale=self.lora.scale,
            parts=self.parts,
            gathers=self.gathers and self.ranks.shards_tokens,
            shared=self.shared_rows,
        )


class LoRARowParallelLinear(RowParallelLinear, LoRAUpdate):
    """Frozen row-parallel layer with a LoRA update, which is a partial sum like the product of the weight.

    Args:
        base: layer on the meta device.
        lora: rank, scale and initialization.
    """

    partial_gradients: ClassVar[tuple[str, ...]] = ("lora_b",)

    def __init__(self, base: RowParallelLinear, lora: LoRASlice) -> None:
        super().__init__(base, base.ranks)
        self.add_matrices(base, lora, (base.out_features,))
        set_partitions(self, dict.fromkeys(("weight", "lora_a"), self.ranks.part(self.columns)))

    def forward(self, input: Tensor) -> Tensor:
        """See `RowParallelLinear.forward`."""
        matrices = self.weight, None, self.lora_a, self.lora_b
        partial = lora_linear(input, *matrices, scale=self.lora.scale, parts=self.parts)
        return self.add_bias(sum_partial(partial, self.ranks))


def add_lora(base: nn.Linear, lora: LoRASlice, parts: tuple[int, ...]) -> nn.Linear:
    """Return a linear layer with a LoRA update in place of `base`, with the same communication.

    Args:
        base: layer on the meta device.
        lora: rank, scale, dropout and initialization.
        parts: rows of each projection in the weight (of this rank).
    """
    match base:
        case ColumnParallelLinear():
            return LoRAColumnParallelLinear(base, lora, parts)
        case RowParallelLinear():
            return LoRARowParallelLinear(base, lora)
        case _:
            return LoRALinear(base, lora, parts)
