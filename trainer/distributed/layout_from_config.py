"""Data-parallel layout from the configuration."""

from __future__ import annotations

import torch

from ..config.parameter_layout import DataParallelLayout, plan_layout
from ..config.schema.root import RootBlock


def layout_of(root: RootBlock, world_size: int) -> DataParallelLayout | None:
    """Return the data-parallel layout of a run, or None for a single process."""
    keys = root.model
    return plan_layout(
        world_size,
        optimizer=keys.optim.name,
        fsdp=keys.fsdp,
        strategy=keys.fsdp_sharding_strategy,
        shard_size=keys.fsdp_shard_size or world_size // root.trainer.num_nodes,
    )


def reduce_dtype(root: RootBlock, weights: torch.dtype) -> torch.dtype | None:
    """Return the gradient reduction dtype for bf16 weights; None (no cast) for other weights."""
    if weights != torch.bfloat16:
        return None
    return torch.bfloat16 if root.model.fsdp_grad_reduce_dtype == "bf16" else torch.float32
