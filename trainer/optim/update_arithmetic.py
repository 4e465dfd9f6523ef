"""Arithmetic that updates of several optimizers share: dtypes, moments, and writes that a skipped step leaves out."""

from __future__ import annotations

import torch
from torch import Tensor


def arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    """Return the compute dtype of an update: that of the weight, but at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def zero_state(main: Tensor) -> Tensor:
    """Return a moment of a weight, zero, in its dtype; for fp16 in fp32, since squares of gradients underflow."""
    return torch.zeros_like(main, dtype=torch.float32 if main.dtype == torch.float16 else main.dtype)


def copy_unless_skipped(old: Tensor, new: Tensor, live: Tensor) -> None:
    """Copy `new` into `old`, cast to its dtype, unless the scalar tensor `live` is False (a skipped step)."""
    old.copy_(torch.where(live, new, old))


def write_weight(weight: Tensor, main: Tensor, new: Tensor, live: Tensor) -> None:
    """Overwrite a main weight, and the local shard of the parameter if it is a separate tensor."""
    copy_unless_skipped(main, new, live)
    if weight.dtype != main.dtype:
        weight.copy_(main)
