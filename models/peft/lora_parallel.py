"""LoRA linear layers split over the tensor-parallel ranks.

Neither needs communication besides that of its frozen layer, but the gradient of a replicated matrix is a partial sum.
With dropout, or a frozen product in fp8, a column-parallel layer is a sum of two: the frozen one, and B, whose inputs
are the products of A and the rank's tokens, so that masks and A are not applied to the tokens of other ranks.

| layer | A (parts * r, in) | B (out, r) | partial gradient |
|---|---|---|---|
| column-parallel | replicated | rows, as the weight | A; of two layers only of shared tokens |
| row-parallel | columns, as the weight | replicated | B |
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.lora.lora_linear import lora_linear
from ..config.peft import LoRASlice
from ..layers.dropout import DropoutMask, require_dropout
from ..layers.fused_linear import FusedLinear
from ..layers.norm import LayerNorm, RMSNorm
from ..parallel.collectives import column_linear, lora_column_linear, sum_partial
from ..parallel.fp8 import dense_weight
from ..parallel.linear import ColumnParallelLinear, RowParallelLinear
from ..parallel.partition import set_partitions
from .lora import LoRALinear, LoRAUpdate


class _LoRAParallelLinear(FusedLinear, LoRAUpdate):
    def add_to_residual(self, residual: Tensor | None, hidden: Tensor, dropout: DropoutMask | None = None) -> Tensor:
        """See `FusedLinear`."""
        output = self(hidden, dropout)
        return output if residual is None else residual + output

    def can_skip_norm_output(self, norm: LayerNorm | RMSNorm) -> bool:
        """Return False."""
        return False

    def dropped(self, input: Tensor, dropout: DropoutMask | None) -> Tensor | None:
        """Return the input of A in training with dropout; None without."""
        if not self.training or not self.lora.dropout:
            return None
        return require_dropout(dropout).apply(input, self.lora.dropout)


class LoRAColumnParallelLinear(ColumnParallelLinear, _LoRAParallelLinear):
    """Frozen column-parallel layer with a LoRA update.

    Args:
        base: layer on the meta device.
        lora: rank, scale and initialization.
        parts: this rank's rows of each projection in the weight.
    """

    def __init__(self, base: ColumnParallelLinear, lora: LoRASlice, parts: tuple[int, ...]) -> None:
        super().__init__(base, base.ranks, base.rows, gathers=base.gathers)
        self.add_matrices(base, lora, parts)
        rows = self.ranks.part(self.rows)
        split = ("weight", "lora_b") if self.bias is None else ("weight", "bias", "lora_b")
        set_partitions(self, dict.fromkeys(split, rows))

    @property
    def partial_gradients(self) -> tuple[str, ...]:
        """Parameters whose gradients are to be summed over the ranks."""
        is_sum = bool(self.lora.dropout) or self.fp8 is not None
        return ("lora_a",) if not is_sum or (self.gathers and self.ranks.sequence) else ()

    def forward(self, input: Tensor, dropout: DropoutMask | None = None) -> Tensor:
        """See `ColumnParallelLinear.forward`; `dropout` is the mask of the input."""
        dropped, gathers = self.dropped(input, dropout), self.gathers and self.ranks.shards_tokens
        if dropped is not None or (self.fp8 is not None and self.training):
            output = super().forward(input)
            low = F.linear(input if dropped is None else dropped, self.lora_a)
            update = column_linear(low, self.block_b(), None, self.ranks, gathers=gathers, shared=self.shared_rows)
            return output + self.lora.scale * update
        return lora_column_linear(
            input,
            dense_weight(self.weight, self.fp8, input.dtype),
            self.bias,
            self.lora_a,
            self.lora_b,
            self.ranks,
            scale=self.lora.scale,
            parts=self.parts,
            gathers=gathers,
            shared=self.shared_rows,
        )


class LoRARowParallelLinear(RowParallelLinear, _LoRAParallelLinear):
    """Frozen row-parallel layer with a LoRA update, which is a partial sum like the product of the weight.

    Args:
        base: layer on the meta device.
        lora: rank, scale and initialization.
    """

    partial_gradients = ("lora_b",)

    def __init__(self, base: RowParallelLinear, lora: LoRASlice) -> None:
        super().__init__(base, base.ranks)
        self.add_matrices(base, lora, (base.out_features,))
        set_partitions(self, dict.fromkeys(("weight", "lora_a"), self.ranks.part(self.columns)))

    def forward(self, input: Tensor, dropout: DropoutMask | None = None) -> Tensor:
        """See `RowParallelLinear.forward`; `dropout` is the mask of the input."""
        dropped = self.dropped(input, dropout)
        if self.fp8 is not None and self.training:
            partial = self.fp8.linear(input, self.weight, None) + self.update(input if dropped is None else dropped)
            return self.add_bias(sum_partial(partial, self.ranks))
        matrices = dense_weight(self.weight, self.fp8, input.dtype), None, self.lora_a, self.lora_b
        partial = lora_linear(input, *matrices, scale=self.lora.scale, parts=self.parts, dropped=dropped)
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
