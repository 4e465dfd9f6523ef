"""Numbers of nodes on which a run of `trainer.min_nodes` to `trainer.num_nodes` nodes can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.errors import UserError
from .parameter_layout import parallel_layout

if TYPE_CHECKING:
    from .schema.root import RootBlock
    from .schema.trainer_and_data import TrainerBlock


def min_nodes(trainer: TrainerBlock) -> int:
    """Return the fewest nodes of a run."""
    return trainer.num_nodes if trainer.min_nodes is None else trainer.min_nodes


def ranks_per_node(trainer: TrainerBlock, world_size: int) -> int:
    """Return the processes on each node; without `min_nodes` all nodes take part."""
    if trainer.min_nodes is not None and isinstance(trainer.devices, int):
        return min(trainer.devices, world_size)
    return max(1, world_size // trainer.num_nodes)


def fits(root: RootBlock, world_size: int) -> bool:
    """Return True if this number of processes holds whole replicas, and divides batches and sharding groups."""
    keys = root.model
    try:
        data_ranks = parallel_layout(keys, world_size).data
    except UserError:
        return False
    sizes = (keys.global_batch_size, *(keys.rampup_batch_size or ())[:2])
    # with virtual stages a step has whole rounds of micro batches
    rounds = keys.pipeline_model_parallel_size if (keys.virtual_pipeline_model_parallel_size or 1) > 1 else 1
    groups = keys.fsdp_shard_size if keys.fsdp and keys.fsdp_sharding_strategy == "hybrid" else None
    unit = keys.micro_batch_size * data_ranks * rounds
    return all(size % unit == 0 for size in sizes) and data_ranks % (groups or 1) == 0


def usable_nodes(root: RootBlock, nodes: int, devices: int) -> int:
    """Return the most nodes of those present that the run can use, 0 if `min_nodes` cannot be met.

    Args:
        root: the configuration.
        nodes: nodes that are present.
        devices: processes of each.
    """
    counts = range(nodes, min_nodes(root.trainer) - 1, -1)
    return next((count for count in counts if fits(root, count * devices)), 0)
