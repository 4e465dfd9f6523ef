"""Process group of several ranks on one GPU, where NCCL has no groups: communicates through host memory and gloo."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # pyrefly: ignore[missing-module-attribute]
from torch.futures import Future

_REDUCES = {
    dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.AVG: torch.mean, dist.ReduceOp.MAX: torch.amax,
    dist.ReduceOp.MIN: torch.amin,
}  # fmt: skip


_ProcessGroup: Any = dist.ProcessGroup


def _done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return _create_work_from_future(future)


class _Received(dist.Work):
    """Tensor that arrives in host memory."""

    def __init__(self, work: Any, host: Tensor, tensor: Tensor) -> None:
        super().__init__()
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        self._tensor.detach().copy_(self._host)
        return True


class HostGroup(_ProcessGroup):
    """Group for tensors of any device; every operation but `recv` and `send` has ended when it returns."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._sent: deque[list[Tensor]] = deque(maxlen=64)

    def getBackendName(self) -> str:  # noqa: N802
        return "host"

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, (ranks, *shape), on the host."""
        own = tensor.detach().cpu().contiguous()
        raw = own.reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(raw) for _ in range(self.size())]
        self._gloo.allgather([parts], [raw]).wait()
        return torch.stack([part.view(own.dtype).view(own.shape) for part in parts])

    def _reduced(self, tensor: Tensor, op: Any) -> Tensor:
        reduce = next((function for kind, function in _REDUCES.items() if op == kind), None)
        gathered = self._gathered(tensor)
        if reduce is None:  # bitwise or, of flags
            assert op == dist.ReduceOp.BOR, op
            result = gathered[0]
            for other in gathered[1:]:
                result = result | other
            return result
        wide = gathered.float() if gathered.dtype in (torch.bfloat16, torch.float16) else gathered
        return reduce(wide, dim=0).to(tensor.dtype)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            tensor.detach().copy_(self._reduced(tensor, opts.reduceOp if opts else dist.ReduceOp.SUM))
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            tensor.detach().copy_(self._gathered(tensor)[opts.rootRank])
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        self._gathered(torch.zeros(1))
        return _done([])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for parts, own in zip(outputs, inputs, strict=True):
            for part, found in zip(parts, self._gathered(own), strict=True):
                part.detach().copy_(found)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        output.detach().copy_(self._gathered(input).view(output.shape))
        return _done([output])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        whole = self._reduced(input, opts.reduceOp if opts else dist.ReduceOp.SUM)
        output.detach().copy_(whole.reshape(self.size(), -1)[self.rank()].view(output.shape))
        return _done([output])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, own, opts)
        return _done(outputs)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        own = input.detach().cpu().contiguous()
        received = torch.empty(output.shape, dtype=output.dtype)
        self._gloo.alltoall_base(received, own, list(output_sizes), list(input_sizes)).wait()
        output.detach().copy_(received)
        return _done([output])

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        host = [tensor.detach().cpu().contiguous() for tensor in tensors]
        self._sent.append(host)  # gloo reads them until they are received
        return self._gloo.send(host, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _Received(self._gloo.recv([host], rank, tag), host, tensor)

    def _start_coalescing(self, device: torch.device) -> None:
        """Operations that could be one remain several."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return _done([])

    # names since torch 2.13
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base


def register() -> None:
    """Define the backend `host` of `torch.distributed.init_process_group`."""
    dist.Backend.register_backend("host", HostGroup, devices=["cpu", "cuda"])
