"""MLP with LoRA on its projections, fused into one operation in training."""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.fp8.operands import Source
from ...kernels.lora.lora_gated_mlp import MAX_RANK, lora_gated_mlp, lora_gated_mlp_runs_on
from ...kernels.norm_functions import NormFactors
from ..config.peft import LoRASlice, PeftSlice
from ..config.stack import StackSlice
from ..layers.dropout import LayerDropout
from ..layers.fused_linear import can_skip_norm_output
from ..layers.mlp import MLP
from ..layers.norm import LayerNorm, RMSNorm
from ..memory.recompute import run_with_recomputed_input, should_recompute
from .lora import LoRALinear
from .lora_parallel import add_lora


def is_lora_mlp_fused(peft: PeftSlice | None, stack: StackSlice, device: str, dtype: str) -> bool:
    """Return True if the MLPs of all layers are fused in training, so that they do not save the activation output."""
    if not isinstance(peft, LoRASlice) or peft.layers.numbers is not None or peft.rank > MAX_RANK or stack.fp8:
        return False
    return device == "cuda" and dtype != "fp64" and peft.can_fuse_mlp(stack)


class LoRAMLP(MLP):
    """MLP with `LoRALinear` projections.

    Args:
        base: MLP on the meta device, whose modules are reused.
        lora: LoRA settings, which target at least one of the projections.
        fused: use the fused kernel in training on a GPU, see `LoRASlice.can_fuse_mlp`; otherwise,
            and elsewhere, run the projections separately.
    """

    def __init__(self, base: MLP, lora: LoRASlice, *, fused: bool) -> None:
        nn.Module.__init__(self)  # the modules of an MLP are those of `base`
        self.nonlinearity, self.gated, self.dropout = base.nonlinearity, base.gated, base.dropout
        self.has_dropout, self.first_channel = base.has_dropout, base.first_channel
        self.up, self.inner_norm, self.down = base.up, base.inner_norm, base.down
        self.rank, self.fused = lora.rank, fused
        if "mlp_fc1" in lora.targets:
            width = base.down.in_features
            self.up = add_lora(base.up, lora, (width, width) if base.gated else (width,))
        if "mlp_fc2" in lora.targets:
            self.down = add_lora(base.down, lora, (base.down.out_features,))

    def forward(
        self,
        hidden: Tensor,
        norm: LayerNorm | RMSNorm | None = None,
        residual: Tensor | None = None,
        dropout: LayerDropout | None = None,
        source: Source | None = None,
        output_bias: Tensor | None = None,
    ) -> Tensor:
        """See `MLP.forward`."""
        if self.fused and should_recompute(self) and lora_gated_mlp_runs_on(hidden, self.rank):
            if norm is None:
                return self._run_fused(hidden, None, residual)
            if isinstance(norm, RMSNorm) and can_skip_norm_output(self.up, norm):
                return self._run_fused(norm(hidden), norm.factors(hidden), residual)
            output = run_with_recomputed_input(norm, self._run_fused, hidden)
            return output if residual is None else residual + output
        return super().forward(hidden, norm, residual, dropout, source, output_bias)

    def _run_fused(self, hidden: Tensor, norm: NormFactors | None = None, residual: Tensor | None = None) -> Tensor:
        up, down = self.up, self.down
        assert isinstance(up, LoRALinear)
        assert isinstance(down, LoRALinear)
        matrices = up.weight, up.lora_a, up.lora_b, down.weight, down.lora_a, down.lora_b
        return lora_gated_mlp(
            hidden, *matrices, scale=up.lora.scale, kind=self.nonlinearity, norm=norm, residual=residual
        )
