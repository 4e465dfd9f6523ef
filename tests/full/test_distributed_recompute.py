"""Recomputation on two ranks: the same bits as without, whether weights are replicated or cut (FSDP2)."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_runs import DistributedRuns, difference, records, samples_by_step

BASE = {"model__num_layers": 3, "trainer__max_steps": 2, "trainer__val_check_interval": 2}
LAYOUTS = {
    "ddp": {},
    "full": {"model__fsdp": True},
    "grad": {"model__fsdp": True, "model__fsdp_sharding_strategy": "grad"},
}
EXPERTS = {
    "model__num_moe_experts": 4,
    "model__moe_aux_loss_coeff": 0.5,
    "model__moe_input_jitter_eps": 0.1,
    "model__moe_router_score_function": "sigmoid",
    "model__moe_router_enable_expert_bias": True,
}


def full(method: str, number: int) -> dict[str, Any]:
    return {
        "model__activations_checkpoint_granularity": "full",
        "model__activations_checkpoint_method": method,
        "model__activations_checkpoint_num_layers": number,
    }


MODES = {
    "one": full("uniform", 1),
    "two": full("uniform", 2),
    "block": full("block", 2),
    "cheap": {"model__activations_checkpoint_modules": ["norm", "mlp_activation", "core_attention"]},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def check_same(runs: DistributedRuns, layout: str, mode: str, **changes: Any) -> None:
    """Weights and state of the optimizer after two steps, bit for bit."""
    changes = BASE | changes
    name = f"{'-'.join(['experts'] * ('model__num_moe_experts' in changes))}{layout}"
    plain = runs.run(f"{name}-none", 2, **changes, **LAYOUTS[layout])
    ours = runs.run(f"{name}-{mode}", 2, **changes, **LAYOUTS[layout], **MODES[mode])
    for kind in ("model", "optimizer"):
        assert difference(plain / "checkpoints" / "step-2", ours / "checkpoints" / "step-2", kind) == 0, kind
    assert samples_by_step(plain) == samples_by_step(ours)
    assert len(records(ours)) == 2


def test_layers_are_recomputed_alike(runs):
    check_same(runs, "full", "two")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mode_in_every_layout(runs, layout, mode):
    check_same(runs, layout, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_in_every_layout(runs, layout, mode):
    check_same(runs, layout, mode, **EXPERTS)


@pytest.mark.parametrize("virtual", [None, 2])
def test_stages_train_alike_whatever_micro_batches_recompute(runs, virtual):
    stages = {"model__pipeline_model_parallel_size": 2, "model__virtual_pipeline_model_parallel_size": virtual}
    changes = BASE | EXPERTS | stages | {"model__num_layers": 4}
    partial = {"model__num_micro_batches_with_partial_activation_checkpoints": 1}
    modes = {
        "plain": {},
        "some": full("block", 1) | partial | {"model__activations_checkpoint_layers_per_pipeline": 1},
        "none or all": full("block", 0) | partial,
    }
    plain, *others = (runs.run(f"stages-{virtual}-{mode}", 2, **changes, **keys) for mode, keys in modes.items())
    for ours in others:
        for kind in ("model", "optimizer"):
            assert difference(plain / "checkpoints" / "step-2", ours / "checkpoints" / "step-2", kind) == 0, kind
