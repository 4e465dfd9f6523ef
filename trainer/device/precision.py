"""Autocast of a forward pass, from the precision of a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ...models.build import TORCH_DTYPES
from ..config.run_precision import RunPrecision


def autocast_context(precision: RunPrecision, device: torch.device) -> AbstractContextManager[object]:
    """Return the autocast context of the forward pass; a null context if arithmetic has the dtype of the weights."""
    if precision.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, TORCH_DTYPES[precision.autocast])
