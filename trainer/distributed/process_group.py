"""The processes of a run and what they say to each other besides gradients: small, rare messages.

Text travels as bytes in tensors (JSON where it has structure): torch's object collectives would pickle it.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ..utils.errors import UserError


@dataclass
class Ranks:
    """The place of this process in a run; the default is a run of one process.

    Attributes:
        rank: of this process, 0 to world_size - 1.
        world_size: processes in the run.
        local_rank: of this process on its machine, which is the index of its device.
        timeout: how long a process waits for another; None: torch's own.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    timeout: timedelta | None = None
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    """Where messages go; None: the group of all."""
    _pending: tuple[Any, Tensor] | None = field(default=None, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints for all."""
        return self.rank == 0

    def apart(self) -> Ranks:
        """The same processes with a channel of their own for text, for a thread beside training."""
        group: Any = dist.new_group(backend="gloo", timeout=self.timeout) if self.world_size > 1 else None
        return Ranks(self.rank, self.world_size, self.local_rank, self.timeout, group)

    def barrier(self) -> None:
        """Wait for all processes."""
        self.gather("")

    def gather(self, text: str) -> list[str]:
        """The texts of all processes, by rank."""
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

    def from_first(self, text: str = "") -> str:
        """What the first process passes here."""
        return self.gather(text if self.is_first else "")[0]

    def agree(self, flags: int) -> int:
        """Bitwise or of the flags that all processes passed in their call before this one.

        The answer comes one call late, so that nobody waits for a message; 0 at the first call.
        """
        if self.world_size == 1:
            return flags
        answer = 0
        if self._pending is not None:
            work, tensor = self._pending
            work.wait()
            answer = int(tensor)
        tensor = torch.tensor(flags, dtype=torch.int64)
        self._pending = dist.all_reduce(tensor, op=dist.ReduceOp.BOR, async_op=True), tensor
        return answer

    def agree_now(self, flags: int) -> int:
        """Bitwise or of the flags of all processes; all wait for the answer."""
        return reduce(or_, map(int, self.gather(str(int(flags)))))

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all processes, in place; returns it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def raise_together(self, error: UserError | None) -> None:
        """Raise on every process what any of them has found, so that none waits for one that is gone.

        Raises:
            UserError: the first rank's error that there is; of another rank than the first, it names the rank.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return
        found = self.gather("" if error is None else json.dumps([error.lines, error.exit_code]))
        for rank, text in enumerate(found):
            if text:
                lines, code = json.loads(text)
                if rank:
                    lines[0] = f"rank {rank}: {lines[0]}"
                raise UserError(lines, code)


def join(rank: int, world_size: int, local_rank: int, *, store: Store | None, timeout: float) -> Ranks:
    """Meet the other processes: gloo between hosts' memories, NCCL between GPUs.

    Args:
        rank: of this process.
        world_size: processes in the run.
        local_rank: on this machine.
        store: where the processes find each other; None: where MASTER_ADDR and MASTER_PORT say (torchrun's).
        timeout: seconds after which a process that waits for another gives up.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    return Ranks(rank, world_size, local_rank, limit)


def leave() -> None:
    """End the connection to the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def describe_process(ranks: Ranks, device: torch.device, digest: str) -> dict[str, Any]:
    """What a run's record says of this process."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "rank": ranks.rank,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "device": f"{device} ({name})",
        "configuration": digest,
    }
