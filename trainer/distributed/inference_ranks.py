"""Ranks of `stoker generate` and `stoker evaluate` under torchrun: all share one model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

import torch

from ...models.parallel.layout import ParallelLayout
from ...models.parallel.stages import PipelineSplit
from ..utils.environment import snapshot
from ..utils.errors import UserError
from .mesh import Mesh, build_mesh
from .placement import torchrun_ranks
from .process_group import init_distributed, shutdown_distributed

_TIMEOUT_SECONDS = 1800.0


@contextmanager
def inference_ranks(stages: int = 1) -> Iterator[Mesh | None]:
    """Context in which this process is one of the ranks that torchrun has started, of which the first one prints.

    Args:
        stages: pipeline stages that share the layers; the ranks of each are tensor-parallel ranks.

    Yields:
        The ranks that share the model; None for one process.

    Raises:
        UserError: torchrun's variables are wrong, the ranks do not form so many stages, or there are not as many GPUs.
    """
    rank, size, local_rank = torchrun_ranks(snapshot())
    if size % stages:
        raise UserError(
            f"--pipeline-parallel {stages} must divide the number of processes ({size}); start them with "
            f"torchrun --nproc-per-node {stages} -m stoker"
        )
    if size == 1:
        yield None
        return
    gpus = torch.cuda.device_count()
    if 0 < gpus <= local_rank:
        raise UserError(f"torchrun started more processes than the {gpus} GPUs here; use --nproc-per-node {gpus}")
    ranks = init_distributed(rank, size, local_rank, store=None, timeout=_TIMEOUT_SECONDS)
    layout = ParallelLayout(tensor=size // stages, pipeline=stages)
    mesh = build_mesh(layout, None, ranks, PipelineSplit(ranks=stages) if stages > 1 else None)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere) if rank else nullcontext():
        try:
            yield mesh
        finally:
            shutdown_distributed()
