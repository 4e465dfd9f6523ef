"""Cast weights, rejecting overflow."""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.errors import UserError

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes by command-line name."""


def cast_checked(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast a tensor.

    Raises:
        UserError: a finite value overflows to infinity.
    """
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and bool((converted.isinf() & tensor.isfinite()).any()):
        shown = next(known for known, of in DTYPES.items() if of == dtype)
        raise UserError(
            f"{name} holds {float(tensor.abs().max()):.3g}, more than {shown} can: use --dtype bf16 or fp32"
        )
    return converted
