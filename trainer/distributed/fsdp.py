"""Sharded parameters (ZeRO-3, hybrid) by FSDP2, with one FSDP unit per layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ...models.build import LanguageModel
from ...models.moe.moe_layer import find_moe_layers
from ..config.parameter_layout import DataParallelLayout
from ..optim.base_optimizer import Optimizer
from .copy_engine import CopyEngineCollectives
from .data_parallel import DataParallel
from .gathered_weights import GatheredWeights, whole_weights

# FSDP2 reduces gradients over the shard group, then over the replica group.
MESH_DIM_NAMES = ("dp_replicate", "dp_shard")


class ShardedDataParallel(DataParallel):
    """Data parallelism with sharded parameters: DTensors, on whose local shards the optimizer works.

    Gradients are reduce-scattered in every micro batch, so that only their local shards are kept.

    Args:
        reduce_dtype: dtype of gradient reductions; None for the dtype of the gradients.
        timeout: timeout of collectives; None for torch's default.
        pipeline_ranks: ranks of a pipeline, of which each has other layers.
        copy_engines: builds collectives of all data-parallel ranks by their copy engines, or returns None.
        tensor_ranks: tensor-parallel ranks that share each layer; neighbouring ranks.
        expert_ranks: ranks that share the experts of each layer; neighbouring ranks.
    """

    def __init__(
        self,
        layout: DataParallelLayout,
        device: torch.device,
        reduce_dtype: torch.dtype | None,
        timeout: timedelta | None = None,
        tensor_ranks: int = 1,
        expert_ranks: int = 1,
        pipeline_ranks: int = 1,
        copy_engines: Callable[[], CopyEngineCollectives | None] = lambda: None,
    ) -> None:
        sizes = (pipeline_ranks, layout.replicas, layout.shards, tensor_ranks)
        names = ("pipeline", *MESH_DIM_NAMES, "tensor")
        self.mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)[MESH_DIM_NAMES]
        self.expert_mesh = None
        if expert_ranks > 1:  # ranks with the same experts are other ones than those with the same of the rest
            sizes = (pipeline_ranks, layout.replicas * layout.shards * tensor_ranks // expert_ranks, expert_ranks)
            names = ("pipeline", "edp_shard", "expert")
            self.expert_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)["edp_shard"]
        groups = [self.mesh.get_group(axis) for axis in MESH_DIM_NAMES]
        groups += [self.expert_mesh.get_group()] if self.expert_mesh is not None else []
        if timeout is not None:  # subgroups do not inherit the timeout of the default group
            for group in groups:
                _set_pg_timeout(timeout, group)
        super().__init__(layout, groups[1], groups[2] if self.expert_mesh is not None else None)
        collectives = copy_engines() if layout.replicas == 1 else None
        self._exchange = None if collectives is None else GatheredWeights(collectives)
        self._device = device
        # All that is not the layers' is used again at once by the backward pass; in a pipeline not of that micro batch.
        self._reshards_root = True if pipeline_ranks > 1 else None
        # Casting inputs to bf16 would round the count of target tokens.
        self._policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        self._fsdp_modules: list[FSDPModule] = []

    def shard(self, model: LanguageModel) -> None:
        """Shard the parameters into DTensors."""
        # layers of experts return views, and nothing changes in place what a layer returns
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        layers: list[nn.Module] = [layer for stack in model.stacks for layer in stack.layers]
        layer_of: dict[nn.Module, nn.Module] = {}
        alone: set[nn.Parameter] = set()
        if self.expert_mesh is not None:
            layer_of = {moe.experts: layer for layer in layers for moe in find_moe_layers(layer).values()}
            if self.expert_mesh.size() == 1:  # FSDP2 would copy the weights and gradients of a unit of one rank
                alone = {parameter for experts in layer_of for parameter in experts.parameters()}
                layer_of = {}
        by_copy_engines: list[FSDPModule] = []
        for module in (*layer_of, *layers, model):
            own = (each for each in module.parameters() if not isinstance(each, DTensor) and each not in alone)
            rows = [each.shape[0] for each in own]
            fully_shard(
                module,
                mesh=self.expert_mesh if module in layer_of else self.mesh,
                reshard_after_forward=self._reshards_root if module is model else True,
                mp_policy=self._policy,
                ignored_params=alone,
            )
            assert isinstance(module, FSDPModule)
            if module in layer_of:
                _move_hooks(module, layer_of[module])
            elif rows and all(number % self.layout.shards == 0 for number in rows):
                by_copy_engines.append(module)
            self._fsdp_modules.append(module)
        for part in self._fsdp_modules:
            part.set_gradient_divide_factor(1.0)
            # With only a divide factor NCCL would use premul-sum, which gloo does not support.
            part.set_force_sum_reduction_for_comms(True)
        if self._exchange is not None:
            roots = [module for module in by_copy_engines if module is model]
            in_turn = [module for module in by_copy_engines if module is not model]
            together = max((stack.recompute_chunk for stack in model.stacks), default=1)
            self._exchange.add(in_turn, roots, self._device, together)
        for method in ("loss", "run_stage"):
            register_fsdp_forward_method(model, method)

    def attach(self, model: LanguageModel, optimizer: Optimizer) -> None:
        """Let the optimizer get the gradients that copy engines reduce."""
        if self._exchange is not None:
            self._exchange.optimizer = optimizer

    def before_forward(self) -> None:
        """Wait for the sums of the gradients that copy engines reduce."""
        self.before_update()

    def whole_weights(self, layer: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a layer has the weights that copy engines gather.

        Raises:
            UserError: FSDP2 gathers them into memory that changes.
        """
        assert isinstance(layer, FSDPModule)
        return whole_weights(layer)

    def before_update(self) -> None:
        """Make the current stream wait for these gradients; FSDP2 has waited for its own."""
        if self._exchange is not None:
            self._exchange.wait(self._device)

    def reshard(self) -> None:
        """Free the gathered weights, which the next optimizer step makes stale."""
        for part in self._fsdp_modules:
            part.reshard()


def _move_hooks(experts: FSDPModule, layer: nn.Module) -> None:
    """Gather the weights of experts before their layer instead, which is compiled as one graph, without their hooks."""
    state: Any = experts._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    layer.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    layer.register_forward_hook(state._post_forward)
