"""An overflow of one rank in fp16 skips the step of all ranks, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_runs import DistributedRuns, records
from test_distributed_parity import LAYOUTS, NO_BIAS, figures
from tiers import extra

FP16 = NO_BIAS | {
    "trainer__precision": "16",
    "trainer__max_steps": 4,
    "trainer__val_check_interval": 4,
    "model__num_attention_heads": 4,
    "model__native_amp_init_scale": 1024,
    "model__native_amp_growth_interval": 2,
    "model__hysteresis": 1,
    "exp_manager__checkpoint_callback_params": {"save_top_k": 0, "save_last": False},
}
MOE = {"model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__moe_aux_loss_coeff": 0.1}
RESIDUAL = {"model__fp32_residual_connection": True}
SPLITS: dict[str, dict[str, Any]] = {
    "sequence": {"model__tensor_model_parallel_size": 2, "model__sequence_parallel": True},
    "tensor": {"model__tensor_model_parallel_size": 2},
    "pipeline": {"model__pipeline_model_parallel_size": 2},
    "virtual": {"model__pipeline_model_parallel_size": 2, "model__virtual_pipeline_model_parallel_size": 2,
                "model__num_layers": 4},
    "context": {"model__context_parallel_size": 2},
    "expert": MOE | {"model__expert_model_parallel_size": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


@pytest.mark.parametrize(
    ("name", "ranks", "layout"),
    [
        *((name, 2, LAYOUTS[name]) for name in extra("ddp", "full", "grad")),
        *(("hybrid", 4, LAYOUTS["hybrid"]),) * bool(extra(1)),
        ("sequence", 2, SPLITS["sequence"]),
        *((name, 2, SPLITS[name]) for name in extra(*SPLITS) if name != "sequence"),
        *extra(
            ("sequence zero1", 4, SPLITS["sequence"] | LAYOUTS["zero1"]),
            ("pipeline full", 4, SPLITS["pipeline"] | LAYOUTS["full"]),
            ("residual pipeline", 4, SPLITS["pipeline"] | SPLITS["sequence"] | RESIDUAL),
            ("expert zero1", 4, SPLITS["expert"] | LAYOUTS["zero1"]),
            ("mixed tensor", 4, SPLITS["tensor"] | {"model__megatron_amp_O2": False}),
            ("true", 2, {"trainer__precision": "16-true"}),
        ),
    ],
)
def test_an_overflow_on_one_rank_skips_the_step_of_all(runs, name, ranks, layout):
    directory = runs.run(name.replace(" ", "-"), ranks, overflow=[ranks - 1, 2], **(FP16 | layout))
    # the ranks themselves check that neither weights nor state have changed in the second step
    assert [record["scales"] for record in records(directory)] == [[1024, 512, 512, 1024]] * ranks
    steps = [line for line in figures(directory) if "loss" in line]
    assert [line["skipped_steps"] for line in steps] == [0, 1, 1, 1]
    assert [line["grad_norm"] is None for line in steps] == [False, True, False, False]
