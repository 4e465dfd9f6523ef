"""Runs split over tensor-parallel ranks train as one process does: in fp64 to 1e-12, with uneven targets."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_runs import DistributedRuns, difference, samples_by_step
from test_distributed_parity import EMA, HYBRID, LAYOUTS, LIMIT, NO_BIAS, RAMP_UP, SIX, T5, check_equal, step
from tiers import cases, full_only

TENSOR = {"model__tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"model__sequence_parallel": True}
STILL = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0, "model__embedding_dropout": 0.0}
GPT = STILL | {"model__num_attention_heads": 4}
SWIGLU = (
    GPT
    | NO_BIAS
    | {
        "model__share_embeddings_and_output_weights": False,
        "model__activation": "fast-swiglu",
        "model__num_query_groups": 1,
        "model__position_embedding_type": "rope",
        "model__qk_layernorm": True,
    }
)
"""Fewer key groups than ranks: a head of keys is on both, and its gradients are summed."""
MODELS: dict[str, dict[str, Any]] = {"gpt": GPT, "swiglu": SWIGLU, "ema": GPT | EMA}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def compare(runs: DistributedRuns, name: str, model: str, ranks: int, layout: dict[str, Any], last: int = 3) -> None:
    alone = runs.run(f"alone-{model}", **MODELS[model])
    together = runs.run(f"{model}-{name}", ranks, **MODELS[model], **layout)
    check_equal(together, alone, last, kinds=("model", "optimizer", *(("ema",) if model == "ema" else ())))


@pytest.mark.parametrize(("model", "sequence"), cases([(m, s) for m in MODELS for s in (False, True)], fast=1))
def test_two_tensor_parallel_ranks_equal_one_process(runs, model, sequence):
    compare(runs, f"tensor-{sequence}", model, 2, SEQUENCE if sequence else TENSOR)


@full_only
@pytest.mark.parametrize("model", ["gpt", "swiglu"])
@pytest.mark.parametrize("layout", ["ddp", "zero1", "full", "grad"])
def test_tensor_and_data_parallel_ranks_equal_one_process(runs, model, layout):
    compare(runs, f"tensor-{layout}", model, 4, SEQUENCE | LAYOUTS[layout])


@full_only
def test_tensor_parallel_ranks_of_hybrid_shards_equal_one_process(runs):
    compare(runs, "tensor-hybrid", "gpt", 8, SEQUENCE | HYBRID)


@full_only
def test_four_tensor_parallel_ranks_equal_one_process(runs):
    compare(runs, "tensor4", "swiglu", 4, SEQUENCE | {"model__tensor_model_parallel_size": 4})


@full_only
def test_a_growing_batch_and_an_average_equal_one_process(runs):
    changes = GPT | EMA | RAMP_UP
    alone, together = runs.run("alone-ramp", **changes), runs.run("ramp-tensor", 4, **changes, **SEQUENCE)
    check_equal(together, alone, 5, kinds=("model", "optimizer", "ema"))


@full_only
def test_t5_equals_one_process(runs):
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    stacks = {name: T5["model"][name] | still for name in ("encoder", "decoder")}
    model = T5["model"] | stacks | {"embedding_dropout": 0.0}
    split = model | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fsdp": True}
    check_equal(runs.run("t5-tensor", 4, model=split), runs.run("alone-t5", model=model))


@full_only
@pytest.mark.parametrize(
    ("saved", "ranks", "resumed", "others"),
    [
        (SEQUENCE, 2, {}, 1),
        ({}, 1, SEQUENCE, 2),
        (SEQUENCE | LAYOUTS["full"], 4, TENSOR | LAYOUTS["zero1"], 4),
        (LAYOUTS["full"], 2, SEQUENCE | LAYOUTS["ddp"], 4),
        (TENSOR | {"model__tensor_model_parallel_size": 4}, 4, SEQUENCE, 2),
    ],
)
def test_resumed_in_another_layout(runs, saved, ranks, resumed, others):
    changes = SWIGLU | EMA
    number = f"{ranks}-{len(saved)}-{others}-{len(resumed)}"
    start = step(runs.run(f"saved-{number}", ranks, **changes, **saved), 3)
    resume = {"exp_manager__resume_from_checkpoint": str(start)}
    directory = runs.run(f"resumed-{number}", others, **changes, **resumed, **resume, **SIX)
    unbroken = runs.run("alone-six", **changes, **SIX)
    for kind in ("model", "optimizer", "ema"):
        assert difference(step(unbroken, 6), step(directory, 6), kind) <= LIMIT, kind
    assert samples_by_step(unbroken)[3:] == samples_by_step(directory)
