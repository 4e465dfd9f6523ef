"""Experts on several ranks, in any layout, train as on one: losses counted once, one bias, the load of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distributed_runs import DistributedRuns, difference, step, tensors
from run_metrics import exact_rows

LIMIT = 1e-12

MOE = {
    "model__num_moe_experts": 4,
    "model__moe_aux_loss_coeff": 0.5,
    "model__moe_z_loss_coeff": 0.25,
    "model__moe_input_jitter_eps": 0.1,
    "model__moe_router_score_function": "sigmoid",
    "model__moe_router_enable_expert_bias": True,
    "model__moe_router_bias_update_rate": 0.01,
    "model__moe_per_layer_logging": True,
    "model__rampup_batch_size": [8, 8, 24],
}
"""Coefficients so large that a loss counted by every rank would be plain to see; and the share changes."""
LAYOUTS = {
    "ddp": {},
    "zero1": {"model__optim__name": "distributed_fused_adam"},
    "full": {"model__fsdp": True},
    "grad": {"model__fsdp": True, "model__fsdp_sharding_strategy": "grad"},
    "hybrid": {"model__fsdp": True, "model__fsdp_sharding_strategy": "hybrid", "model__fsdp_shard_size": 2},
}
OTHERS = {
    "dropping": {"model__moe_expert_capacity_factor": 0.75, "model__moe_token_drop_policy": "position"},
    "recomputed": {"model__moe_layer_recompute": True},
    "muon": {
        "model__optim": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1},
        "model__activation": "swiglu",
        "model__moe_shared_expert_intermediate_size": 40,
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def check_equal(directory: Path, alone: Path, last: int = 3) -> None:
    for kind in ("model", "optimizer"):
        assert difference(step(alone, last), step(directory, last), kind) <= LIMIT, kind
    for mine, expected in zip(exact_rows(directory), exact_rows(alone), strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)
    maps = [json.loads((run / "expert_load.json").read_text()) for run in (directory, alone)]
    assert maps[0] == maps[1]


def test_the_comparison_is_not_empty(runs):
    alone = runs.run("alone", **MOE)
    report = exact_rows(alone)[0]
    assert report["load_cv"] > 0.01
    assert {"moe/load_balancing_loss_layer_0", "moe/z_loss_layer_1"} <= report.keys()
    rows = json.loads((alone / "expert_load.json").read_text())["rows"]
    assert [sum(map(sum, row["tokens"])) for row in rows] == [samples * 16 * 2 * 2 for samples in (8, 8, 16)]
    weights = tensors(step(alone, 3), "model")
    biases = [weight for name, weight in weights.items() if name.endswith("expert_bias")]
    assert len(biases) == 2
    assert all(0.009 < bias.abs().max() < 0.031 for bias in biases)


@pytest.mark.parametrize("layout", ["ddp", "full"])
def test_two_ranks_equal_one_process(runs, layout):
    check_equal(runs.run(f"{layout}-2", 2, **MOE, **LAYOUTS[layout]), runs.run("alone", **MOE))


def test_reports_that_are_finished_after_the_next_step_are_the_same(runs):
    check_equal(runs.run("late-2", 2, late=True, **MOE), runs.run("alone", **MOE))


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 4), ("zero1", 2), ("grad", 4), ("full", 4), ("hybrid", 4)])
def test_every_layout_equals_one_process(runs, layout, ranks):
    check_equal(runs.run(f"{layout}-{ranks}", ranks, **MOE, **LAYOUTS[layout]), runs.run("alone", **MOE))


@pytest.mark.parametrize("layout", ["ddp", "full"])
@pytest.mark.parametrize("kind", OTHERS)
def test_other_keys_equal_one_process(runs, kind, layout):
    changes = MOE | OTHERS[kind]
    directory = runs.run(f"{kind}-{layout}", 2, **changes, **LAYOUTS[layout])
    check_equal(directory, runs.run(f"{kind}-alone", **changes))
    if kind == "dropping":
        assert exact_rows(directory)[0]["dropped_fraction"] > 0.1


def test_a_rank_without_experts_of_its_own_equals_one_process(runs):
    changes = {name: value for name, value in MOE.items() if "rampup" not in name} | OTHERS["muon"]
    check_equal(runs.run("muon-full-3", 3, **changes, **LAYOUTS["full"]), runs.run("muon-3-alone", **changes))


@pytest.mark.parametrize(("saved", "ranks", "resumed", "others"), [("full", 2, "ddp", 1), ("ddp", 1, "full", 4)])
def test_resumed_by_another_number_of_ranks(runs, saved, ranks, resumed, others):
    six = {"trainer__max_steps": 6}
    first = LAYOUTS[saved] if ranks > 1 else {}
    start = step(runs.run(f"saved-{saved}-{ranks}", ranks, **MOE, **first), 3)
    directory = runs.run(
        f"{saved}-{ranks}-to-{resumed}-{others}",
        others,
        exp_manager__resume_from_checkpoint=str(start),
        **MOE,
        **(LAYOUTS[resumed] if others > 1 else {}),
        **six,
    )
    unbroken = runs.run("alone-six", **MOE, **six)
    for kind in ("model", "optimizer"):
        assert difference(step(unbroken, 6), step(directory, 6), kind) <= LIMIT, kind
