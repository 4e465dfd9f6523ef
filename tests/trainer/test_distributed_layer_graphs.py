"""Ranks whose layers run by graphs train, bit for bit, what they train without, with a substitute for CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_runs import DistributedRuns
from test_distributed_parity import BUCKETS, DDP, FULL, GRAD, IN_TURN, NO_BIAS, RAMP_UP, T5, UNTIED, ZERO1, check_equal
from tiers import extra

EXPERTS = {
    "model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__moe_aux_loss_coeff": 0.01,
    "model__expert_model_parallel_size": 2,
}  # fmt: skip
FLEX = EXPERTS | {"model__moe_token_dispatcher_type": "flex"}
GPT = {"model__num_layers": 4, "model__num_attention_heads": 4}
SEQUENCE = {"model__tensor_model_parallel_size": 2, "model__sequence_parallel": True}
PIPELINE = {"model__pipeline_model_parallel_size": 2}
VIRTUAL = PIPELINE | {"model__virtual_pipeline_model_parallel_size": 2}
FOUR_STAGES = {"model__pipeline_model_parallel_size": 4}
FEW = {"model__global_batch_size": 6}
"""Three micro batches, fewer than stages."""
FEW_AT_FIRST = {
    "model__rampup_batch_size": [4, 4, 60], "model__global_batch_size": 16, "trainer__max_steps": 8,
    "trainer__val_check_interval": 8,
}  # fmt: skip
"""Two micro batches at first, then four, six and eight."""
DECODER_STAGE = PIPELINE | {"model__pipeline_model_parallel_split_rank": 1}
DECODER_STAGES = DECODER_STAGE | {"model__pipeline_model_parallel_size": 3}
LONGER_DECODER = {**T5, "model": {**T5["model"], "decoder": {**T5["model"]["decoder"], "num_layers": 4}}}


def context(exchange: str, ranks: int = 2) -> dict[str, Any]:
    return {"model__context_parallel_size": ranks, "model__cp_comm_type": exchange}


HIERARCHY = context("a2a+p2p", 4) | {"model__hierarchical_context_parallel_sizes": [2, 2]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


@pytest.mark.parametrize(
    ("name", "ranks", "layout", "changes"),
    [
        ("experts", 2, ZERO1, EXPERTS),
        ("pipeline", 2, DDP, GPT | PIPELINE),
        *extra(
            ("t5", 2, ZERO1, T5),
            ("gpt", 2, DDP, {}),
            ("bias", 2, ZERO1, BUCKETS | {"copy_engines": True}),
            ("experts-flex", 2, DDP, FLEX | {"model__moe_layer_freq": 2, "model__hidden_dropout": 0.1}),
            ("ramp-up", 2, ZERO1, RAMP_UP | {"copy_engines": True}),
            ("bf16", 2, ZERO1, {"trainer__precision": "bf16", "copy_engines": True}),
            ("one", 2, DDP, {"model__global_batch_size": 4, "trainer__max_steps": 6}),
            ("traced", 2, ZERO1, EXPERTS | {"traced": True}),
            ("tensor", 4, ZERO1, GPT | SEQUENCE),
            ("tensor-traced", 4, DDP, GPT | {"model__tensor_model_parallel_size": 2, "traced": True}),
            *((exchange, 2, DDP, GPT | context(exchange)) for exchange in ("p2p", "all_gather", "a2a")),
            ("context-traced", 2, ZERO1, GPT | context("p2p") | {"traced": True}),
            ("context-experts", 4, ZERO1, EXPERTS | context("a2a")),
            ("hierarchy", 4, DDP, GPT | HIERARCHY),
            ("virtual", 2, DDP, GPT | VIRTUAL),
            ("four-stages", 4, DDP, GPT | FOUR_STAGES),
            ("few-micro-batches", 4, DDP, GPT | FOUR_STAGES | FEW | {"trainer__max_steps": 6}),
            ("growing", 4, ZERO1, GPT | PIPELINE | RAMP_UP),
            ("growing-stages", 4, DDP, GPT | FOUR_STAGES | FEW_AT_FIRST),
            ("decoder-stage", 2, DDP, T5 | DECODER_STAGE),
            ("decoder-stages", 3, DDP, LONGER_DECODER | DECODER_STAGES),
            ("stages-tensor", 4, DDP, GPT | PIPELINE | SEQUENCE),
            ("stages-traced", 4, ZERO1, GPT | VIRTUAL | {"traced": True}),
            ("stages-experts", 4, DDP, EXPERTS | PIPELINE),
            ("full", 2, FULL, BUCKETS | {"copy_engines": True, "model__num_layers": 5}),
            ("full-t5", 2, FULL, T5 | {"copy_engines": True}),
            ("full-traced", 2, FULL, UNTIED | {"copy_engines": True, "traced": True}),
            ("full-stages", 4, FULL, GPT | NO_BIAS | PIPELINE | {"copy_engines": True}),
            ("full-tensor", 4, FULL, GPT | NO_BIAS | SEQUENCE | {"copy_engines": True}),
            ("full-experts", 2, FULL, EXPERTS | NO_BIAS | {"copy_engines": True}),
            ("full-experts-twice", 4, FULL, EXPERTS | NO_BIAS | {"copy_engines": True}),
            ("grad", 2, GRAD, BUCKETS | {"copy_engines": True}),
        ),
    ],
)
def test_ranks_with_captured_layers_train_the_same(
    runs: DistributedRuns, name: str, ranks: int, layout: dict[str, Any], changes: dict[str, Any]
) -> None:
    eager, captured = (
        runs.run(f"{name}-{kind}", ranks, **(IN_TURN | layout | changes | more))
        for kind, more in (("eager", {}), ("captured", {"captured": True}))
    )
    check_equal(captured, eager, changes.get("trainer__max_steps", 3), limit=0.0)
