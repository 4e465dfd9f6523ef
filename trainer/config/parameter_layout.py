"""Data-parallel layouts.

| layout | replicas x shards | full weights | optimizer state | gradient reduction |
|---|---|---|---|---|
| data parallel (DDP) | R x 1 | always | replicated | once per step |
| distributed optimizer (ZeRO-1) | 1 x R | always | sharded | once per step |
| fsdp `grad` (ZeRO-2) | 1 x R | always | sharded, as are gradients | every micro batch |
| fsdp `full` (ZeRO-3) | 1 x R | one layer at a time | sharded | every micro batch |
| fsdp `hybrid` | R/s x s | one layer at a time | sharded | every micro batch |

`trainer/distributed/ddp.py` implements the first three, `trainer/distributed/fsdp.py` the others.

Sources: Rajbhandari et al. 2020, arXiv 1910.02054 (ZeRO); Zhao et al. 2023, arXiv 2304.11277 (FSDP).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...models.dispatch.context_calls import ContextSplit
from ...models.parallel.layout import ParallelLayout
from ...models.parallel.stages import PipelineSplit
from ..utils.errors import UserError
from .schema.root import AnyModelBlock

DISTRIBUTED_OPTIMIZERS = ("distributed_fused_adam", "mcore_distributed_optim")
"""NeMo's names of AdamW with state sharded over the data-parallel ranks."""


@dataclass(frozen=True, slots=True)
class DataParallelLayout:
    """Distribution of parameters and optimizer state over the ranks.

    Attributes:
        name: name for the log.
        replicas: number of replicas of each shard.
        shards: number of shards.
        replicates_weights: weights are replicated; otherwise each rank holds its shard outside of forward and backward.
        shards_gradients: with replicated weights, only the gradients that a rank updates with are kept.
    """

    name: str
    replicas: int
    shards: int
    replicates_weights: bool = False
    shards_gradients: bool = False

    @property
    def gathers_updates(self) -> bool:
        """True if each rank updates a part of replicated weights, which are gathered then."""
        return self.replicates_weights and self.shards > 1

    @property
    def description(self) -> str:
        """Description of a rank's weights and optimizer state between steps, for the log."""
        if self.shards == 1:
            return "each with all weights and all optimizer state"
        part = f"1/{self.shards} of the {'gradients and ' if self.shards_gradients else ''}optimizer state"
        weights = "all weights and" if self.replicates_weights else f"1/{self.shards} of the weights and"
        copies = f"; {self.replicas} copies" if self.replicas > 1 else ""
        return f"each with {weights} {part}{copies}"


def plan_layout(
    world_size: int, *, optimizer: str, fsdp: bool, strategy: str, shard_size: int | None
) -> DataParallelLayout | None:
    """Return the layout of a run, or None for a single rank.

    Args:
        world_size: number of ranks R that hold the same parameters, or the same part of them.
        optimizer: `model.optim.name`.
        fsdp: `model.fsdp`.
        strategy: `model.fsdp_sharding_strategy`: full, hybrid or grad.
        shard_size: shards s of `hybrid`, by default the ranks of a node.
    """
    if world_size == 1:
        return None
    if fsdp and strategy == "grad":
        return DataParallelLayout("fsdp grad", 1, world_size, replicates_weights=True, shards_gradients=True)
    if fsdp:
        shards = world_size if strategy == "full" or shard_size is None else shard_size
        return DataParallelLayout(f"fsdp {strategy}", world_size // shards, shards)
    if optimizer in DISTRIBUTED_OPTIMIZERS:
        return DataParallelLayout("distributed optimizer", 1, world_size, replicates_weights=True)
    return DataParallelLayout("data parallel", world_size, 1, replicates_weights=True)


def parallel_layout(keys: AnyModelBlock, world_size: int) -> ParallelLayout:
    """Return the mesh of a run.

    Raises:
        UserError: the processes do not make up whole replicas of the model.
    """
    ranks = keys.tensor_model_parallel_size * keys.context_parallel_size * keys.pipeline_model_parallel_size
    if world_size % ranks:
        raise UserError(
            f"the number of processes ({world_size}) must be a multiple of the {ranks} that share a model "
            "(`model.tensor_model_parallel_size` times `model.context_parallel_size` times "
            f"`model.pipeline_model_parallel_size`); use trainer.devices={-(-world_size // ranks) * ranks}"
        )
    stage, experts = world_size // keys.pipeline_model_parallel_size, keys.expert_model_parallel_size
    if stage % experts:
        raise UserError(
            f"the number of processes of a pipeline stage ({stage}) must be a multiple of "
            f"`model.expert_model_parallel_size` ({experts}); use model.expert_model_parallel_size="
            f"{math.gcd(stage, experts)}"
        )
    sequence = keys.sequence_parallel and keys.tensor_model_parallel_size > 1
    return ParallelLayout(
        data=world_size // ranks,
        tensor=keys.tensor_model_parallel_size,
        context=keys.context_parallel_size,
        pipeline=keys.pipeline_model_parallel_size,
        expert=keys.expert_model_parallel_size,
        sequence=sequence,
        overlap_gather=sequence and keys.ub_tp_comm_overlap and keys.tp_comm_overlap_ag,
        overlap_scatter=sequence and keys.ub_tp_comm_overlap and keys.tp_comm_overlap_rs,
    )


def pipeline_split(keys: AnyModelBlock) -> PipelineSplit | None:
    """Return how the layers are distributed over the ranks of a pipeline; None for one rank."""
    if keys.pipeline_model_parallel_size == 1:
        return None
    return PipelineSplit(
        ranks=keys.pipeline_model_parallel_size,
        chunks=keys.virtual_pipeline_model_parallel_size or 1,
        encoder_ranks=keys.pipeline_model_parallel_split_rank,
        first_layers=keys.num_layers_in_first_pipeline_stage,
        last_layers=keys.num_layers_in_last_pipeline_stage,
        counts_embedding=keys.account_for_embedding_in_pipeline_split,
        counts_loss=keys.account_for_loss_in_pipeline_split,
    )


def context_split(keys: AnyModelBlock) -> ContextSplit | None:
    """Return how context-parallel ranks share attention; None for one rank.

    Raises:
        ValueError: `hierarchical_context_parallel_sizes` does not fit; configuration rules report that earlier.
    """
    if keys.context_parallel_size == 1:
        return None
    neighbours = (keys.hierarchical_context_parallel_sizes or [1])[0]
    return ContextSplit(keys.context_parallel_size, keys.cp_comm_type, neighbours)


def layout_from_keys(keys: AnyModelBlock, mesh: ParallelLayout, ranks_per_node: int) -> DataParallelLayout | None:
    """Return the data-parallel layout of a run, or None if each parameter, or its part, is on one rank only."""
    replicas, expert_replicas = mesh.data * mesh.context, mesh.world_size // mesh.pipeline // mesh.expert
    if replicas == 1 and mesh.expert > 1 and expert_replicas > 1:  # of which only experts have replicas
        return DataParallelLayout("data parallel", 1, 1, replicates_weights=True)
    return plan_layout(
        replicas,
        optimizer=keys.optim.name,
        fsdp=keys.fsdp,
        strategy=keys.fsdp_sharding_strategy,
        shard_size=keys.fsdp_shard_size or max(1, ranks_per_node // mesh.tensor),
    )
