"""Runs split over tensor-parallel ranks train as one process does: in fp64 to 1e-12, with uneven targets."""

from __future__ import annotations

from typing import Any

import pytest
from distributed_runs import DistributedRuns
from test_distributed_parity import EMA, HYBRID, LAYOUTS, NO_BIAS, RAMP_UP, T5, check_equal
from tiers import full_only

TENSOR = {"model__tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"model__sequence_parallel": True}
CONTEXT = {"model__context_parallel_size": 2}
EXPERT = {"model__expert_model_parallel_size": 2}
GPT = {"model__num_attention_heads": 4}
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
MOE = NO_BIAS | {
    "model__num_attention_heads": 4,
    "model__num_moe_experts": 4,
    "model__moe_router_topk": 2,
    "model__moe_aux_loss_coeff": 1.0,
    "model__moe_z_loss_coeff": 0.1,
    "model__moe_dropout": 0.1,
    "model__moe_input_jitter_eps": 0.1,
    "model__moe_shared_expert_intermediate_size": 32,
    "model__activation": "fast-swiglu",
}
CAPACITY = MOE | {"model__moe_expert_capacity_factor": 0.8, "model__moe_pad_expert_input_to_capacity": True}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "swiglu": SWIGLU,
    "ema": GPT | EMA,
    "moe": MOE,
    "capacity": CAPACITY,
}
"""Dropout is on in all of them."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks):
    return DistributedRuns(tmp_path_factory.mktemp("runs"), forks)


def compare(runs: DistributedRuns, name: str, model: str, ranks: int, layout: dict[str, Any], last: int = 3) -> None:
    alone = runs.run(f"alone-{model}", **MODELS[model])
    together = runs.run(f"{model}-{name}", ranks, **MODELS[model], **layout)
    check_equal(together, alone, last, kinds=("model", "optimizer", *(("ema",) if model == "ema" else ())))


@full_only
@pytest.mark.parametrize("model", ["gpt", "swiglu", "ema"])
@pytest.mark.parametrize("sequence", [False, True])
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
@pytest.mark.parametrize(
    "split",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fsdp": True},
        {"context_parallel_size": 2, "cp_comm_type": "all_gather", "fsdp": True},
        {"context_parallel_size": 2, "cp_comm_type": "a2a", "tensor_model_parallel_size": 2},
    ],
)
def test_t5_equals_one_process(runs, split):
    model = T5["model"] | {"encoder": T5["model"]["encoder"] | {"num_attention_heads": 4}}
    name = "-".join(str(value) for value in split.values())
    check_equal(runs.run(f"t5-{name}", 4, model=model | split), runs.run("alone-t5", model=model))


@full_only
@pytest.mark.parametrize(
    ("model", "exchange"),  # one group of keys cannot be shared by two ranks of an all-to-all
    [("gpt", "p2p"), ("gpt", "all_gather"), ("gpt", "a2a"), ("swiglu", "p2p"), ("swiglu", "all_gather")],
)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "full"])
def test_context_and_data_parallel_ranks_equal_one_process(runs, model, exchange, layout):
    compare(
        runs, f"context-{exchange}-{layout}", model, 4, CONTEXT | {"model__cp_comm_type": exchange} | LAYOUTS[layout]
    )


@full_only
def test_hierarchical_context_parallel_ranks_equal_one_process(runs):
    keys = {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
    compare(runs, "hierarchical", "gpt", 4, {f"model__{name}": value for name, value in keys.items()})


@full_only
@pytest.mark.parametrize("model", ["gpt", "swiglu"])
@pytest.mark.parametrize("layout", ["ddp", "full"])
def test_tensor_context_and_data_parallel_ranks_equal_one_process(runs, model, layout):
    compare(runs, f"tensor-context-{layout}", model, 8, SEQUENCE | CONTEXT | LAYOUTS[layout])


@full_only
@pytest.mark.parametrize("model", ["moe", "capacity"])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("layout", ["ddp", "zero1", "full", "grad"])
@pytest.mark.parametrize("axes", [EXPERT, EXPERT | SEQUENCE, SEQUENCE | {"model__expert_model_parallel_size": 4}])
def test_expert_parallel_ranks_equal_one_process(runs, model, dispatcher, layout, axes):
    name = f"{dispatcher}-{layout}-{'-'.join(str(value) for value in axes.values())}"
    compare(runs, name, model, 4, axes | {"model__moe_token_dispatcher_type": dispatcher} | LAYOUTS[layout])


@full_only
def test_experts_of_tensor_parallel_ranks_equal_one_process(runs):
    compare(runs, "replicated", "moe", 2, SEQUENCE)
    compare(runs, "shared", "moe", 4, SEQUENCE | EXPERT | {"model__tensor_model_parallel_size": 4})


FLEX = {"model__moe_token_dispatcher_type": "flex", "trainer__accelerator": "auto"}
"""Here through memory of the host."""


@full_only
@pytest.mark.parametrize("dispatcher", [FLEX, {}])
def test_experts_of_compiled_layers_equal_one_process(runs, dispatcher):
    name = f"compiled-{len(dispatcher)}"
    compare(runs, name, "moe", 2, EXPERT | dispatcher | LAYOUTS["full"] | {"traced": True})


@full_only
@pytest.mark.parametrize("layout", ["ddp", "zero1", "full", "grad"])
@pytest.mark.parametrize("axes", [EXPERT, EXPERT | SEQUENCE, SEQUENCE | {"model__expert_model_parallel_size": 4}])
def test_experts_of_four_ranks_reached_through_memory_equal_one_process(runs, layout, axes):
    name = f"flex-{layout}-{'-'.join(str(value) for value in axes.values())}"
    compare(runs, name, "moe", 4, axes | FLEX | LAYOUTS[layout])
