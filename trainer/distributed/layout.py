"""How the data axes of a run cut its parameters: one mechanism (FSDP2), five layouts.

| layout | replicas x shards | weights whole | gradients summed |
|---|---|---|---|
| data parallel (DDP) | R x 1 | always | once a step |
| distributed optimizer (ZeRO-1) | 1 x R | during a step | once a step |
| fsdp `grad` (ZeRO-2) | 1 x R | during a micro batch | every micro batch |
| fsdp `full` (ZeRO-3) | 1 x R | one layer at a time | every micro batch |
| fsdp `hybrid` | R/s x s | one layer at a time | every micro batch; over replicas once a step |

Sources: Rajbhandari et al. 2020, arXiv 1910.02054 (ZeRO); Zhao et al. 2023, arXiv 2304.11277 (FSDP).
"""

from __future__ import annotations

from dataclasses import dataclass

DISTRIBUTED_OPTIMIZERS = ("distributed_fused_adam", "mcore_distributed_optim")
"""NeMo's names of AdamW whose state is cut over the data-parallel ranks."""


@dataclass(frozen=True, slots=True)
class DataLayout:
    """What each rank holds of the parameters, and when.

    Attributes:
        name: for the log.
        replicas: groups of ranks that hold the same rows.
        shards: ranks that hold different rows.
        reshard_after_forward: give whole weights back after each layer's forward, and gather them again for backward.
        reshard_after_backward: give them back after each micro batch, not only at the end of a step.
        reduce_every_micro_batch: sum gradients over the shards in every micro batch; else at the last one.
    """

    name: str
    replicas: int
    shards: int
    reshard_after_forward: bool = False
    reshard_after_backward: bool = False
    reduce_every_micro_batch: bool = False


def plan_layout(
    world_size: int, *, optimizer: str, fsdp: bool, strategy: str, shard_size: int | None
) -> DataLayout | None:
    """The layout of a run, or None for a single process.

    Args:
        world_size: ranks R.
        optimizer: `model.optim.name`.
        fsdp: `model.fsdp`.
        strategy: `model.fsdp_sharding_strategy`: full, hybrid or grad.
        shard_size: s of `hybrid`, the ranks of a machine.
    """
    if world_size == 1:
        return None
    if fsdp and strategy == "grad":
        return DataLayout("fsdp grad", 1, world_size, reshard_after_backward=True, reduce_every_micro_batch=True)
    if fsdp:
        shards = world_size if strategy == "full" or shard_size is None else shard_size
        name = f"fsdp {strategy}"
        return DataLayout(
            name,
            world_size // shards,
            shards,
            reshard_after_forward=True,
            reshard_after_backward=True,
            reduce_every_micro_batch=True,
        )
    if optimizer in DISTRIBUTED_OPTIMIZERS:
        return DataLayout("distributed optimizer", 1, world_size)
    return DataLayout("data parallel", world_size, 1)
