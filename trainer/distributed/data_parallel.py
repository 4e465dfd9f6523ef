"""A model on the data axes of a device mesh: FSDP2 applied as its layout says, gradients summed, never averaged.

Every rank divides its losses by the number of target tokens of the whole global batch, so the sum of the gradients is
that of one process, however the targets are spread.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from ...models.gpt import GPT
from ..precision import PrecisionPlan
from .layout import DataLayout
from .pieces import piece_of

# FSDP2 needs one group to sum the same parameter over shards and one to sum it over replicas.
AXES = ("dp_replicate", "dp_shard")


class DataParallel:
    """Cuts a model over ranks and steers its communication.

    Args:
        layout: what to cut and when to communicate.
        device_type: of all ranks' devices.
        precision: of the run; narrow weights with main weights become fp32 parameters that FSDP2 casts.
        reduce_dtype: in which gradients are summed; None: as they are.
    """

    def __init__(
        self,
        layout: DataLayout,
        device_type: str,
        precision: PrecisionPlan,
        *,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.layout = layout
        self.mesh: DeviceMesh = init_device_mesh(device_type, (layout.replicas, layout.shards), mesh_dim_names=AXES)
        self._shard_group: dist.ProcessGroup = self.mesh.get_group("dp_shard")
        self._policy = MixedPrecisionPolicy(
            param_dtype=precision.weights if precision.main_weights else None,
            reduce_dtype=reduce_dtype,
            # It would round the count of target tokens.
            cast_forward_inputs=False,
        )
        self.parameter_dtype = torch.float32 if precision.main_weights else precision.weights
        self._parts: list[FSDPModule] = []

    def cut(self, model: GPT) -> None:
        """Turn the parameters into DTensors of this rank's rows; a layer is the unit of communication.

        Args:
            model: on the meta device, or with all its weights.
        """
        for module in (*model.decoder.layers, model):
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

    @staticmethod
    def fill(parameter: Tensor, whole: Tensor) -> None:
        """Copy this rank's rows of a whole parameter."""
        piece = piece_of(parameter)
        piece.local.copy_(whole[piece.start : piece.start + piece.local.shape[0]])

    def before_micro_batch(self, *, last: bool) -> None:
        """Say whether the gradients of this micro batch complete the step."""
        root = self._parts[-1]
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or self.layout.reduce_every_micro_batch)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(last or self.layout.reshard_after_backward)

    def give_back(self) -> None:
        """Drop the whole weights, which the next optimizer step makes stale; after an evaluation."""
        for part in self._parts:
            part.reshard()

    @property
    def over_shards(self) -> dict[str, Any]:
        """How an optimizer learns of the rows it does not hold: arguments of `optim.base.Optimizer`."""
        return {"sum_over_shards": self.sum_over_shards, "gather_rows": self.gather_rows}

    def sum_over_shards(self, tensor: Tensor) -> Tensor:
        """Add a tensor up, in place, over the ranks that hold the other rows."""
        if self.layout.shards > 1:
            dist.all_reduce(tensor, group=self._shard_group)
        return tensor

    def gather_rows(self, local: Tensor, rows: int) -> Tensor:
        """All rows of a tensor of which every shard holds its own, in order.

        Args:
            local: this rank's rows; as `torch.chunk` cuts them, the last ranks may have fewer or none.
            rows: of the whole tensor.
        """
        shards = self.layout.shards
        if shards == 1:
            return local
        size = -(-rows // shards)
        padded = local.new_zeros(size, *local.shape[1:])
        padded[: local.shape[0]] = local
        whole = local.new_empty(size * shards, *local.shape[1:])
        dist.all_gather_into_tensor(whole, padded, group=self._shard_group)
        return whole[:rows]
