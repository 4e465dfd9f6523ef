"""Entry point of a rank started by torchrun or srun, one process per device."""

from __future__ import annotations

from torch._C._distributed_c10d import TCPStore

from ..config.run_config import RunConfig
from ..distributed.placement import Placement
from ..distributed.process_group import join, shutdown_distributed
from ..train import run_training
from ..utils.environment import has_rendezvous


def train(config: RunConfig, placement: Placement) -> int:
    """Join the process group and train; return the exit code."""
    timeout = config.root.trainer.process_timeout
    store = None
    if not has_rendezvous():  # srun sets ranks but no rendezvous
        assert placement.address is not None
        host, port = placement.address
        store = TCPStore(host, port, placement.world_size, is_master=placement.rank == 0)
    ranks = join(placement.rank or 0, placement.world_size, placement.local_rank, store=store, timeout=timeout)
    result = run_training(config, ranks)
    ranks.barrier()
    shutdown_distributed()
    return result.exit_code
