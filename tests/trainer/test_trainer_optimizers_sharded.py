"""Every optimizer over parameters that FSDP2 has cut along their rows equals one over the whole ones, in fp64."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from optimizer_cases import OPTIMIZER_FACTORIES, WIDTH, Net, backward
from tiers import full_only
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from stoker.trainer.optim.parameter_sharding import ParameterSharding
from stoker.trainer.utils.local_shard import local_shard

RANKS = 2


class CutNet(Net):
    """With weights of 7 rows, which two ranks share unevenly, and of 1 row, of which one rank has none."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        return super().forward(ids) * self.gate(self.token_embedding(ids))


def sum_over_shards(tensor):
    dist.all_reduce(tensor)
    return tensor


def gather_rows(local, rows):
    size = -(-rows // RANKS)
    padded = local.new_zeros(size, *local.shape[1:])
    padded[: len(local)] = local
    chunks = [torch.empty_like(padded) for _ in range(RANKS)]
    dist.all_gather(chunks, padded)
    return torch.cat(chunks)[:rows]


def gradient(net):
    found = net.token_embedding.weight.grad
    assert found is not None
    return found


def check(kind):
    torch.manual_seed(0)
    whole = CutNet().double()
    cut = copy.deepcopy(whole)
    fully_shard(cut, mesh=init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicate", "shard")))
    alone = OPTIMIZER_FACTORIES[kind](whole.named_parameters(), clip_norm=0.3)
    sharding = ParameterSharding(sum_over_shards=sum_over_shards, gather_rows=gather_rows)
    together = OPTIMIZER_FACTORIES[kind](cut.named_parameters(), clip_norm=0.3, sharding=sharding)
    for step in range(4):
        backward(whole, step)
        backward(cut, step)
        if step == 2 and dist.get_rank() == 0:  # in one row of one rank: all must leave the step out
            local_shard(gradient(cut)).local[0, 0] = float("nan")
        if step == 2:
            gradient(whole)[0, 0] = float("nan")
        alone.step()
        together.step()
        torch.testing.assert_close(together.grad_norm, alone.grad_norm, rtol=1e-12, atol=0, equal_nan=True)
    for name, parameter in cut.named_parameters():
        mine = local_shard(parameter)
        expected = whole.get_parameter(name).detach()[mine.rows[0].first : mine.rows[0].first + len(mine.local)]
        torch.testing.assert_close(mine.local, expected, rtol=1e-12, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")
    expected = alone.local_shards()
    for name, piece in together.local_shards().items():
        assert piece.shape == expected[name].shape, name
        rows = expected[name].local[piece.rows[0].first : piece.rows[0].first + len(piece.local)]
        torch.testing.assert_close(piece.local, rows, rtol=1e-11, atol=1e-16, msg=lambda m, n=name: f"{n}: {m}")
        assert piece.num_replicas == (RANKS if together.is_replicated(name.rpartition(".")[2], (2, 2)) else 1), name


def worker(rank, folder):
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=10))
    for kind in OPTIMIZER_FACTORIES:
        check(kind)
    dist.destroy_process_group()


def two_ranks(folder):
    start_processes(worker, (folder,), nprocs=RANKS, start_method="fork")


@full_only
def test_rows_on_two_ranks_equal_one_rank(tmp_path, forks):
    forks.call(__file__, "two_ranks", str(tmp_path))
