"""Whole runs that offload: the same bits with and without, for one process and for several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deferred_copies import install
from distributed_runs import DistributedRuns, difference
from fork_server import ForkServer
from run_metrics import logged
from tiers import extra, full_only
from tiny_run import final_hashes, tiny_config

from stoker.models.memory.offload_weights import WeightOffload, find_weight_offloads
from stoker.trainer.train import run_training

RUN: dict[str, Any] = {
    "model__num_layers": 4,
    "model__global_batch_size": 6,
    "model__compile": False,
    "trainer__log_every_n_steps": 1,
    "exp_manager__ema": {"enable": True, "decay": 0.5},
}
OFFLOADS = {"model__cpu_offloading": True, "model__cpu_offloading_num_layers": 2}


@pytest.mark.parametrize("precision", ["32", *extra("bf16")])
def test_a_run_is_the_same_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Several micro batches, an average of the weights, validations and checkpoints, and both ways to go on."""
    changes = {**RUN, "trainer__precision": precision}
    run_training(tiny_config(tmp_path / "plain", **changes))
    install(monkeypatch)
    ours = run_training(tiny_config(tmp_path / "ours", **changes, **OFFLOADS))
    assert find_weight_offloads(ours.model)
    assert logged(tmp_path / "plain", "loss", "val_loss") == logged(tmp_path / "ours", "loss", "val_loss")
    assert final_hashes(tmp_path / "plain", 8) == final_hashes(tmp_path / "ours", 8)
    longer = {"trainer__max_steps": 10}
    run_training(tiny_config(tmp_path / "plain", **changes, **OFFLOADS, **longer))
    run_training(tiny_config(tmp_path / "ours", **changes, **longer))
    assert final_hashes(tmp_path / "plain", 10) == final_hashes(tmp_path / "ours", 10)


def test_a_run_says_what_it_offloads_and_updates_weights_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    brought: list[WeightOffload] = []
    monkeypatch.setattr(WeightOffload, "to_device", lambda offload: brought.append(offload))
    run_training(tiny_config(tmp_path, **RUN, **OFFLOADS, trainer__max_steps=2))
    assert len(brought) == 2  # before each update, for weights that no gradient has gone through
    said = capsys.readouterr().out
    assert "CPU offloading of the first 2 layers: activations and weights (" in said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> DistributedRuns:
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


@full_only
@pytest.mark.parametrize(
    ("layout", "offloads"),
    [
        ({}, OFFLOADS),
        ({"model__optim__name": "distributed_fused_adam"}, OFFLOADS),
        ({"model__fsdp": True, "model__fsdp_sharding_strategy": "grad"}, OFFLOADS),
        ({"model__fsdp": True}, {**OFFLOADS, "model__cpu_offloading_weights": False}),
    ],
    ids=["ddp", "zero1", "grad", "fsdp"],
)
def test_two_ranks_are_the_same_with_and_without(
    runs: DistributedRuns, request: pytest.FixtureRequest, layout: dict[str, Any], offloads: dict[str, Any]
) -> None:
    changes = {"model__num_layers": 3, "trainer__max_steps": 2, "trainer__val_check_interval": 2, **layout}
    name = request.node.callspec.id
    plain = runs.run(f"{name}-plain", 2, **changes)
    ours = runs.run(f"{name}-ours", 2, **changes, **offloads, offloads=True)
    for kind in ("model", "optimizer"):
        assert difference(plain / "checkpoints" / "step-2", ours / "checkpoints" / "step-2", kind) == 0, kind
    assert "CPU offloading of the first" in (ours / "run.log").read_text()
