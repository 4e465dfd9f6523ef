"""Runs of several ranks on one GPU, which communicate through host memory (`host_group`); each rank is a process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn


def losses(directory: Path, size: int, overrides: list[str]) -> list[float]:
    """Train on `size` ranks; return the losses of the steps, and of the validation at the end."""
    store = f"{directory}.store"
    spawn(_rank, (size, overrides, str(directory), store), nprocs=size)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("val_loss")) for row in rows]


def _rank(rank: int, size: int, overrides: list[str], directory: str, store: str) -> None:
    import host_group

    from stoker.trainer.config.load import load_run_config
    from stoker.trainer.distributed import mesh
    from stoker.trainer.distributed.process_group import DistributedContext
    from stoker.trainer.train import run_training

    torch.cuda.set_device(0)
    ranks = DistributedContext()
    if size > 1:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        host_group.register()
        dist.init_process_group("host", store=FileStore(store, size), rank=rank, world_size=size)
        ranks = DistributedContext(rank, size, 0)
        mesh.devices_share_memory = lambda devices: True  # one device does with itself
        _share_memory_through_gloo()
    config = load_run_config(None, None, [*overrides, f"exp_manager.explicit_log_dir={directory}"])
    result = run_training(config, ranks)
    assert result.exit_code == 0


def _share_memory_through_gloo() -> None:
    """Let products that overlap with communication find each other's memory through gloo groups of the same ranks."""
    from stoker.models.parallel import collectives, overlap
    from stoker.trainer.distributed import mesh

    named, gloo = mesh._group_name, {}

    def name_groups(groups: Any, ranks: Any) -> str:
        name = named(groups, ranks)
        created: Any = {members: dist.new_group(list(members), backend="gloo") for members in groups}
        gloo[name] = next(group.group_name for members, group in created.items() if ranks.rank in members)
        return name

    mesh._group_name = name_groups
    collectives.gather_and_multiply = lambda rows, matrix, group: overlap.gather_and_multiply(rows, matrix, gloo[group])
    collectives.multiply_and_scatter = lambda rows, matrix, group: overlap.multiply_and_scatter(
        rows, matrix, gloo[group]
    )
