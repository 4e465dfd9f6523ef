"""Ranks of a run: which process gets which, and one signal that stops all of them; real commands are in tests/full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from distributed_runs import DistributedRuns, records
from forked_ranks import fork_ranks
from tiny_run import tiny_config, tiny_document
from torch._C._distributed_c10d import FileStore, TCPStore

from stoker.trainer.config.load import config_from_document
from stoker.trainer.config.schema.trainer_and_data import TrainerBlock
from stoker.trainer.distributed import launcher
from stoker.trainer.distributed.placement import Placement, resolve_placement
from stoker.trainer.distributed.process_group import init_distributed, shutdown_distributed
from stoker.trainer.lightning.lightning_trainer import MeshStrategy
from stoker.trainer.train import train_in_group
from stoker.trainer.utils.environment import worker_environment
from stoker.trainer.utils.errors import UserError


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_lightning_reduces_and_broadcasts_as_asked(tmp_path):
    operations = ("mean", "avg", "sum", "max", "min", dist.ReduceOp.MAX, dist.ReduceOp.AVG, None)

    def on_rank(rank: int) -> list[Any]:
        ranks = init_distributed(rank, 2, rank, store=FileStore(str(tmp_path / "store"), 2), timeout=600)
        strategy = MeshStrategy(torch.device("cpu"), ranks)
        reduced = [float(strategy.reduce(torch.tensor(1.0 + rank), reduce_op=each)) for each in operations]
        found = [*reduced, strategy.reduce("text"), strategy.broadcast({"stop": [rank, None]}, src=1)]
        shutdown_distributed()
        return found

    expected = [1.5, 1.5, 3.0, 2.0, 1.0, 2.0, 1.5, 3.0, "text", {"stop": [1, None]}]
    assert fork_ranks(str(tmp_path), 2, on_rank) == [expected, expected]


def test_callbacks_of_one_rank_change_no_collectives_of_the_others(tmp_path):
    """Weights wait for callbacks, and on a CPU are gathered when they are waited for."""
    zero1 = {"model__optim__name": "distributed_fused_adam", "trainer__devices": 2, "trainer__process_timeout": 20}

    def on_rank(rank: int) -> int:
        config = tiny_config(tmp_path / "run", trainer__max_steps=2, trainer__limit_val_batches=0, **zero1)
        store, callbacks = FileStore(str(tmp_path / "store"), 2), [pl.Callback()] if rank == 1 else []
        return train_in_group(config, rank, 2, rank, store, callbacks=callbacks).step

    assert fork_ranks(str(tmp_path), 2, on_rank) == [2, 2]


def test_a_callback_of_one_rank_that_cannot_act_is_refused_by_all(tmp_path):
    def on_rank(rank: int) -> str:
        config = tiny_config(tmp_path / "run", trainer__devices=2, trainer__process_timeout=20)
        store, twice = FileStore(str(tmp_path / "store"), 2), [pl.Callback()] * 2 * rank
        with pytest.raises(UserError) as caught:
            train_in_group(config, rank, 2, rank, store, callbacks=twice)
        return caught.value.lines[0]

    lines = fork_ranks(str(tmp_path), 2, on_rank)
    assert lines == ["rank 1: the callback Callback is given twice"] * 2


def test_runs_of_a_script_under_torchrun_do_not_meet_groups_that_have_ended(tmp_path, monkeypatch):
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for name, value in (
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", store.port),
        ("TORCHELASTIC_USE_AGENT_STORE", True),
    ):
        monkeypatch.setenv(name, str(value))

    def on_rank(rank: int) -> list[float]:
        sums = []
        for _ in range(2):
            time.sleep(rank / 2)  # the other one looks for its address meanwhile
            init_distributed(rank, 2, rank, store=None, timeout=20)
            for group in (dist.new_group([0, 1]), None):
                dist.all_reduce(total := torch.tensor(1.0 + rank), group=group)
                sums.append(float(total))
        shutdown_distributed()  # not of the first run, as if it had failed
        return sums

    assert fork_ranks(str(tmp_path), 2, on_rank) == [[3.0] * 4] * 2


def test_sigterm_to_one_rank_stops_all_after_the_same_step(tmp_path, forks):
    """Without a launcher; what that does with a signal is tested below."""
    keys = {"trainer__max_steps": 1000, "trainer__val_check_interval": 1000, "trainer__limit_val_batches": 0}
    run = DistributedRuns(tmp_path, forks).run("run", 2, told=[1, 3], model__fsdp=True, **keys)
    (steps,) = {len(record["steps"]) for record in records(run)}
    assert 3 <= steps < 1000
    assert checkpoints(run) == [f"step-{steps}"]
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == steps


def test_a_signal_before_the_first_process_is_heard(tmp_path, monkeypatch):
    """A worker that is started after it gets it too."""
    popen = subprocess.Popen

    def interrupted(*command: Any, **settings: Any) -> Any:
        if settings["env"]["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return popen(*command, **settings)

    monkeypatch.setattr(launcher.subprocess, "Popen", interrupted)
    config = config_from_document(tiny_document(tmp_path, trainer__devices=2))
    assert launcher.launch(config, Placement(world_size=2, ranks_per_node=2)) == 143
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "names", [("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")]
)
def test_ranks_that_are_dealt_out_over_the_machines_are_refused(names):
    """Two of a machine would take the same GPU."""
    trainer = TrainerBlock.model_validate({"devices": 2, "num_nodes": 2})
    meeting = {"MASTER_ADDR": "first", "MASTER_PORT": "29400"}
    for rank in range(4):
        found = resolve_placement(trainer, meeting | dict(zip(names, (str(rank), "4", str(rank % 2)), strict=True)))
        assert (found.node_rank, found.local_rank) == (rank // 2, rank % 2)
    with pytest.raises(UserError, match="must be number 0: fill one machine after the other"):
        resolve_placement(trainer, meeting | dict(zip(names, ("2", "4", "1"), strict=True)))


BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}
"""Variables of SLURM in a batch script, where nothing has started a process for each device."""


def test_a_batch_script_without_srun_starts_its_processes_itself():
    assert resolve_placement(TrainerBlock.model_validate({"devices": 4}), BATCH) == Placement(4, 4)
    with pytest.raises(UserError, match="on the first machine alone; start stoker with srun"):
        resolve_placement(TrainerBlock.model_validate({"devices": 2, "num_nodes": 2}), BATCH)


@pytest.mark.parametrize(("tasks", "is_refused"), [("1", False), ("2", False), ("3", True), ("8", True)])
def test_srun_starts_one_process_for_each_device_or_machine(tasks, is_refused):
    """Otherwise each of them would start all processes."""
    trainer = TrainerBlock.model_validate({"devices": 2, "num_nodes": 2})
    environ = {"MASTER_ADDR": "first", "MASTER_PORT": "29400", **BATCH, "SLURM_STEP_NUM_TASKS": tasks}
    if is_refused:
        with pytest.raises(UserError, match=f"make 4 processes, but srun started {tasks}"):
            resolve_placement(trainer, environ)
    else:
        assert resolve_placement(trainer, environ).rank is None


def test_a_worker_has_env_vars_before_it_imports_anything():
    place: Any = {"rank": 1, "world_size": 2, "local_rank": 1, "ranks_per_node": 2, "address": ("first", 1)}
    found = worker_environment(**place, env_vars={"OMP_NUM_THREADS": 3, "SWITCH": True, "RANK": 7})
    assert (found["OMP_NUM_THREADS"], found["SWITCH"], found["RANK"]) == ("3", "1", "1")
