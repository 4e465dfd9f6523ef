"""Ranks whose layers run by graphs train, bit for bit, what they train without, with a substitute for CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_runs import DistributedRuns
from test_distributed_parity import BUCKETS, DDP, IN_TURN, RAMP_UP, T5, ZERO1, check_equal
from tiers import extra

EXPERTS = {
    "model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__moe_aux_loss_coeff": 0.01,
    "model__expert_model_parallel_size": 2,
}  # fmt: skip
FLEX = EXPERTS | {"model__moe_token_dispatcher_type": "flex"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [
        ("experts", ZERO1, EXPERTS),
        *extra(
            ("t5", ZERO1, T5),
            ("gpt", DDP, {}),
            ("bias", ZERO1, BUCKETS | {"copy_engines": True}),
            ("experts-flex", DDP, FLEX | {"model__moe_layer_freq": 2, "model__hidden_dropout": 0.1}),
            ("ramp-up", ZERO1, RAMP_UP | {"copy_engines": True}),
            ("bf16", ZERO1, {"trainer__precision": "bf16", "copy_engines": True}),
            ("one", DDP, {"model__global_batch_size": 4, "trainer__max_steps": 6}),
            ("traced", ZERO1, EXPERTS | {"traced": True}),
        ),
    ],
)
def test_ranks_with_captured_layers_train_the_same(
    runs: DistributedRuns, name: str, layout: dict[str, Any], changes: dict[str, Any]
) -> None:
    eager, captured = (
        runs.run(f"{name}-{kind}", 2, **(IN_TURN | layout | changes | more))
        for kind, more in (("eager", {}), ("captured", {"captured": True}))
    )
    check_equal(captured, eager, changes.get("trainer__max_steps", 3), limit=0.0)
