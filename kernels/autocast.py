"""Autocast for functions into which it does not reach: `torch.autograd.Function`s and custom operations."""

from __future__ import annotations

from typing import Any, TypeVarTuple

import torch
from torch import Tensor

Operands = TypeVarTuple("Operands")


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of matmuls with a tensor: that of autocast on its device where it is on, else the tensor's."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def autocast(first: Tensor, *others: *Operands) -> tuple[Tensor, *Operands]:
    """Cast the operands of a matmul, tensors or None, as autocast would; without it return them as they are."""
    if not torch.is_autocast_enabled(first.device.type):
        return first, *others
    dtype = autocast_dtype(first)
    operands: Any = first, *others
    found: Any = tuple(None if tensor is None else tensor.to(dtype) for tensor in operands)
    return found
