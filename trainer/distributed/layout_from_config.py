"""The data axes that the keys of a run ask for."""

from __future__ import annotations

import torch

from ..config.parameter_layout import DataLayout, plan_layout
from ..config.schema.root import RootBlock


def layout_of(root: RootBlock, world_size: int) -> DataLayout | None:
    """What each of the processes of a run holds, or None for one process."""
    keys = root.model
    return plan_layout(
        world_size,
        optimizer=keys.optim.name,
        fsdp=keys.fsdp,
        strategy=keys.fsdp_sharding_strategy,
        shard_size=keys.fsdp_shard_size or world_size // root.trainer.num_nodes,
    )


def reduce_dtype(root: RootBlock, weights: torch.dtype) -> torch.dtype | None:
    """The dtype in which gradients are summed over processes; None: as they are, where weights are not bf16."""
    if weights != torch.bfloat16:
        return None
    return torch.bfloat16 if root.model.fsdp_grad_reduce_dtype == "bf16" else torch.float32
