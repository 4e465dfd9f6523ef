"""Pipelines in inference: the ranks that share the layers of each stack, through which hidden states pass in turn.

Embeddings, position modules, final norms and the head are on all ranks, which get the last layer's output, so that
whatever calls a stack, a decode loop or a loss, is the same on all of them and the same as in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Relay:
    """The ranks of a pipeline in inference.

    Attributes:
        rank: rank in the pipeline.
        size: ranks of the pipeline, at most as many as a stack has layers.
        group: their process group.
    """

    rank: int
    size: int
    group: Any

    def layers(self, num_layers: int) -> range:
        """Return the numbers of this rank's layers of a stack: consecutive ones, at most one more than others have."""
        return range(self.rank * num_layers // self.size, (self.rank + 1) * num_layers // self.size)

    def receive(self, embedded: Tensor) -> Tensor:
        """Return the input of this rank's layers: the output of the rank before; on the first one `embedded`."""
        if self.rank == 0:
            return embedded
        received = torch.empty_like(embedded, memory_format=torch.contiguous_format)
        dist.recv(received, group=self.group, group_src=self.rank - 1)
        return received

    def share(self, hidden: Tensor) -> Tensor:
        """Pass on the output of this rank's layers; return that of the last rank, on all of them."""
        hidden = hidden.contiguous()
        if self.rank < self.size - 1:
            dist.send(hidden, group=self.group, group_dst=self.rank + 1)
        dist.broadcast(hidden, group=self.group, group_src=self.size - 1)
        return hidden
