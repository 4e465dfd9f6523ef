"""Weights of FSDP2 units gathered by the GPUs' copy engines: every rank writes its rows to where the others use them.

FSDP2 copies its shards into a buffer, gathers that, and copies it out into the weights; gradients likewise. Here the
weights of a unit have a fixed place in memory that all ranks can write, and gradients are reduced from where they are,
so that no kernels but the local sums run beside the model's, and the host has little to do. Units take turns in a few
slots of that memory; those of the last ones are still there when the backward pass begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from ...models.parallel.peer_memory import COUNTER_BYTES, Memory
from ..optim.base_optimizer import Optimizer
from ..utils.errors import UserError
from .copy_engine import CopyEngineCollectives
from .data_parallel import HELD

MIN_SLOTS = 3
"""Units whose weights have memory at a time: one computes, one arrives, and one may still be in use."""

ALIGNMENT = 256
"""Bytes that the place of a weight is a multiple of."""


def num_slots(together: int) -> int:
    """Return the units whose weights have memory at a time, if so many layers are recomputed together: FSDP2 keeps the
    weights of a layer from its recomputation to its backward pass.
    """
    return max(MIN_SLOTS, together)


class _Slot:
    """Memory of the weights of one unit at a time.

    Attributes:
        offset: first byte.
        holder: the unit whose weights were written there last.
        released: event after which that unit's weights are no longer used.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.holder: CopyEngineParamGroup | None = None
        self.released: Any = None


class CopyEngineParamGroup(FSDPParamGroup):
    """Parameter group of an FSDP2 unit that is gathered and reduced by copy engines: see `GatheredWeights.add`."""

    device_handle: Any
    exchange: GatheredWeights
    slot: _Slot
    places: list[list[Tensor]]
    """Where each rank has this rank's rows of each parameter, flat."""

    def unshard(self, async_op: bool = False) -> None:
        """Start to gather the weights, unless their slot is in use: then `wait_for_unshard` is yet to come."""
        if self._all_gather_result is not None or self.is_unsharded:
            return
        # a backward pass, which may begin with recomputation, finds what no other layer has overwritten
        in_backward = self._training_state == TrainingState.PRE_BACKWARD or torch._C._current_graph_task_id() != -1
        slot, kept = self.slot, in_backward and self.slot.holder is self
        if slot.holder is not None and slot.holder is not self:
            if slot.holder.is_unsharded:
                return
            slot.holder._all_gather_result = None  # gathered for a backward pass that did not come
        event = None if kept else self.exchange.gather(self)
        slot.holder = self
        self._all_gather_result = AllGatherResult(self.places[0][0], event, None, [], [], [])

    def wait_for_unshard(self) -> None:
        """Make the current stream wait for the weights, and the modules use them."""
        if self._all_gather_result is None:
            if not self.is_unsharded:
                raise RuntimeError(
                    f"the weights of {self._module_fqn} are needed beside those of another layer in the same memory; "
                    "set model.copy_engine_collectives=False"
                )
            return
        if self._all_gather_result.all_gather_event is not None:
            self.device_handle.current_stream().wait_event(self._all_gather_result.all_gather_event)
        self._all_gather_result = None
        self._to_unsharded()

    def _to_sharded(self) -> None:
        if self.is_unsharded:
            self.slot.released = self.device_handle.current_stream().record_event()
        super()._to_sharded()

    def post_backward(self, *unused: Any) -> None:
        """Free the weights and reduce their gradients; does nothing for a unit without any."""
        self._training_state = TrainingState.POST_BACKWARD
        parameters: list[nn.Parameter] = []
        gradients: list[Tensor] = []
        for parameter in self.fsdp_params:
            whole: nn.Parameter = parameter._unsharded_param
            if whole.grad is not None:
                parameters.append(parameter.sharded_param)
                gradients.append(whole.grad)
                whole.grad = None
        self.reshard()
        if gradients:
            self.exchange.reduce(self, parameters, gradients)


class GatheredWeights:
    """Exchanges weights and gradients of the units of a model.

    Args:
        collectives: those of the gradients, of the ranks that share the weights.

    Attributes:
        optimizer: gets this rank's rows of the gradients.
    """

    def __init__(self, collectives: CopyEngineCollectives) -> None:
        self._collectives = collectives
        self.optimizer: Optimizer | None = None
        self._memory: Memory | None = None
        self._counters = 0
        self._gathers = 0
        self._held: deque[tuple[Any, Sequence[Tensor]]] = deque()

    def add(
        self, in_turn: Sequence[FSDPModule], always: Sequence[FSDPModule], device: torch.device, together: int = 1
    ) -> None:
        """Take over units whose parameters have rows that the ranks divide; a collective of the ranks.

        Args:
            in_turn: units that are gathered one after the other.
            always: units whose weights stay gathered while those of others come and go.
            device: device of this rank.
            together: units in turn that are recomputed together.
        """
        units = [_group(module) for module in (*in_turn, *always)]
        sizes = [sum(_aligned(_nbytes(parameter)) for parameter in unit.fsdp_params) for unit in units]
        slots, slot_bytes = num_slots(together), max(sizes[: len(in_turn)], default=0)
        offsets = [index % slots * slot_bytes for index in range(len(in_turn))]
        end = min(slots, len(in_turn)) * slot_bytes
        for size in sizes[len(in_turn) :]:
            offsets.append(end)
            end += size
        self._counters = end
        num_bytes = self.num_bytes(sizes[: len(in_turn)], sizes[len(in_turn) :], self._collectives.size, slots)
        self._memory = self._collectives.memory.allocate(num_bytes)
        found = {offset: _Slot(offset) for offset in offsets}
        for unit, offset in zip(units, offsets, strict=True):
            unit.__class__ = CopyEngineParamGroup
            assert isinstance(unit, CopyEngineParamGroup)
            unit.exchange, unit.slot = self, found[offset]
            self._place(unit, self._memory)

    @staticmethod
    def num_bytes(in_turn: Sequence[int], always: Sequence[int], ranks: int, slots: int) -> int:
        """Return the bytes of memory of each rank for units of these sizes: the weights, then two counters per rank."""
        return min(slots, len(in_turn)) * max(in_turn, default=0) + sum(always) + 2 * ranks * COUNTER_BYTES

    def _place(self, unit: CopyEngineParamGroup, memory: Memory) -> None:
        """Give the gathered parameters of a unit their memory."""
        unit.places = [[] for _ in memory.of_rank]
        offset = unit.slot.offset
        for parameter in unit.fsdp_params:
            size, dtype = _nbytes(parameter), parameter.sharded_param.dtype
            for rank, whole in enumerate(memory.of_rank):
                rows = whole[offset : offset + size].view(dtype).view(len(memory.of_rank), -1)
                unit.places[rank].append(rows[memory.rank])
            # `.data`: what is written there is no in-place change of what autograd has saved
            own = memory.of_rank[memory.rank].data[offset : offset + size].view(dtype).view(parameter._orig_size)
            parameter._unsharded_param = nn.Parameter(own.data, requires_grad=parameter.sharded_param.requires_grad)
            parameter.free_unsharded_param = lambda: None
            offset += _aligned(size)

    def gather(self, unit: CopyEngineParamGroup) -> Any:
        """Write this rank's rows of the weights into the memory of every rank, once the slot is free on all.

        Returns:
            The event after which those of all ranks have arrived.
        """
        memory = self._memory
        assert memory is not None
        self._gathers += 1
        number, size = self._gathers, len(memory.of_rank)
        others = [(memory.rank + step) % size for step in range(1, size)]
        rows = [parameter._sharded_param_data for parameter in unit.fsdp_params]
        stream: Any = unit.comm_ctx.get_all_gather_streams(False, unit._training_state)[1]
        with unit.device_handle.stream(stream), torch.no_grad():
            if unit.slot.released is not None:
                stream.wait_event(unit.slot.released)
            memory.write(others, self._free(memory.rank), number)
            memory.wait([self._free(rank) for rank in others], number)
            for rank in others:
                for place, values in zip(unit.places[rank], rows, strict=True):
                    place.copy_(values, non_blocking=True)
            memory.write(others, self._arrived(memory.rank), number)
            torch._foreach_copy_(unit.places[memory.rank], rows)
            memory.wait([self._arrived(rank) for rank in others], number)
            return stream.record_event()

    @torch.no_grad()
    def reduce(
        self, unit: CopyEngineParamGroup, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
    ) -> None:
        """Sum gradients over the ranks, and give this rank's rows to the optimizer."""
        assert self.optimizer is not None
        stream, current = unit.comm_ctx.reduce_scatter_stream, unit.device_handle.current_stream()
        stream.wait_stream(current)
        with unit.device_handle.stream(stream):
            sums = self._collectives.reduce_scatter(gradients, gradients[0].dtype)
            self.optimizer.add_gradients(parameters, sums)
            self._held.append((stream.record_event(), gradients))
        if len(self._held) > HELD:  # what is computed next may use their memory
            current.wait_event(self._held.popleft()[0])

    def wait(self, device: torch.device) -> None:
        """Make the current stream wait for all sums."""
        if self._held:
            torch.get_device_module(device).current_stream().wait_event(self._held[-1][0])
            self._held.clear()

    def _free(self, rank: int) -> int:
        """Return the offset of the counter of gathers for which that rank's slot is free."""
        return self._counters + 2 * rank * COUNTER_BYTES

    def _arrived(self, rank: int) -> int:
        """Return the offset of the counter of gathers for which that rank's rows are in the memory of this one."""
        return self._free(rank) + COUNTER_BYTES


@contextmanager
def whole_weights(module: FSDPModule) -> Iterator[None]:
    """Context in which the modules of a unit have its whole weights, whether or not these have been gathered.

    Raises:
        UserError: the memory of the weights is not fixed, as the ranks do not divide the rows of some.
    """
    group = _group(module)
    if not isinstance(group, CopyEngineParamGroup):
        raise UserError(
            f"`model.enable_cuda_graph`: {group._module_fqn} has weights whose rows the ranks do not divide, so that "
            "FSDP gathers them into memory that changes; use model.enable_cuda_graph=False"
        )
    if group.is_unsharded:
        yield
        return
    for parameter in group.fsdp_params:
        parameter.to_unsharded()
    try:
        yield
    finally:
        for parameter in group.fsdp_params:
            parameter.to_sharded()


def _group(module: FSDPModule) -> FSDPParamGroup:
    group = module._get_fsdp_state()._fsdp_param_group
    assert group is not None
    return group


def _nbytes(parameter: Any) -> int:
    """Return the bytes of a whole parameter (FSDPParam)."""
    return parameter._orig_size.numel() * parameter.sharded_param.dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
