"""How the data axes of a run cut its parameters.

| layout | replicas x shards | weights whole | optimizer state | gradients summed |
|---|---|---|---|---|
| data parallel (DDP) | R x 1 | always | whole | once a step |
| distributed optimizer (ZeRO-1) | 1 x R | always | cut | once a step |
| fsdp `grad` (ZeRO-2) | 1 x R | during a micro batch | cut | every micro batch |
| fsdp `full` (ZeRO-3) | 1 x R | one layer at a time | cut | every micro batch |
| fsdp `hybrid` | R/s x s | one layer at a time | cut | every micro batch |

`replicated.py` is the first two, `sharded.py` the others.

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
        whole_weights: every rank keeps all weights; else only its rows of them, outside of forward and backward.
        reshard_after_forward: give whole weights back after each layer's forward, and gather them again for backward.
    """

    name: str
    replicas: int
    shards: int
    whole_weights: bool = False
    reshard_after_forward: bool = False

    @property
    def held(self) -> str:
        """What a rank holds between two steps, in words, for the log."""
        if self.shards == 1:
            return "each with all weights and all optimizer state"
        part = f"1/{self.shards} of the optimizer state"
        weights = "all weights and" if self.whole_weights else f"1/{self.shards} of the weights and"
        copies = f"; {self.replicas} copies" if self.replicas > 1 else ""
        return f"each with {weights} {part}{copies}"


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
        return DataLayout("fsdp grad", 1, world_size)
    if fsdp:
        shards = world_size if strategy == "full" or shard_size is None else shard_size
        return DataLayout(f"fsdp {strategy}", world_size // shards, shards, reshard_after_forward=True)
    if optimizer in DISTRIBUTED_OPTIMIZERS:
        return DataLayout("distributed optimizer", 1, world_size, whole_weights=True)
    return DataLayout("data parallel", world_size, 1, whole_weights=True)
