"""Ranks of a run and small collectives other than gradients.

Text is sent as bytes in tensors (structured data as JSON), because torch's object collectives use pickle.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, reduce
from itertools import count
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ..device.choose_device import device_name
from ..utils.errors import EXIT_FAILURE, UserError

# called so since torch 2.13, under which their older names warn
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_runs = count()
_own_groups: list[Any] = []  # the default group of a run that goes on or has failed


@cache
def _launcher_store(rank: int, world_size: int, address: tuple[str, int] | None) -> Store:
    if address is None:
        return next(rendezvous("env://", rank, world_size))[0]
    return TCPStore(*address, world_size, is_master=rank == 0)


def open_store(rank: int, world_size: int, address: tuple[str, int] | None = None) -> Store:
    """Open the store of the next run of ranks that torchrun or srun has started.

    The store of a script lasts for all its runs, whose process groups torch gives the same names: without a prefix of
    its own a run would read the addresses of groups that have ended, and wait for ever.

    Args:
        address: of rank 0; None uses MASTER_ADDR and MASTER_PORT, as set by torchrun.
    """
    return PrefixStore(f"run-{next(_runs)}", _launcher_store(rank, world_size, address))


def _exit_hung(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILURE)


@dataclass
class DistributedContext:
    """Rank of this process among all, or among those of one group, and collectives; the default is a single process.

    Attributes:
        rank: rank among them, 0 to world_size - 1.
        world_size: number of ranks.
        local_rank: rank on this node, the index of the device.
        timeout: timeout of collectives; None for torch's default.
        group: process group; None for the default group.
        report_step: called with the completed steps after each.
        end_hung: called with a line to end this process, which hangs.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    timeout: timedelta | None = None
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    report_step: Callable[[int], None] = field(default=lambda step: None, repr=False)
    end_hung: Callable[[str], None] = field(default=_exit_hung, repr=False)
    _pending: tuple[Any, Tensor] | None = field(default=None, repr=False)

    @property
    def is_rank_zero(self) -> bool:
        """True on rank 0, which writes and prints for all ranks; not to be asked of a group."""
        return self.rank == 0

    def with_own_group(self) -> DistributedContext:
        """Return the same ranks with a separate gloo process group, for use from another thread."""
        group: Any = dist.new_group(backend="gloo", timeout=self.timeout) if self.world_size > 1 else None
        return DistributedContext(self.rank, self.world_size, self.local_rank, self.timeout, group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather_text("")

    def all_gather_text(self, text: str) -> list[str]:
        """All-gather a string; return the strings by rank."""
        if self.world_size == 1:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        lengths = [torch.zeros((), dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor(len(data)), group=self.group)
        longest = int(torch.stack(lengths).max())
        padded = torch.cat([data, data.new_zeros(longest - len(data))])
        rows = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(rows, padded, group=self.group)
        return [bytes(row[: int(n) - 1].tolist()).decode() for row, n in zip(rows, lengths, strict=True)]

    def broadcast_text(self, text: str = "") -> str:
        """Broadcast a string from rank 0."""
        return self.all_gather_text(text if self.is_rank_zero else "")[0]

    def all_reduce_flags_async(self, flags: int) -> int:
        """All-reduce flags by bitwise or, asynchronously: return the result of the previous call.

        The result is one call late, so that no rank waits; 0 at the first call.
        """
        if self.world_size == 1:
            return flags
        result = 0
        if self._pending is not None:
            work, tensor = self._pending
            work.wait()
            result = int(tensor)
        tensor = torch.tensor(flags, dtype=torch.int64)
        self._pending = dist.all_reduce(tensor, op=dist.ReduceOp.BOR, group=self.group, async_op=True), tensor
        return result

    def all_reduce_flags(self, flags: int) -> int:
        """All-reduce flags by bitwise or, synchronously."""
        return reduce(or_, map(int, self.all_gather_text(str(int(flags)))))

    def all_reduce_(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce a tensor over the ranks, in place, by sum unless `op` says otherwise; return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Context at whose end a UserError of any rank is raised on all ranks, so that none waits for one that exited.

        Raises:
            UserError: the error of the lowest failed rank, prefixed with the rank unless that is 0.
        """
        if self.world_size == 1:
            yield
            return
        error = None
        try:
            yield
        except UserError as caught:
            error = caught
        found = self.all_gather_text("" if error is None else json.dumps([error.lines, error.exit_code]))
        for rank, text in enumerate(found):
            if text:
                lines, code = json.loads(text)
                if rank:
                    lines[0] = f"rank {rank}: {lines[0]}"
                raise UserError(lines, code)


def init_distributed(
    rank: int, world_size: int, local_rank: int, *, store: Store | None, timeout: float
) -> DistributedContext:
    """Initialize the process group: gloo for CPU tensors, NCCL for CUDA tensors; end that of a run that has failed.

    Args:
        store: rendezvous store; None uses torchrun's.
        timeout: timeout of collectives in seconds.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    if store is None:
        store = open_store(rank, world_size)
        store.set_timeout(limit)
    if dist.is_initialized() and dist.group.WORLD in _own_groups:
        shutdown_distributed()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    _own_groups[:] = [dist.group.WORLD]
    return DistributedContext(rank, world_size, local_rank, limit)


def shutdown_distributed() -> None:
    """Destroy the process group."""
    if dist.is_initialized():
        _own_groups.clear()
        dist.destroy_process_group()


def describe_process(ranks: DistributedContext, device: torch.device, digest: str) -> dict[str, Any]:
    """Describe this process for the run's manifest."""
    return {
        "rank": ranks.rank,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": f"{device} ({device_name(device)})",
        "configuration": digest,
    }
