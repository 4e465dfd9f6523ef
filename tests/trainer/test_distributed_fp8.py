"""Runs in fp8 train in every layout as one process does, in fp64 to 1e-12, and resume bit for bit; emulated on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed_runs import DistributedRuns
from test_distributed_parity import LAYOUTS, NO_BIAS, check_equal
from test_distributed_tensor_parallel import CONTEXT, EXPERT, SEQUENCE, TENSOR
from tiers import full_only
from tiny_run import final_hashes, tiny_config

from stoker.trainer.train import run_training

FP8: dict[str, Any] = NO_BIAS | {
    "model__fp8": True,
    "model__num_attention_heads": 4,
    "model__activation": "fast-swiglu",
    "model__position_embedding_type": "rope",
}
MOE = FP8 | {"model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__moe_shared_expert_intermediate_size": 32}
PIPELINE = {"model__pipeline_model_parallel_size": 2}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    **{name: (2, FP8, LAYOUTS[name]) for name in ("ddp", "zero1", "full")},
    "tensor": (2, FP8, TENSOR),
    "sequence": (2, FP8, SEQUENCE),
    "sequence, zero1": (4, FP8, SEQUENCE | LAYOUTS["zero1"]),
    "sequence, full": (4, FP8, SEQUENCE | LAYOUTS["full"]),
    "context": (2, FP8, CONTEXT | {"model__attention_dropout": 0.0}),
    "pipeline": (2, FP8, PIPELINE),
    "experts, sequence": (2, MOE, SEQUENCE),  # data-parallel ranks that share experts have one scale for their batches
    "experts of each rank, sequence": (2, MOE, EXPERT | SEQUENCE),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


@full_only
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(runs: DistributedRuns, name: str) -> None:
    ranks, model, layout = CASES[name]
    model = model | {key: value for key, value in layout.items() if "dropout" in key}
    alone = runs.run(f"alone-{'moe' if model == MOE else 'context' if name == 'context' else 'dense'}", **model)
    together = runs.run(name.replace(", ", "-"), ranks, **model, **{k: v for k, v in layout.items() if k not in model})
    check_equal(together, alone)


@pytest.mark.parametrize("recipe", ["tensorwise"])
def test_train_2n_equals_train_n_resume_train_n(tmp_path: Path, recipe: str) -> None:
    """Current scaling has no state: nothing of fp8 is in a checkpoint."""
    settings = FP8 | {"model__fp8_recipe": recipe, "model__num_attention_heads": 2}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run_training(tiny_config(whole, trainer__max_steps=4, **settings))
    run_training(tiny_config(halves, trainer__max_steps=2, **settings))
    run_training(tiny_config(halves, trainer__max_steps=4, **settings))
    assert final_hashes(whole, 4) == final_hashes(halves, 4)
    bf16 = tmp_path / "other"
    run_training(tiny_config(bf16, trainer__max_steps=4, **{**settings, "model__fp8": False}))
    assert final_hashes(whole, 4) != final_hashes(bf16, 4)
