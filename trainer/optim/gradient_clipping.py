"""Global norm of the gradients of all ranks, and the coefficient that clips them to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.launch import triton_runs_on
from ...kernels.optim.sum_of_squares import sum_of_squares


def no_reduce(tensor: Tensor) -> Tensor:
    """Return the tensor: default of `sum_over_shards` without sharding."""
    return tensor


def global_norm(gradients: list[Tensor], sum_over_shards: Callable[[Tensor], Tensor] = no_reduce) -> Tensor:
    """Return the global L2 norm of all gradients, a scalar tensor; squares are summed in at least fp32.

    Any non-finite element makes the norm non-finite. On a GPU, one kernel reads all gradients (`sum_of_squares`), and
    the result is bitwise deterministic.

    Args:
        gradients: local shard of each gradient.
        sum_over_shards: all-reduce (sum) over the ranks with the other shards.
    """
    if all(map(triton_runs_on, gradients)):
        return sum_over_shards(sum_of_squares(gradients)).sqrt()
    dtype = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(gradients, 2, dtype=dtype)
    if sum_over_shards is no_reduce:
        return torch.linalg.vector_norm(torch.stack(norms))
    return sum_over_shards(torch.stack(norms).square().sum()).sqrt()


def clip_coefficient(norm: Tensor, clip_norm: float | None) -> Tensor:
    """Return min(1, clip_norm / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_; -1 if the norm is not finite."""
    scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0) if clip_norm else torch.ones_like(norm)
    return torch.where(norm.isfinite(), scale, -1.0)
