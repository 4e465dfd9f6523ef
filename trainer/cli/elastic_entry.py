"""One rank of a run whose processes torchrun or srun started, one for each device."""

from __future__ import annotations

from torch._C._distributed_c10d import TCPStore

from ..config.run_config import RunConfig
from ..distributed.placement import Placement
from ..distributed.process_group import join, leave
from ..train import run_training
from ..utils.environment import has_rendezvous


def train(config: RunConfig, placement: Placement) -> int:
    """Meet the other processes and train; returns the exit code."""
    timeout = config.root.trainer.process_timeout
    store = None
    if not has_rendezvous():  # srun gives ranks, and no place to meet that is set up already
        assert placement.address is not None
        host, port = placement.address
        store = TCPStore(host, port, placement.world_size, is_master=placement.rank == 0)
    ranks = join(placement.rank or 0, placement.world_size, placement.local_rank, store=store, timeout=timeout)
    result = run_training(config, ranks)
    ranks.barrier()
    leave()
    return result.exit_code
