"""LoRA linear layers and experts (arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.lora.lora_linear import lora_linear
from ...kernels.moe.lora_experts import LoRAMatrices, lora_expert_mlp
from ...kernels.norm_functions import NormFactors
from ..config.peft import LoRASlice
from ..layers.dropout import DropoutMask, require_dropout
from ..layers.fused_linear import FusedLinear
from ..layers.norm import LayerNorm, RMSNorm
from ..moe.dispatch import Arrived, Dispatched, ExpertInputs
from ..moe.experts import Experts
from ..parallel.fp8 import Fp8Product, dense_weight
from .added_parameters import PeftModule, init_matrix


class LoRAUpdate(PeftModule):
    """LoRA update of a linear layer, its other base class: the matrices, their initialization and merging.

    A fused weight has a LoRA pair for each of its projections: the rows of `lora_a`, (parts * rank, in), are those of
    the first projection, then of the second, ...; the rows of `lora_b`, (out, rank), match those of `weight`.
    """

    peft_parameters: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b")

    def add_matrices(self, base: nn.Linear, lora: LoRASlice, parts: tuple[int, ...]) -> None:
        """Add A and B for a weight of these projections, each of so many rows."""
        self.lora = lora
        self.has_dropout = lora.dropout > 0
        self.parts = parts if lora.canonical else (base.out_features,)
        self.lora_a = nn.Parameter(torch.empty(len(self.parts) * lora.rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, lora.rank))

    def update(self, inputs: Tensor) -> Tensor:
        """Return scale (x A^T) B^T of inputs (..., in), beside a product in fp8."""
        return self.lora.scale * F.linear(F.linear(inputs, self.lora_a), self.block_b())

    def block_b(self) -> Tensor:
        """Return B of all projections, (out, parts * rank)."""
        return torch.block_diag(*self.lora_b.split(list(self.parts))) if len(self.parts) > 1 else self.lora_b

    def initial_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Initialize A and B by the configured methods."""
        if name == "lora_a":
            return init_matrix(self.lora.column_init, shape, generator, len(self.parts))
        return init_matrix(self.lora.row_init, shape, generator)

    def merge(self, name: str, weight: Tensor, peft_parameters: Mapping[str, Tensor]) -> Tensor:
        """Return W + scale B A."""
        if name != "weight":
            return weight
        update = _update(peft_parameters["lora_a"], peft_parameters["lora_b"], self.parts)
        return weight + self.lora.scale * update.to(weight)


class LoRALinear(FusedLinear, LoRAUpdate):
    """Frozen linear layer with a LoRA update, x W^T + b + scale (x A^T) B^T.

    Args:
        base: layer on the meta device, whose weight and bias are reused.
        lora: rank, scale, dropout and initialization.
        parts: rows of each projection in the weight.

    Attributes:
        fp8: how the frozen weight is multiplied by in training; None: in the dtype of the inputs.
    """

    fp8: Fp8Product | None = None

    def __init__(self, base: nn.Linear, lora: LoRASlice, parts: tuple[int, ...]) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.add_matrices(base, lora, parts)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return self._linear(input, None)

    def can_skip_norm_output(self, norm: LayerNorm | RMSNorm) -> bool:
        """Return True for RMSNorm in compiled layers without LoRA dropout.

        The output of an RMSNorm can be recomputed from its input and a factor per row. With dropout, the masked input
        of A is saved anyway; an fp32 residual stream takes more memory; in eager mode, the norm itself would save fp32
        copies.
        """
        spares = isinstance(norm, RMSNorm) and not norm.wide_input
        return torch.compiler.is_compiling() and spares and self.fp8 is None and not self.lora.dropout

    def forward_with_norm(
        self, norm: LayerNorm | RMSNorm, hidden: Tensor, dropout: DropoutMask | None = None
    ) -> Tensor:
        """See `FusedLinear`."""
        assert isinstance(norm, RMSNorm)
        return self._linear(norm(hidden), norm.factors(hidden))

    def add_to_residual(self, residual: Tensor | None, hidden: Tensor, dropout: DropoutMask | None = None) -> Tensor:
        """See `FusedLinear`."""
        return self._linear(hidden, None, residual, dropout)

    def _linear(
        self,
        inputs: Tensor,
        norm: NormFactors | None,
        residual: Tensor | None = None,
        dropout: DropoutMask | None = None,
    ) -> Tensor:
        dropped = None
        if self.training and self.lora.dropout:
            dropped = require_dropout(dropout).apply(inputs, self.lora.dropout)
        if self.fp8 is not None and self.training:
            output = self.fp8.linear(inputs, self.weight, self.bias)
            output = output + self.update(inputs if dropped is None else dropped)
            return output if residual is None else residual + output
        return lora_linear(
            inputs,
            dense_weight(self.weight, self.fp8, inputs.dtype),
            self.bias,
            self.lora_a,
            self.lora_b,
            scale=self.lora.scale,
            parts=self.parts,
            dropped=dropped,
            norm=norm,
            residual=residual,
        )


class LoRAExperts(Experts, PeftModule):
    """Frozen experts, each with LoRA updates of its projections.

    Shapes are as in `LoRALinear`, with a leading expert dimension.

    Args:
        base: experts on the meta device, whose weights are reused.
        lora: rank, scale, dropout, targets and initialization.
    """

    peft_parameters: ClassVar[tuple[str, ...]] = ("up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")

    def __init__(self, base: Experts, lora: LoRASlice) -> None:
        experts, rows, hidden = base.up.shape
        width = base.down.shape[2]
        super().__init__(
            experts,
            hidden,
            width,
            nonlinearity=base.nonlinearity,
            gated=base.gated,
            bias=base.up_bias is not None,
            dropout=base.dropout,
            implementation=base.implementation,
            pad_to_capacity=base.pad_to_capacity,
            dispatcher=base.dispatcher,
        )
        self.up, self.down, self.up_bias, self.down_bias = base.up, base.down, base.up_bias, base.down_bias
        self.lora = lora
        self.has_dropout = self.dropout > 0 or lora.dropout > 0
        self.parts = (width, width) if base.gated and lora.canonical else (rows,)
        rank = lora.rank
        if "mlp_fc1" in lora.targets:
            self.up_lora_a = nn.Parameter(torch.empty(experts, len(self.parts) * rank, hidden))
            self.up_lora_b = nn.Parameter(torch.empty(experts, rows, rank))
        else:
            self.up_lora_a = self.up_lora_b = None
        if "mlp_fc2" in lora.targets:
            self.down_lora_a = nn.Parameter(torch.empty(experts, rank, width))
            self.down_lora_b = nn.Parameter(torch.empty(experts, hidden, rank))
        else:
            self.down_lora_a = self.down_lora_b = None

    def compute_arriving(self, sent: Dispatched | Arrived) -> Tensor:
        """Return `compute` of tokens on their way."""
        return self.compute(sent.receive())

    def compute(self, inputs: ExpertInputs, residual: Tensor | None = None) -> Tensor:
        """Return the weighted outputs of this rank's experts, as in `Experts`."""
        training, lora = self.training, self.lora
        scale_and_dropout = lora.scale, lora.dropout if training else 0.0
        up_lora = down_lora = None
        if self.up_lora_a is not None and self.up_lora_b is not None:
            up_lora = LoRAMatrices(self.up_lora_a, self.up_lora_b, self.parts, *scale_and_dropout)
        if self.down_lora_a is not None and self.down_lora_b is not None:
            down_lora = LoRAMatrices(self.down_lora_a, self.down_lora_b, (self.down.shape[1],), *scale_and_dropout)
        output = lora_expert_mlp(
            inputs.tokens,
            inputs.experts,
            inputs.gates,
            self.up,
            self.down,
            up_lora,
            down_lora,
            nonlinearity=self.nonlinearity,
            gated=self.gated,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            kept=inputs.kept,
            capacity=inputs.capacity,
            dropout=self.dropout if training else 0.0,
            dropout_rows=inputs.dropout_rows,
            assignments=inputs.assignments,
            sequential=self.implementation == "sequential",
        )
        return output if residual is None else residual + output

    def initial_parameter(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Initialize A and B by the configured methods."""
        if name.endswith("lora_a"):
            return init_matrix(self.lora.column_init, shape, generator, len(self.parts) if name.startswith("up") else 1)
        return init_matrix(self.lora.row_init, shape, generator)

    def merge(self, name: str, weight: Tensor, peft_parameters: Mapping[str, Tensor]) -> Tensor:
        """Return W + scale B A of every expert."""
        if f"{name}_lora_a" not in peft_parameters:
            return weight
        parts = self.parts if name == "up" else (weight.shape[1],)
        update = _update(peft_parameters[f"{name}_lora_a"], peft_parameters[f"{name}_lora_b"], parts)
        return weight + self.lora.scale * update.to(weight)


def _update(a: Tensor, b: Tensor, parts: Sequence[int]) -> Tensor:
    """Return B A in at least fp32, separately for each projection of a fused weight, and batched over experts."""
    dtype = torch.promote_types(b.dtype, torch.float32)
    a_parts, b_parts = a.to(dtype).split(b.shape[-1], dim=-2), b.to(dtype).split(list(parts), dim=-2)
    return torch.cat([b_part @ a_part for b_part, a_part in zip(b_parts, a_parts, strict=True)], dim=-2)
