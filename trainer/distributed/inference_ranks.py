"""Ranks of `stoker generate` and `stoker evaluate` under torchrun: all share the model, as tensor-parallel ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist

from ...models.parallel.collectives import TensorParallel
from ..utils.environment import snapshot
from ..utils.errors import UserError
from .placement import torchrun_ranks
from .process_group import init_distributed, shutdown_distributed

_TIMEOUT_SECONDS = 1800.0


@contextmanager
def inference_ranks() -> Iterator[TensorParallel | None]:
    """Context in which this process is one of the ranks that torchrun has started, of which the first one prints.

    Yields:
        The ranks that share the model; None for one process.

    Raises:
        UserError: torchrun's variables are wrong, or there are not as many GPUs.
    """
    rank, size, local_rank = torchrun_ranks(snapshot())
    if size == 1:
        yield None
        return
    gpus = torch.cuda.device_count()
    if 0 < gpus <= local_rank:
        raise UserError(f"torchrun started more processes than the {gpus} GPUs here; use --nproc-per-node {gpus}")
    init_distributed(rank, size, local_rank, store=None, timeout=_TIMEOUT_SECONDS)
    group: Any = dist.group.WORLD
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere) if rank else nullcontext():
        try:
            yield TensorParallel(rank, size, group.group_name)
        finally:
            shutdown_distributed()
