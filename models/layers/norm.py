"""LayerNorm and RMSNorm modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.fp8.operands import Source
from ...kernels.norm_functions import NormFactors, layer_norm, layer_norm_factors, rms_norm, rms_norm_factors
from ...kernels.norm_residual import can_fuse_residual, norm_residual, norm_residual_linear
from ..config.dense_stack import NormSlice
from ..memory.recompute import RecomputableModule


class BranchInput(NamedTuple):
    """Residual stream and input of a residual branch.

    Attributes:
        residual: residual stream that the branch output is added to.
        hidden: input of the branch, normed unless `norm` is given.
        second_hidden: a second handle on `hidden` for a second reader, so that its gradient arrives separately; None
            for one reader.
        norm: norm that the branch applies itself, so that its output is not saved; None if it has been applied.
        source: what makes `hidden`, for a projection that casts it to fp8 (`fp8_linear.reads_source`); None for others.
        output_bias: detached bias of the branch's last linear layer, to be added in place of its own, since the norm
            computes its gradient; None: its own.
    """

    residual: Tensor
    hidden: Tensor
    second_hidden: Tensor | None = None
    norm: LayerNorm | RMSNorm | None = None
    source: Source | None = None
    output_bias: Tensor | None = None


class BaseNorm(RecomputableModule):
    """Normalization over the last dimension; a layer recomputes its output before a projection.

    Attributes:
        wide_input: the input is an fp32 residual stream, which takes more memory than the output.
        offset: bias of LayerNorm, None for RMSNorm.

    Args:
        hidden_size: size of the last dimension.
        epsilon: added to the variance, or to the mean square, for numerical stability.
        zero_centered: store the weight minus one (Megatron's `layernorm1p`).
    """

    wide_input: bool = False

    def __init__(self, hidden_size: int, epsilon: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.full((hidden_size,), 0.0 if zero_centered else 1.0))

    @property
    def offset(self) -> Tensor | None:
        """See the class."""
        return None

    def forward_with_residual(
        self, residual: Tensor, two_outputs: bool, output_bias: Tensor | None = None
    ) -> BranchInput:
        """Return the residual stream and its norm, whose fused backward sums the gradients of both.

        Args:
            residual: residual stream (..., hidden_size).
            two_outputs: return the norm for a second reader too. Every returned tensor must be used in the loss.
            output_bias: see `norm_residual`; None if the output is not added as it is.
        """
        if not can_fuse_residual(residual, self.weight):
            return BranchInput(residual, self(residual))
        options: dict[str, Any] = {"epsilon": self.epsilon, "zero_centered": self.zero_centered}
        read = norm_residual(
            residual, self.weight, self.offset, two_outputs=two_outputs, output_bias=output_bias, **options
        )
        return BranchInput(*read, output_bias=None if output_bias is None else output_bias.detach())

    def can_fuse_projection(self, residual: Tensor) -> bool:
        """Return True if `fused_projection` is supported and saves memory.

        It does not if the residual stream is wider than the norm, a sum that nothing else saves: in fp32 beside 16-bit
        weights, or under autocast.
        """
        return can_fuse_residual(residual, self.weight) and not is_wide_residual(residual, self.weight)

    def fused_projection(self, residual: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residual stream and a projection of its norm; the backward recomputes the norm.

        Both must be used in the loss.
        """
        options: dict[str, Any] = {"epsilon": self.epsilon, "zero_centered": self.zero_centered}
        return norm_residual_linear(residual, self.weight, self.offset, weight, bias, **options)


class LayerNorm(BaseNorm):
    """Layer normalization, see `BaseNorm`."""

    def __init__(self, hidden_size: int, epsilon: float, *, zero_centered: bool = False) -> None:
        super().__init__(hidden_size, epsilon, zero_centered=zero_centered)
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    @property
    def offset(self) -> Tensor:
        """See `BaseNorm`."""
        return self.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize (..., hidden_size); same shape and dtype, but in that of 16-bit weights for fp32."""
        return layer_norm(inputs, self.weight, self.bias, epsilon=self.epsilon, zero_centered=self.zero_centered)

    @torch.no_grad()
    def fp8_source(self, inputs: Tensor) -> Source:
        """Return what a cast to fp8 computes the norm of (..., hidden_size) from; without gradient."""
        inverse, mean, gain, bias = layer_norm_factors(
            inputs, self.weight, self.bias, epsilon=self.epsilon, zero_centered=self.zero_centered
        )
        rows = inputs.detach().flatten(0, -2)
        return Source("layer_norm", (rows, inverse.flatten(), gain, mean.flatten(), bias))


class RMSNorm(BaseNorm):
    """Root-mean-square normalization, without bias, see `BaseNorm`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize (..., hidden_size); same shape and dtype, but in that of 16-bit weights for fp32."""
        return rms_norm(
            inputs, self.weight, epsilon=self.epsilon, zero_centered=self.zero_centered, training=self.training
        )

    @torch.no_grad()
    def fp8_source(self, inputs: Tensor) -> Source:
        """Return what a cast to fp8 computes the norm of (..., hidden_size) from; without gradient."""
        factors = self.factors(inputs.detach())
        return Source("rms_norm", (factors.source.flatten(0, -2), factors.inverse_rms.flatten(), factors.gain))

    def factors(self, inputs: Tensor) -> NormFactors:
        """Return the factors of the norm: input, reciprocal RMS of each row, and weight."""
        return rms_norm_factors(inputs, self.weight, epsilon=self.epsilon, zero_centered=self.zero_centered)


def is_wide_residual(residual: Tensor, weight: Tensor) -> bool:
    """Return True if the residual stream is wider than what branches read and return."""
    return residual.dtype != weight.dtype or torch.is_autocast_enabled(residual.device.type)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def build_norm(norm: NormSlice, width: int, *, wide_input: bool = False) -> LayerNorm | RMSNorm:
    """Build a norm over `width` channels; for `wide_input` see `LayerNorm`."""
    built = NORMS[norm.kind](width, norm.epsilon, zero_centered=norm.zero_centered)
    built.wide_input = wide_input
    return built


# ---------------------------------------------------------------- cost


def norm_parameters(norm: NormSlice, width: int) -> int:
    """Return the number of parameters of a norm over `width` channels."""
    return width * (2 if norm.kind == "layernorm" else 1)


def norm_saves_input(norm: NormSlice, itemsize: int) -> bool:
    """Return True if an eager norm saves its input, of `itemsize` bytes per element, instead of an fp32 copy."""
    return itemsize >= 4 or (norm.kind == "layernorm" and not norm.zero_centered)


def norm_saved_bytes(norm: NormSlice, elements: int, itemsize: int) -> int:
    """Return the bytes that an eager norm saves besides its input of `elements` of `itemsize` bytes."""
    if norm.kind == "rmsnorm":  # the fp32 copy of the input, and the normalized input in fp32
        return elements * 4 * (1 if norm_saves_input(norm, itemsize) else 2)
    return 0 if norm_saves_input(norm, itemsize) else elements * 4


def norm_statistics_bytes(norm: NormSlice, rows: int) -> int:
    """Return the bytes of the fp32 statistics that a norm saves: reciprocal deviations, for LayerNorm also means."""
    return rows * 4 * (2 if norm.kind == "layernorm" else 1)
