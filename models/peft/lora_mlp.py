"""A gated MLP whose projections both have low-rank updates, as one operation in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from ...kernels.gated_activation import GATES
from ...kernels.lora_gated_mlp import lora_gated_mlp, lora_gated_mlp_runs_on
from ..checkpointing import product_of, recomputes
from ..config.peft_slice import LoRASlice
from ..mlp import MLP
from .lora import LoRALinear


class LoRAMLP(MLP):
    """An MLP with `LoRALinear` projections, which takes over the modules of the one it stands for.

    In training on a GPU it is one operation wherever that computes the same: gated, both projections with updates,
    nothing between them but the activation, no biases and no dropout. Else it is what its parts are.

    Args:
        base: on the meta device.
        lora: what is added, to at least one of the projections.
    """

    def __init__(self, base: MLP, lora: LoRASlice) -> None:
        nn.Module.__init__(self)  # the modules of an MLP are those of `base`
        self.nonlinearity, self.gated, self.dropout = base.nonlinearity, base.gated, base.dropout
        self.recompute = base.recompute
        self.up, self.inner_norm, self.down = base.up, base.inner_norm, base.down
        if "mlp_fc1" in lora.targets:
            width = base.down.in_features
            self.up = LoRALinear(base.up, lora, (width, width) if base.gated else (width,))
        if "mlp_fc2" in lora.targets:
            self.down = LoRALinear(base.down, lora, (base.down.out_features,))

    def forward(self, hidden: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """As that of `MLP`."""
        up, down = self.up, self.down
        if not (isinstance(up, LoRALinear) and isinstance(down, LoRALinear) and self._is_one(up, down, hidden)):
            return super().forward(hidden, norm)
        run = partial(_run, up=up, down=down, kind=self.nonlinearity)
        return run(hidden) if norm is None else product_of(norm, run, False, hidden)

    def _is_one(self, up: LoRALinear, down: LoRALinear, hidden: Tensor) -> bool:
        between = self.inner_norm is not None or self.dropout > 0 or up.lora.dropout > 0
        plain = self.gated and self.nonlinearity in GATES and up.bias is None and down.bias is None
        return plain and not between and recomputes(self) and lora_gated_mlp_runs_on(hidden, up.lora.rank)


def _run(hidden: Tensor, *, up: LoRALinear, down: LoRALinear, kind: str) -> Tensor:
    return lora_gated_mlp(
        hidden, up.weight, up.lora_a, up.lora_b, down.weight, down.lora_a, down.lora_b, scale=up.lora.scale, kind=kind
    )
