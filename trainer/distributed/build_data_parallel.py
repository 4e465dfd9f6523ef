"""Build the data parallelism of a run from its layout: DDP and ZeRO-1, or FSDP2."""

from __future__ import annotations

from datetime import timedelta

import torch

from ..config.parameter_layout import DataParallelLayout
from ..config.schema.root import RootBlock
from .data_parallel import DataParallel
from .ddp import ReplicatedDataParallel
from .fsdp import ShardedDataParallel


def grad_reduce_dtype(root: RootBlock, weights: torch.dtype) -> torch.dtype | None:
    """Return the gradient reduction dtype for bf16 weights; None (no cast) for other weights."""
    if weights != torch.bfloat16:
        return None
    return torch.bfloat16 if root.model.fsdp_grad_reduce_dtype == "bf16" else torch.float32


def build_data_parallel(
    layout: DataParallelLayout, device: torch.device, reduce_dtype: torch.dtype | None, timeout: timedelta | None = None
) -> DataParallel:
    """Build the data parallelism of a run.

    Args:
        layout: data-parallel layout.
        device: device of this rank.
        reduce_dtype: dtype of gradient reductions; None for the dtype of the gradients.
        timeout: timeout of collectives; None for torch's default.
    """
    if layout.replicates_weights:
        return ReplicatedDataParallel(layout, device, reduce_dtype)
    return ShardedDataParallel(layout, device, reduce_dtype, timeout)
