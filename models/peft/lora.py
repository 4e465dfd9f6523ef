"""Low-rank updates of linear layers and of experts (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...kernels.lora.lora_linear import lora_linear
from ...kernels.moe.lora_experts import LowRank, lora_expert_mlp
from ...kernels.norm_functions import NormParts
from ..config.peft_slice import LoRASlice
from ..layers.fused_linear import NormedLinear
from ..layers.norm import LayerNorm, RMSNorm
from ..moe.experts import Experts
from ..moe.router import Routed
from .added_parameters import Added, drawn


class LoRALinear(NormedLinear, Added):
    """A frozen linear layer with a low-rank update, x W^T + b + scale (x A^T) B^T.

    A fused weight has a pair of matrices for each of its projections: the rows of `lora_a`, (parts * rank, in), are
    those of the first, then of the second; the rows of `lora_b`, (out, rank), lie as those of `weight`.

    Args:
        base: the layer, on the meta device, whose weight and bias it takes over.
        lora: what is added.
        parts: rows of each projection in the weight.
    """

    added: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b")

    def __init__(self, base: nn.Linear, lora: LoRASlice, parts: tuple[int, ...]) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.lora = lora
        self.draws = lora.dropout > 0
        self.parts = parts if lora.canonical else (base.out_features,)
        self.lora_a = nn.Parameter(torch.empty(len(self.parts) * lora.rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, lora.rank))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self._product(input, None)

    def spares(self, norm: LayerNorm | RMSNorm) -> bool:
        """That of RMS, which is a product, unless what the first matrix reads is dropped.

        In compiled layers: as written, the norm itself would keep copies in fp32.
        """
        return torch.compiler.is_compiling() and isinstance(norm, RMSNorm) and not self.lora.dropout

    def of_norm(self, norm: LayerNorm | RMSNorm, hidden: Tensor) -> Tensor:
        """As in `NormedLinear`."""
        assert isinstance(norm, RMSNorm)
        return self._product(norm(hidden), norm.parts(hidden))

    def onto(self, stream: Tensor, hidden: Tensor) -> Tensor:
        """As in `NormedLinear`."""
        return self._product(hidden, None, stream)

    def _product(self, inputs: Tensor, norm: NormParts | None, onto: Tensor | None = None) -> Tensor:
        return lora_linear(
            inputs,
            self.weight,
            self.bias,
            self.lora_a,
            self.lora_b,
            scale=self.lora.scale,
            parts=self.parts,
            dropout=self.lora.dropout if self.training else 0.0,
            norm=norm,
            onto=onto,
        )

    def initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """As the keys say."""
        if name == "lora_a":
            return drawn(self.lora.column_init, shape, generator, len(self.parts))
        return drawn(self.lora.row_init, shape, generator)

    def merged(self, name: str, weight: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """W + scale B A."""
        if name != "weight":
            return weight
        return weight + self.lora.scale * _update(added["lora_a"], added["lora_b"], self.parts).to(weight)


class LoRAExperts(Experts, Added):
    """Frozen experts, each with low-rank updates of its projections.

    Shapes are as in `LoRALinear`, with the experts in front.

    Args:
        base: the experts, on the meta device, whose weights it takes over.
        lora: what is added.
    """

    added: ClassVar[tuple[str, ...]] = ("up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")

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
        )
        self.up, self.down, self.up_bias, self.down_bias = base.up, base.down, base.up_bias, base.down_bias
        self.lora = lora
        self.draws = self.dropout > 0 or lora.dropout > 0
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

    def forward(self, tokens: Tensor, routed: Routed) -> Tensor:
        """(tokens, hidden_size) to the same shape; a token that no expert takes gets 0."""
        training, lora = self.training, self.lora
        low = lora.scale, lora.dropout if training else 0.0
        up_lora = down_lora = None
        if self.up_lora_a is not None and self.up_lora_b is not None:
            up_lora = LowRank(self.up_lora_a, self.up_lora_b, self.parts, *low)
        if self.down_lora_a is not None and self.down_lora_b is not None:
            down_lora = LowRank(self.down_lora_a, self.down_lora_b, (self.down.shape[1],), *low)
        return lora_expert_mlp(
            tokens,
            routed.choice.experts,
            routed.choice.gates,
            self.up,
            self.down,
            up_lora,
            down_lora,
            nonlinearity=self.nonlinearity,
            gated=self.gated,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            kept=routed.kept,
            capacity=routed.capacity if self.pad_to_capacity else None,
            dropout=self.dropout if training else 0.0,
            one_by_one=self.implementation == "sequential",
        )

    def initial(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """As the keys say."""
        if name.endswith("lora_a"):
            return drawn(self.lora.column_init, shape, generator, len(self.parts) if name.startswith("up") else 1)
        return drawn(self.lora.row_init, shape, generator)

    def merged(self, name: str, weight: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """W + scale B A, of every expert."""
        if f"{name}_lora_a" not in added:
            return weight
        parts = self.parts if name == "up" else (weight.shape[1],)
        update = _update(added[f"{name}_lora_a"], added[f"{name}_lora_b"], parts)
        return weight + self.lora.scale * update.to(weight)


def _update(down: Tensor, up: Tensor, parts: Sequence[int]) -> Tensor:
    """B A in fp32 at least, each projection of a fused weight by itself; with experts in front where there are some."""
    wide = torch.promote_types(up.dtype, torch.float32)
    lows, highs = down.to(wide).split(up.shape[-1], dim=-2), up.to(wide).split(list(parts), dim=-2)
    return torch.cat([high @ low for high, low in zip(highs, lows, strict=True)], dim=-2)
