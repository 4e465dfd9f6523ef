"""Linear layer that multiplies in fp8 in training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.fp8.operands import Source
from ..parallel.fp8 import Fp8Product, dense_weight


class Fp8Linear(nn.Linear):
    """Linear layer with the parameters of an ordinary one, whose three products run in fp8 in training.

    Attributes:
        fp8: how it multiplies in training; None, and outside training: in the dtype of its inputs.
    """

    fp8: Fp8Product | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        if self.fp8 is not None and self.training:
            return self.fp8.linear(input, self.weight, self.bias)
        return F.linear(input, dense_weight(self.weight, self.fp8, input.dtype), self.bias)

    def of_source(self, input: Tensor, source: Source) -> Tensor:
        """Return `forward` of an input that `source` makes, which is cast instead of it; only where `reads_source`."""
        assert self.fp8 is not None
        return self.fp8.linear(input, self.weight, self.bias, source)


def reads_source(linear: nn.Linear | None) -> bool:
    """Return True if a layer casts its input from what makes it: compiled, where the input is then never computed."""
    if not torch.compiler.is_compiling() or type(linear) is not Fp8Linear or not linear.training:
        return False
    if linear.fp8 is None or not linear.fp8.reads_source:
        return False
    return not torch.is_autocast_enabled(linear.weight.device.type)


def with_fp8(linear: nn.Linear) -> Fp8Linear:
    """Return a layer with the same parameters."""
    replaced = Fp8Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    replaced.weight, replaced.bias = linear.weight, linear.bias
    return replaced
