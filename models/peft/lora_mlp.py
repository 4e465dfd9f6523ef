"""A gated MLP whose projections both have low-rank updates, as one operation in training."""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.lora.lora_gated_mlp import WIDEST_RANK, lora_gated_mlp, lora_gated_mlp_runs_on
from ...kernels.norm_functions import NormParts
from ..config.peft_slice import LoRASlice, PeftSlice
from ..config.slices import StackSlice
from ..layers.fused_linear import spares
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm, RMSNorm
from ..memory.activation_checkpoint import product_of, recomputes
from .lora import LoRALinear


def is_one_operation(peft: PeftSlice | None, stack: StackSlice, device: str, dtype: str) -> bool:
    """Whether the MLPs of all layers of a stack are one operation in training, which keeps no activated rows."""
    if not isinstance(peft, LoRASlice) or peft.layers.numbers is not None or peft.rank > WIDEST_RANK:
        return False
    return device == "cuda" and dtype != "fp64" and peft.mlp_is_one_operation(stack)


class LoRAMLP(MLP):
    """An MLP with `LoRALinear` projections, which takes over the modules of the one it stands for.

    Args:
        base: on the meta device.
        lora: what is added, to at least one of the projections.
        is_one_operation: in training on a GPU, see `LoRASlice.mlp_is_one_operation`; elsewhere its parts run.
    """

    def __init__(self, base: MLP, lora: LoRASlice, *, is_one_operation: bool) -> None:
        nn.Module.__init__(self)  # the modules of an MLP are those of `base`
        self.nonlinearity, self.gated, self.dropout = base.nonlinearity, base.gated, base.dropout
        self.draws, self.recompute = base.draws, base.recompute
        self.up, self.inner_norm, self.down = base.up, base.inner_norm, base.down
        self.rank, self.is_one_operation = lora.rank, is_one_operation
        if "mlp_fc1" in lora.targets:
            width = base.down.in_features
            self.up = LoRALinear(base.up, lora, (width, width) if base.gated else (width,))
        if "mlp_fc2" in lora.targets:
            self.down = LoRALinear(base.down, lora, (base.down.out_features,))

    def forward(self, hidden: Tensor, norm: LayerNorm | RMSNorm | None = None, onto: Tensor | None = None) -> Tensor:
        """As that of `MLP`."""
        if self.is_one_operation and recomputes(self) and lora_gated_mlp_runs_on(hidden, self.rank):
            if norm is None:
                return self._run(hidden, None, onto)
            if isinstance(norm, RMSNorm) and spares(self.up, norm):
                return self._run(norm(hidden), norm.parts(hidden), onto)
            output = product_of(norm, self._run, False, hidden)
            return output if onto is None else onto + output
        return super().forward(hidden, norm, onto)

    def _run(self, hidden: Tensor, norm: NormParts | None = None, onto: Tensor | None = None) -> Tensor:
        up, down = self.up, self.down
        assert isinstance(up, LoRALinear)
        assert isinstance(down, LoRALinear)
        matrices = up.weight, up.lora_a, up.lora_b, down.weight, down.lora_a, down.lora_b
        return lora_gated_mlp(hidden, *matrices, scale=up.lora.scale, kind=self.nonlinearity, norm=norm, onto=onto)
