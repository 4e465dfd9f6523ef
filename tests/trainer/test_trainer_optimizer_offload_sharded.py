"""Optimizer state in host memory where two ranks share the parameters: the same bits as on the device."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from optimizer_cases import OPTIMIZER_FACTORIES, WideNet, backward
from stream_copies import StreamCopies
from tiers import full_only
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from stoker.trainer.config.parameter_layout import DataParallelLayout
from stoker.trainer.distributed.ddp import ReplicatedDataParallel
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.utils.local_shard import local_shard, local_tensor

RANKS = 2
BUCKET = 8 * 1024


class CutNet(WideNet):
    """With weights of 7 rows, which two ranks share unevenly, and of 1 row, of which one rank has none."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 1)

    def forward(self, ids):
        return super().forward(ids) * self.gate(self.token_embedding(ids))


def zero1_sharding():
    layout = DataParallelLayout("zero1", 1, RANKS, replicates_weights=True)
    ranks = DistributedContext(dist.get_rank(), RANKS)
    return ReplicatedDataParallel(layout, torch.device("cpu"), None, ranks).parameter_sharding


def check(kind, layout, dtype):
    """The same steps with and without, on rows that FSDP2 has cut (`fsdp`) or that this rank updates (`zero1`)."""
    torch.manual_seed(0)
    models = [CutNet().to(dtype)]
    models.append(copy.deepcopy(models[0]))
    sharding = zero1_sharding()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicate", "shard"))
        for model in models:
            fully_shard(model, mesh=mesh)
        sharding = replace(sharding, shard_of=local_shard, local_rows=lambda gradient, part: gradient)
    plain, ours = (
        OPTIMIZER_FACTORIES[kind](
            model.named_parameters(), clip_norm=0.3, main_weights=dtype != torch.float32, sharding=sharding, **host
        )
        for model, host in zip(models, ({}, {"host": StreamCopies(), "bucket_bytes": BUCKET}), strict=True)
    )
    for step in range(3):
        for model, optimizer in zip(models, (plain, ours), strict=True):
            backward(model, step)
            if step == 1 and dist.get_rank() == 0:
                gradient = model.token_embedding.weight.grad
                assert gradient is not None
                local_tensor(gradient)[0, 0] = float("nan")
            optimizer.step()
    expected = plain.local_shards()
    for name, piece in ours.local_shards().items():
        assert torch.equal(piece.local, expected[name].local), (kind, layout, name)
        assert (piece.rows, piece.num_rows) == (expected[name].rows, expected[name].num_rows)
    for mine, whole in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(local_tensor(mine), local_tensor(whole)), (kind, layout)
    assert ours.step_count == plain.step_count == 2
    assert ours.host_state is not None
    assert len(ours.host_state.plan.buckets) > 4


def check_buckets(kind):
    """Rows are shared unevenly, but a bucket has the same parameters on every rank: sums go over ranks there."""
    model = CutNet()
    sharding = zero1_sharding()
    for size in range(100, 1500, 100):
        optimizer = OPTIMIZER_FACTORIES[kind](
            model.named_parameters(), sharding=sharding, host=StreamCopies(), bucket_bytes=size
        )
        assert optimizer.host_state is not None
        mine = [[stretch.index for stretch in bucket.slices] for bucket in optimizer.host_state.plan.buckets]
        found: list[object] = [None] * RANKS
        dist.all_gather_object(found, mine)
        assert found == [mine] * RANKS, size


def worker(rank, folder):
    torch.set_num_threads(1)
    store = FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(minutes=10))
    for kind in OPTIMIZER_FACTORIES:
        check(kind, "fsdp", torch.bfloat16)
        check(kind, "zero1", torch.bfloat16)
    check("muon", "fsdp", torch.float32)  # no main weights
    check_buckets("scaled")
    check_buckets("adafactor")
    dist.destroy_process_group()


@full_only
def test_rows_on_two_ranks_have_the_same_bits_with_their_state_on_the_host(tmp_path):
    spawn(worker, (str(tmp_path),), nprocs=RANKS)
