"""Data parallelism: base class of all layouts, and the dtype of gradient reductions.

Gradients are summed over ranks, not averaged: every rank divides its losses by the number of target tokens of the whole
global batch, so the sum equals the single-process gradient however the targets are distributed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.build import LanguageModel
from ...models.parallel.partition import RankPart, partitions_of
from ..config.parameter_layout import DataParallelLayout
from ..config.schema.root import AnyModelBlock
from ..optim.base_optimizer import Optimizer
from ..optim.parameter_sharding import ParameterSharding
from ..utils.local_shard import LocalShard, local_shard
from .process_group import all_gather_single

HELD = 2
"""Units whose whole gradients are held until their shards are summed, so that computation does not wait for these."""


class DataParallel:
    """Data-parallel model; base class for all layouts.

    Args:
        shard_group: process group of the ranks that hold different shards.
        expert_shard_group: the same for experts that ranks share; None without.

    Attributes:
        accumulates_gradients: gradients are accumulated and all-reduced by hooks during backward, so the caller does
            not accumulate them.
    """

    accumulates_gradients = False

    def __init__(
        self,
        layout: DataParallelLayout,
        shard_group: dist.ProcessGroup | None,
        expert_shard_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.layout = layout
        self._shard_group = shard_group
        self._expert_shard_group = expert_shard_group

    def shard(self, model: LanguageModel) -> None:
        """Shard a model, on the meta device or with its full weights, before the optimizer is built."""

    def initial_rows(self, parameter: Tensor) -> tuple[Tensor, int]:
        """Return the local rows of a parameter to initialize, and the first of them; all rows of replicated weights."""
        shard = local_shard(parameter)
        return shard.local, shard.rows[0].first

    def local_shard(self, tensor: Tensor, part: RankPart | None = None) -> LocalShard:
        """Return the shard of a parameter that this rank updates."""
        return local_shard(tensor, part)

    def local_rows(self, gradient: Tensor, part: RankPart | None = None) -> Tensor:
        """Return the rows of a gradient, or of its local shard, that this rank updates."""
        return gradient

    def attach(self, model: LanguageModel, optimizer: Optimizer) -> None:
        """Register the model, with its weights loaded, and the optimizer; called once before the first step."""

    def before_step(self, micro_batches: int) -> None:
        """Prepare for the backward passes of so many micro batches."""

    def before_forward(self) -> None:
        """Make the current stream wait until nothing reads the gradients of earlier backward passes: CUDA graphs of
        layers write what they compute next to their memory.
        """

    def whole_weights(self, layer: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a layer has its whole weights where later passes have them, with any values."""
        return nullcontext()

    def before_update(self) -> None:
        """Wait for pending gradient reductions."""

    def after_update(self) -> None:
        """All-gather weights updated by other ranks, if this layout keeps full weights.

        They may still be on their way: layers wait for theirs, and all else that reads weights for `wait_for_weights`.
        """

    def wait_for_weights(self) -> None:
        """Make the current stream wait for the weights that `after_update` gathers."""

    def gather_weights(self) -> None:
        """All-gather weights updated by other ranks, and wait for them."""
        self.after_update()
        self.wait_for_weights()

    def reshard(self) -> None:
        """Reshard weights that were gathered for an evaluation."""

    @property
    def parameter_sharding(self) -> ParameterSharding:
        """Shards that this rank updates, and collectives over those of all ranks, for the optimizer."""
        if self.layout.shards == 1:
            return ParameterSharding()
        return ParameterSharding(
            sum_over_shards=self.all_reduce_shards,
            sum_over_expert_shards=self.all_reduce_expert_shards,
            gather_rows=self.all_gather_rows,
            shard_of=self.local_shard,
            local_rows=self.local_rows,
        )

    def all_reduce_shards(self, tensor: Tensor) -> Tensor:
        """All-reduce (sum) a tensor over the shard group, in place."""
        dist.all_reduce(tensor, group=self._shard_group)
        return tensor

    def all_reduce_expert_shards(self, tensor: Tensor) -> Tensor:
        """All-reduce (sum) a tensor over the ranks with other shards of the same experts, in place."""
        if self._expert_shard_group is not None:
            dist.all_reduce(tensor, group=self._expert_shard_group)
        return tensor

    def all_gather_rows(self, local: Tensor, rows: int) -> Tensor:
        """All-gather the rows of a sharded tensor.

        Args:
            local: local shard; chunked as by `torch.chunk`, so the last ranks may have fewer rows or none.
        """
        return gather_rows(local, rows, self._shard_group)


def gather_rows(local: Tensor, rows: int, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather `rows` rows of which each rank of a group has a chunk, as by `torch.chunk`."""
    shards = dist.get_world_size(group)
    size = -(-rows // shards)
    padded = local.new_zeros(size, *local.shape[1:])
    padded[: local.shape[0]] = local
    whole = local.new_empty(size * shards, *local.shape[1:])
    all_gather_single(whole, padded, group=group)
    return whole[:rows]


def backward_passes(model: LanguageModel) -> dict[nn.Parameter, int]:
    """Return how many backward passes a micro batch has for a parameter, if there are several: one for each pipeline
    stage of this rank that shares it.
    """
    if model.pipeline is None:
        return {}
    found: dict[nn.Parameter, int] = {}
    for index, stack in enumerate(model.stacks):
        users = [stage for stage in model.pipeline.stages if stage.stack == index and stage.layers]
        if stack.score_positions is not None:
            found |= dict.fromkeys(stack.score_positions.parameters(), len(users))
    return found


def grad_reduce_dtype(keys: AnyModelBlock, weights: torch.dtype) -> torch.dtype | None:
    """Return the gradient reduction dtype for 16-bit weights; None (no cast) for other weights."""
    if weights.itemsize != 2:
        return None
    return torch.bfloat16 if keys.fsdp_grad_reduce_dtype == "bf16" else torch.float32


def communication_buckets(model: LanguageModel) -> list[list[nn.Parameter]]:
    """Return the trainable parameters in communication buckets: embeddings, each layer, position biases, the rest.

    Experts that ranks share are in buckets of their own, since they are reduced over other ranks, and position biases
    since several pipeline stages of a rank may share them.
    """
    tables = [module for name, module in model.named_children() if name.endswith("embedding")]
    before = [parameter for table in tables for parameter in table.parameters()]
    stacks = model.stacks
    layers = [list(layer.parameters()) for stack in stacks for layer in stack.layers]
    layers += [list(stack.score_positions.parameters()) for stack in stacks if stack.score_positions is not None]
    named = {parameter for unit in (before, *layers) for parameter in unit}
    after = [parameter for parameter in model.parameters() if parameter not in named]
    parts = partitions_of(model)
    experts = {
        parameter
        for name, parameter in model.named_parameters()
        if (part := parts.get(name)) is not None and part.axis == "expert"
    }
    units = [
        [parameter for parameter in unit if parameter.requires_grad and (parameter in experts) == is_expert]
        for unit in (before, *layers, after)
        for is_expert in (False, True)
    ]
    return [unit for unit in units if unit]
