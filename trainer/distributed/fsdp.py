"""Weights that are cut over ranks (ZeRO-2, ZeRO-3, hybrid): FSDP2, a layer being the unit of communication."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from ...models.build import LanguageModel, stacks_of
from ..config.parameter_layout import DataLayout
from ..utils.local_shard import piece_of
from .data_parallel import DataParallel

# FSDP2 needs one group to sum the same parameter over shards and one to sum it over replicas.
AXES = ("dp_replicate", "dp_shard")


class Sharded(DataParallel):
    """Parameters are DTensors of this rank's rows; the optimizer works on those.

    Gradients are summed in every micro batch, so that only rows of them are kept.

    Args:
        layout: of the run.
        device: of this rank.
        reduce_dtype: in which gradients are summed; None: as they are.
        timeout: how long a rank waits for another; None: torch's own.
    """

    def __init__(
        self,
        layout: DataLayout,
        device: torch.device,
        reduce_dtype: torch.dtype | None,
        timeout: timedelta | None = None,
    ) -> None:
        self.mesh = init_device_mesh(device.type, (layout.replicas, layout.shards), mesh_dim_names=AXES)
        if timeout is not None:  # the groups of `hybrid` do not take over that of the group of all
            for axis in AXES:
                _set_pg_timeout(timeout, self.mesh.get_group(axis))
        super().__init__(layout, self.mesh.get_group("dp_shard"))
        # Casting inputs would round the count of target tokens.
        self._policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        self._parts: list[FSDPModule] = []

    def cut(self, model: LanguageModel) -> None:
        """Turn the parameters into DTensors."""
        for module in (*(layer for stack in stacks_of(model) for layer in stack.layers), model):
            fully_shard(
                module,
                mesh=self.mesh,
                reshard_after_forward=self.layout.reshard_after_forward,
                mp_policy=self._policy,
            )
            assert isinstance(module, FSDPModule)
            self._parts.append(module)
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            # With a factor alone NCCL would multiply on the way, and gloo has no such operation.
            part.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(model, "loss")

    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Copy this rank's rows of a whole parameter."""
        piece = piece_of(parameter)
        piece.local.copy_(whole[piece.start : piece.start + piece.local.shape[0]])

    def give_back(self) -> None:
        """Drop the whole weights, which the next optimizer step makes stale."""
        for part in self._parts:
            part.reshard()
