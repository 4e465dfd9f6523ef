"""A checkpoint of any layout of the ranks resumes in any other: the same samples, and weights and states to 1e-12."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from distributed_runs import DistributedRuns, difference, records, samples_by_step
from test_distributed_parity import EMA, FULL, HYBRID, LIMIT, NO_BIAS, ZERO1, step
from tiers import cases

SEQUENCE = {"model__tensor_model_parallel_size": 2, "model__sequence_parallel": True}
CONTEXT = {"model__context_parallel_size": 2}
EXPERT = {"model__expert_model_parallel_size": 2}
PIPELINE = {"model__pipeline_model_parallel_size": 2}
ALL_GATHER = {"model__moe_token_dispatcher_type": "allgather"}
MODEL = (
    NO_BIAS
    | EMA
    | {
        "trainer__limit_val_batches": 0.004,
        "model__global_batch_size": 8,
        "model__share_embeddings_and_output_weights": False,
        "model__activation": "fast-swiglu",
        "model__num_attention_heads": 4,
        "model__num_query_groups": 1,
        "model__position_embedding_type": "rope",
        "model__qk_layernorm": True,
        "model__num_moe_experts": 4,
        "model__moe_layer_freq": [0, 1],
        "model__moe_router_topk": 2,
        "model__moe_aux_loss_coeff": 1.0,
        "model__moe_router_score_function": "sigmoid",
        "model__moe_router_enable_expert_bias": True,
        "model__moe_shared_expert_intermediate_size": 32,
    }
)
"""A dense layer and one with experts, with a bias as state, fused weights, and fewer key heads than ranks."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero1": (2, ZERO1),
    "full": (2, FULL),
    "hybrid": (4, HYBRID),
    "tensor": (2, SEQUENCE),
    "tensor-data": (4, SEQUENCE),
    "context-full": (2, CONTEXT | FULL),
    "tensor-context": (4, SEQUENCE | CONTEXT | {"model__cp_comm_type": "all_gather"}),
    "expert": (2, EXPERT),
    "expert-full": (4, EXPERT | FULL | ALL_GATHER),
    "expert-tensor-zero1": (4, EXPERT | SEQUENCE | ZERO1),
    "expert-context": (2, EXPERT | CONTEXT),
    "pipeline": (2, PIPELINE),
    "pipeline-expert-zero1": (4, PIPELINE | EXPERT | ZERO1),
    "pipeline-tensor-full": (4, PIPELINE | SEQUENCE | FULL),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def steps(number: int) -> dict[str, int]:
    return {"trainer__max_steps": number, "trainer__val_check_interval": number}


@pytest.mark.parametrize(("saved", "resumed"), cases(permutations(LAYOUTS, 2), fast=1))
def test_a_checkpoint_resumes_in_any_other_layout(runs, saved, resumed):
    unbroken = runs.run("unbroken", **MODEL, **steps(3))
    ranks, layout = LAYOUTS[saved]
    start = step(runs.run(f"saved-{saved}", ranks, **MODEL, **layout, **steps(2)), 2)
    ranks, layout = LAYOUTS[resumed]
    resume = {"exp_manager__resume_from_checkpoint": str(start)}
    directory = runs.run(f"{saved}-to-{resumed}", ranks, **MODEL, **layout, **resume, **steps(3))
    for kind in ("model", "optimizer", "ema"):
        assert difference(step(unbroken, 3), step(directory, 3), kind) <= LIMIT, kind
    assert samples_by_step(unbroken)[2:] == samples_by_step(directory)
    (validation,) = {tuple(record["validation"]) for record in records(directory)}
    assert validation == pytest.approx(records(unbroken)[0]["validation"], rel=LIMIT)
