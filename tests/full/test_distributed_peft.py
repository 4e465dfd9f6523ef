"""Fine-tuning with few parameters on several ranks: the same result as one process, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_runs import DistributedRuns, difference

STEPS = {"trainer__max_steps": 2, "trainer__val_check_interval": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"model__optim__name": "distributed_fused_adam"},
    "full": {"model__fsdp": True},
    "grad": {"model__fsdp": True, "model__fsdp_sharding_strategy": "grad"},
}
SCHEMES: dict[str, dict[str, Any]] = {
    "lora": {"model__peft__lora_tuning__target_modules": ["all"], "model__peft__lora_tuning__adapter_dim": 3},
    "adapter": {"model__peft__adapter_tuning__adapter_dim": 5},
    "ia3": {},
    "ptuning": {"model__peft__p_tuning__virtual_tokens": 3, "model__max_position_embeddings": 32},
    "selective": {"model__peft__selective_tuning__tunable_base_param_names": ["mlp.down", "norm"]},
}
EXPERTS: dict[str, Any] = {"model__num_moe_experts": 4, "model__moe_aux_loss_coeff": 0.1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def check_same(runs: DistributedRuns, scheme: str, layout: str, **changes: Any) -> None:
    """Two ranks train what one process does, in fp64."""
    shared = {**STEPS, **SCHEMES[scheme], "model__peft__peft_scheme": scheme, **changes}
    kind = f"{scheme}{'-experts' * bool(changes)}"
    optimizer = {"model__optim__name": "fused_adam"}
    one = runs.run(f"{kind}-1", 1, **{**shared, **optimizer})
    two = runs.run(f"{kind}-{layout}", 2, **{**shared, **optimizer, **LAYOUTS[layout]})
    for part in ("adapter", "optimizer"):
        assert difference(one / "checkpoints" / "step-2", two / "checkpoints" / "step-2", part) <= 1e-12, part


@pytest.mark.parametrize("layout", ["ddp", "full"])
def test_ranks_train_what_one_process_does(runs, layout):
    check_same(runs, "lora", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_in_every_layout(runs, scheme, layout):
    check_same(runs, scheme, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_in_every_layout(runs, layout):
    check_same(runs, "lora", layout, **EXPERTS)
