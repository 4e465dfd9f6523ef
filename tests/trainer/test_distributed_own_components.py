"""Losses, metrics and optimizers of a user's own on any number of ranks, in any layout: as in one process, to 1e-12."""

from __future__ import annotations

import pytest
from distributed_runs import DistributedRuns, difference, records
from run_metrics import metric_rows
from test_distributed_parity import FULL, LIMIT, UNTIED, figures, step
from tiers import full_only

SCHEDULE = {"name": "own_linear", "max_steps": 100, "kwargs": {"floor": 1e-3}}
OWN = {
    "registers": "own_parts",
    "trainer__validation_metrics": ["entropy", "top1"],
    "model__loss": "own_entropy",
    "model__optim": {
        "name": "own_adamw",
        "lr": 1e-2,
        "weight_decay": 0.1,
        "kwargs": {"betas": [0.8, 0.9]},
        "sched": SCHEDULE,
    },
    **UNTIED,
}
PLAIN = {
    "registers": "own_parts",
    "model__optim": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "betas": [0.8, 0.9], "sched": SCHEDULE},
    **UNTIED,
}
LAYOUTS = {
    "ddp": (2, {}),
    "uneven": (3, {}),
    "full": (2, FULL),
    "hybrid": (4, FULL | {"model__fsdp_sharding_strategy": "hybrid", "model__fsdp_shard_size": 2}),
    "context": (2, {"model__context_parallel_size": 2}),
    "pipeline": (2, {"model__pipeline_model_parallel_size": 2}),
    "tensor": (2, {"model__tensor_model_parallel_size": 2, "model__loss": None}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def measured(directory):
    (found,) = [row for row in metric_rows(directory) if "val_loss" in row]
    return found


@full_only
def test_they_compute_what_built_in_ones_do(runs):
    own, plain = runs.run("alone-own", **OWN), runs.run("alone-plain", **PLAIN)
    assert difference(step(plain, 3), step(own, 3), "model") <= 1e-11
    assert measured(own)["val_entropy"] == pytest.approx(measured(own)["val_loss"], rel=1e-12)
    assert 0 <= measured(own)["val_top1"] < 1


@full_only
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process(runs, layout):
    size, changes = LAYOUTS[layout]
    alone, together = runs.run("alone-own", **OWN), runs.run(f"own-{layout}", size, **OWN | changes)
    for kind in ("model", "optimizer"):
        assert difference(step(alone, 3), step(together, 3), kind) <= (1e-11 if layout == "tensor" else LIMIT), kind
    for mine, expected in zip(figures(together), figures(alone), strict=True):
        assert mine == pytest.approx(expected, rel=1e-6)
    for name in ("val_loss", "val_entropy", "val_top1"):
        assert measured(together)[name] == pytest.approx(measured(alone)[name], rel=1e-11), name
    assert len(records(together)) == size


@full_only
@pytest.mark.parametrize(("saved", "resumed"), [("full", "ddp"), ("ddp", "full"), ("pipeline", "ddp")])
def test_resumed_on_another_layout(runs, saved, resumed):
    first, then = LAYOUTS[saved], LAYOUTS[resumed]
    start = step(runs.run(f"own-{saved}", first[0], **OWN | first[1]), 3)
    six = {"trainer__max_steps": 6}
    changes = OWN | then[1] | six | {"exp_manager__resume_from_checkpoint": str(start)}
    directory, unbroken = runs.run(f"{saved}-to-{resumed}", then[0], **changes), runs.run("alone-six", **OWN | six)
    for kind in ("model", "optimizer"):
        assert difference(step(unbroken, 6), step(directory, 6), kind) <= LIMIT, kind
