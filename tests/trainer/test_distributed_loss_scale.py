"""An overflow of one rank in fp16 skips the step of all ranks, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_runs import DistributedRuns, records
from test_distributed_parity import LAYOUTS, NO_BIAS, figures
from tiers import extra, full_only

FP16 = NO_BIAS | {
    "trainer__precision": "16",
    "trainer__max_steps": 4,
    "trainer__val_check_interval": 4,
    "model__global_batch_size": 8,
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


def check(runs: DistributedRuns, name: str, ranks: int, layout: dict[str, Any], place: str) -> None:
    changes = FP16 | layout | {"planted": [ranks - 1, 2, float("inf"), place]}
    directory = runs.run("-".join([*name.split(), place]), ranks, **changes)
    # the ranks themselves check that neither weights nor state have changed in the second step
    assert [record["scales"] for record in records(directory)] == [[1024, 512, 512, 1024]] * ranks
    steps = [line for line in figures(directory) if "loss" in line]
    assert [line["skipped_steps"] for line in steps] == [0, 1, 1, 1]
    assert [line["grad_norm"] is None for line in steps] == [False, True, False, False]


FOUR = {
    "sequence zero1": SPLITS["sequence"] | LAYOUTS["zero1"],
    "pipeline full": SPLITS["pipeline"] | LAYOUTS["full"],
    "residual pipeline": SPLITS["pipeline"] | SPLITS["sequence"] | RESIDUAL,
    "expert zero1": SPLITS["expert"] | LAYOUTS["zero1"],
    "mixed tensor": SPLITS["tensor"] | {"model__megatron_amp_O2": False},
    "hybrid": LAYOUTS["hybrid"],
}
TWO = {**{name: LAYOUTS[name] for name in ("ddp", "full", "grad")}, **SPLITS, "true": {"trainer__precision": "16-true"}}


@full_only
@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in TWO), *((4, name) for name in FOUR)])
def test_an_overflow_on_one_rank_skips_the_step_of_all(runs, ranks, name):
    check(runs, name, ranks, (TWO | FOUR)[name], "loss")


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, "sequence"), *extra(*((2, name) for name in ("full", "grad", "tensor", "pipeline", "virtual", "expert"))),
     *extra(*((4, name) for name in FOUR if name in ("sequence zero1", "pipeline full", "expert zero1")))],
)  # fmt: skip
def test_an_overflow_of_one_shard_skips_the_step_of_all(runs, ranks, name):
    """Layouts without replicas of a shard, whose gradients are equal once they have been all-reduced."""
    check(runs, name, ranks, (TWO | FOUR)[name], "shard")
