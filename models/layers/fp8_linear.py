"""Linear layer that multiplies in fp8 in training."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..parallel.fp8 import Fp8Product


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
        return F.linear(input, self.weight, self.bias)


def with_fp8(linear: nn.Linear) -> Fp8Linear:
    """Return a layer with the same parameters."""
    replaced = Fp8Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    replaced.weight, replaced.bias = linear.weight, linear.bias
    return replaced
