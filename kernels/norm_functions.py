"""LayerNorm and RMSNorm, computed in fp32 and rounded once, from an fp32 residual stream to the dtype of the weights.

Plain PyTorch, which torch.compile fuses into one kernel each. With `zero_centered` the stored weight is the gain minus
one (NeMo's layernorm1p), so that weight decay pulls the gain towards one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class NormFactors(NamedTuple):
    """Factors of an RMSNorm output, which is source * factors * gain.

    Attributes:
        source: input of the norm, (..., n).
        inverse_rms: inverse root mean square of each row, (..., 1), fp32 (fp64), without gradient.
        gain: weight of the norm, (n,).
    """

    source: Tensor
    inverse_rms: Tensor
    gain: Tensor


def norm_dtype(inputs: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of a norm: that of its input, but of 16-bit weights for an fp32 residual stream."""
    narrows = weight.dtype.itemsize == 2 and inputs.dtype == torch.float32
    return weight.dtype if narrows else inputs.dtype


def layer_norm(inputs: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float, zero_centered: bool = False) -> Tensor:
    """Return (x - mean) / sqrt(variance + epsilon) * gain + bias over the last dimension (arXiv 1607.06450).

    Args:
        inputs: (..., h), any floating dtype; computed in fp32 (fp64 for fp64) and rounded once.
        weight: (h,), the gain.
        bias: (h,).
        epsilon: added to the variance.
        zero_centered: the gain is 1 + `weight` (NeMo's layernorm1p).

    Returns:
        Same shape as `inputs`, in `norm_dtype`.
    """
    if not zero_centered and weight.dtype == inputs.dtype:
        return F.layer_norm(inputs, weight.shape, weight, bias, epsilon)  # accumulates in fp32 itself
    accumulate = torch.promote_types(inputs.dtype, torch.float32)
    gain = weight.to(accumulate) + 1.0 if zero_centered else weight.to(accumulate)
    normed = F.layer_norm(inputs.to(accumulate), weight.shape, gain, bias.to(accumulate), epsilon)
    return normed.to(norm_dtype(inputs, weight))


def rms_norm(
    inputs: Tensor, weight: Tensor, *, epsilon: float, zero_centered: bool = False, training: bool = True
) -> Tensor:
    """Return inputs / sqrt(mean(inputs^2) + epsilon) * gain over the last dimension (arXiv 1910.07467).

    Outside training and without gradients PyTorch's fused kernel may be used, which also rounds once.

    Args:
        inputs: (..., h), any floating dtype; computed in fp32 (fp64 for fp64) and rounded once.
        weight: (h,), the gain.
        epsilon: added to the mean square.
        zero_centered: the gain is 1 + `weight`.
        training: the result is differentiated.

    Returns:
        Same shape as `inputs`, in `norm_dtype`.
    """
    if not training and _use_fused_kernel(inputs, weight, zero_centered):
        return F.rms_norm(inputs, weight.shape, weight, epsilon)
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    normed = wide * _factors(wide, epsilon) * _gain(weight, wide.dtype, zero_centered)
    return normed.to(norm_dtype(inputs, weight))


def rms_norm_factors(inputs: Tensor, weight: Tensor, *, epsilon: float, zero_centered: bool = False) -> NormFactors:
    """Return the factors of `rms_norm`; torch.compile computes the inverse root mean square once for both."""
    with torch.no_grad():
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        return NormFactors(inputs, _factors(wide, epsilon), _gain(weight, wide.dtype, zero_centered))


def layer_norm_factors(
    inputs: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inverse deviation and mean of each row (..., 1), gain and bias (h,) of `layer_norm`, fp32 (fp64)."""
    with torch.no_grad():
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        variance, mean = torch.var_mean(wide, dim=-1, correction=0, keepdim=True)
        return torch.rsqrt(variance + epsilon), mean, _gain(weight, wide.dtype, zero_centered), bias.to(wide.dtype)


def _factors(wide: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)


def _gain(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    return weight.to(dtype) + 1.0 if zero_centered else weight.to(dtype)


def _use_fused_kernel(inputs: Tensor, weight: Tensor, zero_centered: bool) -> bool:
    """Return True if F.rms_norm runs as one kernel: in eager mode on CUDA; torch.compile fuses plain PyTorch anyway.

    It saves seven launches per norm during generation.
    """
    eager = inputs.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return eager and not zero_centered and weight.dtype == inputs.dtype and not torch.is_autocast_enabled("cuda")
