"""Norm over channels that are split over the tensor-parallel ranks: the norm inside the MLP of a NormFormer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .collectives import TensorParallel
from .partition import even_partition, set_partitions


class ChannelParallelNorm(nn.Module):
    """LayerNorm, or RMSNorm without a bias, of which each rank has its part of the channels and of the parameters.

    The ranks exchange two numbers for each token in each pass (RMSNorm: one).

    Args:
        weight: this rank's part, on the meta device.
        bias: this rank's part, or None for RMSNorm.
        epsilon: added to the variance for numerical stability.
        zero_centered: store the weight minus one.
        ranks: the tensor-parallel ranks.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        epsilon: float,
        zero_centered: bool,
        ranks: TensorParallel,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.epsilon = epsilon
        self.zero_centered = zero_centered
        self.ranks = ranks
        part = ranks.part(even_partition(0, ranks.size, len(weight) * ranks.size))
        set_partitions(self, {name: part for name, _ in self.named_parameters()})

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize (..., channels / ranks); same shape and dtype."""
        accumulate = torch.promote_types(inputs.dtype, torch.float32)
        gain = self.weight.to(accumulate) + 1.0 if self.zero_centered else self.weight.to(accumulate)
        bias = None if self.bias is None else self.bias.to(accumulate)
        normed: Any = _ChannelParallelNorm.apply(inputs.to(accumulate), self.epsilon, bias is not None, self.ranks)
        return (normed * gain if bias is None else normed * gain + bias).to(inputs.dtype)


class _ChannelParallelNorm(torch.autograd.Function):
    """Normalization without gain and bias."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, epsilon: float, centres: bool, ranks: TensorParallel) -> Tensor:
        if centres:
            # the squares about the rank's own mean, and of its distance to the mean of all, do not cancel
            own_mean = inputs.mean(dim=-1)
            own_variance = (inputs - own_mean[..., None]).square().mean(dim=-1)
            means, variances = ranks.gather(torch.stack([own_mean, own_variance])).unbind(dim=1)
            mean = means.mean(dim=0)
            variance = (variances + (means - mean).square()).mean(dim=0)
            inputs = inputs - mean[..., None]
        else:
            variance = ranks.sum(inputs.square().mean(dim=-1)) / ranks.size
        factors = torch.rsqrt(variance + epsilon)[..., None]
        normed = inputs * factors
        ctx.save_for_backward(normed, factors)
        ctx.centres, ctx.ranks = centres, ranks
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        normed, factors = ctx.saved_tensors
        means = [(gradient * normed).mean(dim=-1)]
        if ctx.centres:
            means.append(gradient.mean(dim=-1))
        sums = ctx.ranks.sum(torch.stack(means)) / ctx.ranks.size
        result = gradient - normed * sums[0][..., None]
        if ctx.centres:
            result = result - sums[1][..., None]
        return result * factors, None, None, None
