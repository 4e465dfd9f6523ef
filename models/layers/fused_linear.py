"""Linear layers fused with the preceding norm and/or the following residual add."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.fp8.operands import Source
from ...kernels.launch import triton_runs_on
from ..memory.recompute import run_with_recomputed_input
from .dropout import DropoutMask
from .fp8_linear import Fp8Linear
from .norm import LayerNorm, RMSNorm


class FusedLinear(nn.Linear):
    """Linear layer that can save the input of a preceding norm instead of its output, and fuse a residual add."""

    def add_to_residual(self, residual: Tensor | None, hidden: Tensor, dropout: DropoutMask | None = None) -> Tensor:
        """Return `residual + linear(hidden)`, with `residual` (..., out) or None and `hidden` (..., in).

        `dropout` is the mask of its own dropout in training.
        """
        raise NotImplementedError

    def can_skip_norm_output(self, norm: LayerNorm | RMSNorm) -> bool:
        """Return True if `forward_with_norm` saves only per-row statistics of this norm for the backward, not its
        output.
        """
        raise NotImplementedError

    def forward_with_norm(
        self, norm: LayerNorm | RMSNorm, hidden: Tensor, dropout: DropoutMask | None = None
    ) -> Tensor:
        """Return `linear(norm(hidden))` for a norm that `can_skip_norm_output` accepts."""
        raise NotImplementedError


def can_skip_norm_output(linear: nn.Linear, norm: LayerNorm | RMSNorm) -> bool:
    """Return True if the backward of `linear` needs no norm output and nothing has to be recomputed for it."""
    return isinstance(linear, FusedLinear) and linear.can_skip_norm_output(norm)


def can_detach_bias(linear: nn.Linear, hidden: Tensor) -> bool:
    """Return True if the operation after `linear` can compute the gradient of its bias (kernels/bias_gradients.py).

    Not in eager mode, where the memory estimate counts what autograd saves for the unfused operations, nor under
    autocast.
    """
    if type(linear) is not nn.Linear or linear.bias is None or not linear.bias.requires_grad:
        return False
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    return torch.compiler.is_compiling() and triton_runs_on(hidden)


def linear_add_residual(
    residual: Tensor | None,
    linear: nn.Linear,
    hidden: Tensor,
    dropout: DropoutMask | None = None,
    source: Source | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return `residual + linear(hidden)`, or `linear(hidden)` if `residual` is None.

    `dropout` is the mask of the dropout that a linear layer with LoRA has in training. `source` makes `hidden`, for a
    layer that `reads_source`. `bias` takes the place of that of a layer that `can_detach_bias`.
    """
    if bias is not None:
        output = F.linear(hidden, linear.weight, bias)
        return output if residual is None else residual + output
    if source is not None:
        assert isinstance(linear, Fp8Linear)
        output = linear.of_source(hidden, source)
        return output if residual is None else residual + output
    if isinstance(linear, FusedLinear):
        return linear.add_to_residual(residual, hidden, dropout)
    return linear(hidden) if residual is None else residual + linear(hidden)


def norm_linear(
    norm: LayerNorm | RMSNorm,
    linear: nn.Linear,
    hidden: Tensor,
    residual: Tensor | None = None,
    dropout: DropoutMask | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return `linear(norm(hidden))`, saving `hidden` for the backward instead of the norm output.

    The norm output is not needed (`can_skip_norm_output`), or it is recomputed in the backward.

    Args:
        norm: applied to `hidden`.
        linear: reads the norm output.
        hidden: (..., in).
        residual: residual stream that a later operation adds to; may be `hidden` itself.
        dropout: as in `linear_add_residual`.

    Returns:
        The projection (..., out), and the residual stream to use from here on: a fused kernel returns its own, so that
        one backward kernel accumulates both gradients.
    """
    if isinstance(linear, FusedLinear) and linear.can_skip_norm_output(norm):
        return linear.forward_with_norm(norm, hidden, dropout), residual
    fusable = residual is hidden and type(linear) is nn.Linear
    if fusable and norm.can_fuse_projection(hidden):
        residual, projected = norm.fused_projection(hidden, linear.weight, linear.bias)
        return projected, residual
    product = partial(linear_add_residual, None, linear, dropout=dropout)
    return run_with_recomputed_input(norm, product, hidden), residual
