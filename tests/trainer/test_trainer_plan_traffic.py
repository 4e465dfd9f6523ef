"""The planned bytes of each collective of a training step are those that a hook counts in a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from tiers import extra, full_only

TENSOR: dict[str, Any] = {"model__tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"model__sequence_parallel": True}
# sizes by which `counted_traffic` tells tensors apart, and which divide: padding of shards is not planned
STILL: dict[str, Any] = {
    "model__hidden_dropout": 0.0, "model__attention_dropout": 0.0, "model__num_layers": 3, "model__hidden_size": 40,
    "model__kv_channels": 16, "model__make_vocab_size_divisible_by": 56,
}  # fmt: skip
GPT = STILL | {"model__num_attention_heads": 4, "model__global_batch_size": 8}
LLAMA = GPT | {
    "model__bias": False, "model__normalization": "rmsnorm", "model__share_embeddings_and_output_weights": False,
    "model__activation": "swiglu", "model__num_query_groups": 1, "model__qk_layernorm": True,
    "model__position_embedding_type": "rope",
}  # fmt: skip
MIXTRAL = LLAMA | {
    "model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__moe_aux_loss_coeff": 0.1,
    "model__moe_shared_expert_intermediate_size": 48, "model__moe_layer_freq": [1, 0, 1],
}  # fmt: skip
BERT = STILL | {"model__family": "bert", "model__transformer_block_type": "post_ln"}
_STACK = {
    "num_layers": 2, "hidden_size": 40, "ffn_hidden_size": 64, "num_attention_heads": 4, "kv_channels": 8,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
T5: dict[str, Any] = {
    "model": {
        "family": "t5", "seq_length": 16, "embedding_dropout": 0.0, "share_token_embeddings": False,
        "make_vocab_size_divisible_by": 56, "micro_batch_size": 2, "global_batch_size": 4,
        "encoder": _STACK, "decoder": _STACK | {"num_layers": 3, "num_query_groups": 1},
        "data": {"data_impl": "mock", "seq_length_dec": 8},
    },
}  # fmt: skip
RECOMPUTE = "activations_checkpoint"
FULL = {f"{RECOMPUTE}_granularity": "full", f"{RECOMPUTE}_method": "uniform", f"{RECOMPUTE}_num_layers": 1}
CHUNKS = FULL | {f"{RECOMPUTE}_num_layers": 2}
BLOCK = FULL | {f"{RECOMPUTE}_method": "block"}
MODULES = {f"{RECOMPUTE}_modules": ["norm", "mlp_activation", "core_attention"]}


def recomputing(model: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    if model is not T5:
        return model | {f"model__{key}": value for key, value in keys.items()}
    changed = {name: T5["model"][name] | keys for name in ("encoder", "decoder")}
    return {"model": T5["model"] | changed}


MODELS = {"gpt": GPT, "llama": LLAMA, "bert": BERT, "t5": T5}
TWO_RANKS = [
    recomputing(model, keys) | split
    for model in MODELS.values()
    for keys in ({}, FULL, CHUNKS, BLOCK, MODULES)
    for split in (TENSOR, SEQUENCE)
]
MOE_MODULES = ({}, FULL, CHUNKS, MODULES, {f"{RECOMPUTE}_modules": ["moe"]}, {f"{RECOMPUTE}_modules": ["norm", "moe"]})
EXPERTS = [recomputing(MIXTRAL, keys) | SEQUENCE for keys in MOE_MODULES]
DATA: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"model__optim__name": "distributed_fused_adam"},
    "fsdp": {"model__fsdp": True},
    "grad": {"model__fsdp": True, "model__fsdp_sharding_strategy": "grad"},
    "hybrid": {"model__fsdp": True, "model__fsdp_sharding_strategy": "hybrid", "model__fsdp_shard_size": 2},
}
DOCUMENTS = {"model__data__reset_attention_mask": True}


def sharing_tokens(exchange: str, size: int = 2) -> dict[str, Any]:
    return {"model__context_parallel_size": size, "model__cp_comm_type": exchange}


RING, HEADS, KEYS = sharing_tokens("p2p"), sharing_tokens("a2a"), sharing_tokens("all_gather")
BOTH = sharing_tokens("a2a+p2p", 4) | {"model__hierarchical_context_parallel_sizes": [2, 2]}
TWO_GROUPS = LLAMA | {"model__num_query_groups": 2}
CONTEXT = [
    *(model | split for model in (TWO_GROUPS, recomputing(BERT, FULL)) for split in (RING, HEADS, KEYS)),
    *(recomputing(TWO_GROUPS, CHUNKS) | split for split in (RING, KEYS)),
    *(T5 | split for split in (RING, KEYS)),
    *(GPT | DOCUMENTS | split for split in (RING, HEADS, KEYS)),
]
CONTEXT_OF_FOUR = [
    *(model | BOTH for model in (TWO_GROUPS | DOCUMENTS, BERT)),
    LLAMA | RING | TENSOR, LLAMA | KEYS | SEQUENCE, LLAMA | RING | DATA["fsdp"], LLAMA | KEYS | DATA["zero1"],
]  # fmt: skip
SHARED = MIXTRAL | {"model__expert_model_parallel_size": 2}
GATHER = {"model__moe_token_dispatcher_type": "allgather"}
PADDED = {"model__moe_expert_capacity_factor": 1.5, "model__moe_pad_expert_input_to_capacity": True}
NO_SHARED_EXPERT = {"model__moe_shared_expert_intermediate_size": None}
SHARED_EXPERTS = [
    *(recomputing(SHARED, keys) | dispatcher for keys in MOE_MODULES for dispatcher in ({}, GATHER)),
    *(SHARED | PADDED | dispatcher for dispatcher in ({}, GATHER)),
    *(recomputing(SHARED | NO_SHARED_EXPERT, FULL) | dispatcher for dispatcher in ({}, GATHER)),
    SHARED | {"model__moe_router_dtype": "fp64"},
]
SHARED_BY_FOUR = [
    *(recomputing(SHARED, keys) | SEQUENCE | dispatcher for keys in (CHUNKS, MODULES) for dispatcher in ({}, GATHER)),
    *(SHARED | DATA[data] for data in ("ddp", "zero1", "grad", "fsdp")),
    SHARED | SEQUENCE | PADDED,
    SHARED | KEYS,
    SHARED | RING | PADDED,
]
PIPELINE: dict[str, Any] = {"model__pipeline_model_parallel_size": 2}
FOUR_LAYERS = {"model__num_layers": 4}
INTERLEAVED = PIPELINE | FOUR_LAYERS | {"model__virtual_pipeline_model_parallel_size": 2}
RELATIVE = {"model__position_embedding_type": "relative"}
T5_SPLIT = {"model": T5["model"] | {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_split_rank": 1}}
# without norms of heads, the norms of two layers are not a multiple of 7
PARTLY = recomputing(LLAMA, BLOCK | {"num_micro_batches_with_partial_activation_checkpoints": 1})
PARTLY |= {"model__qk_layernorm": False}
TWO_STAGES = [
    LLAMA | INTERLEAVED, GPT | FOUR_LAYERS | PIPELINE, GPT | RELATIVE | INTERLEAVED, BERT | FOUR_LAYERS | PIPELINE,
    T5_SPLIT,
]  # fmt: skip
STAGES_OF_TWO = [
    PARTLY | FOUR_LAYERS | PIPELINE | SEQUENCE, T5_SPLIT | TENSOR, GPT | DOCUMENTS | INTERLEAVED | RING,
    LLAMA | FOUR_LAYERS | PIPELINE | DATA["zero1"], GPT | FOUR_LAYERS | PIPELINE | DATA["fsdp"],
    recomputing(SHARED, FULL) | {"model__moe_layer_freq": [1, 0, 1, 0]} | FOUR_LAYERS | PIPELINE,
]  # fmt: skip
FP8: dict[str, Any] = {
    "trainer__precision": "bf16", "model__fp8": True, "model__fp8_params": True, "model__num_attention_heads": 4,
    "model__activation": "swiglu", "model__bias": False, "model__hidden_dropout": 0.0, "model__attention_dropout": 0.0,
    "model__num_layers": 2, "model__hidden_size": 80, "model__kv_channels": 16,
    "model__make_vocab_size_divisible_by": 56, "model__global_batch_size": 8,
}  # fmt: skip
FAST = [
    recomputing(T5, CHUNKS) | SEQUENCE, recomputing(SHARED, CHUNKS) | GATHER,
    *extra(GPT | RING, GPT | FOUR_LAYERS | PIPELINE),
]  # fmt: skip


def check(forks: ForkServer, directory: Path, ranks: int, changes: list[dict[str, Any]]) -> None:
    """Compare both; the helper also checks on every rank what is sent, and which experts the rank has."""
    found = forks.call("counted_traffic", "compare", str(directory), ranks, changes)
    for change, bytes_of in zip(changes, found, strict=True):
        assert bytes_of["counted"] == bytes_of["planned"], change
        assert bytes_of["counted"]


def test_planned_bytes_of_parallel_ranks_are_counted(forks: ForkServer, tmp_path: Path) -> None:
    check(forks, tmp_path, 2, FAST)


@full_only
def test_planned_bytes_of_all_models_and_recomputations_are_counted(forks: ForkServer, tmp_path: Path) -> None:
    check(forks, tmp_path, 2, TWO_RANKS + EXPERTS)


@full_only
@pytest.mark.parametrize("data", [*DATA])
def test_planned_bytes_of_data_parallel_ranks_are_counted(forks: ForkServer, tmp_path: Path, data: str) -> None:
    split = {} if data == "hybrid" else SEQUENCE
    check(forks, tmp_path, 4, [LLAMA | split | DATA[data]])


@full_only
@pytest.mark.parametrize("split", [{}, TENSOR, SEQUENCE], ids=["", "tensor", "sequence"])
def test_planned_bytes_of_weights_in_fp8_are_counted(forks: ForkServer, tmp_path: Path, split: dict[str, Any]) -> None:
    """A byte of each, and the amaxes; those of the linear layers themselves are few bytes each."""
    few = split | {"model__reduce_amax": False}
    check(forks, tmp_path, 4, [FP8 | few | DATA[data] for data in ("ddp", "zero1", "grad")])


@full_only
def test_planned_bytes_of_experts_in_fp8_are_counted(forks: ForkServer, tmp_path: Path) -> None:
    experts = FP8 | {"model__num_moe_experts": 4, "model__moe_router_topk": 2, "model__reduce_amax": False}
    experts |= {"model__num_layers": 4}
    split = experts | {"model__expert_model_parallel_size": 2}
    check(forks, tmp_path, 4, [each | DATA[data] for data in ("zero1", "grad") for each in (experts, split)])


@full_only
@pytest.mark.parametrize(("ranks", "changes"), [(2, TWO_STAGES), (4, STAGES_OF_TWO)])
def test_planned_bytes_of_pipelines_are_counted(
    forks: ForkServer, tmp_path: Path, ranks: int, changes: list[dict[str, Any]]
) -> None:
    check(forks, tmp_path, ranks, changes)


@full_only
@pytest.mark.parametrize(
    ("ranks", "changes"), [(2, CONTEXT), (4, CONTEXT_OF_FOUR), (2, SHARED_EXPERTS), (4, SHARED_BY_FOUR)],
    ids=["context", "context of 4", "experts", "experts of 4"],
)  # fmt: skip
def test_planned_bytes_of_shared_tokens_and_experts_are_counted(
    forks: ForkServer, tmp_path: Path, ranks: int, changes: list[dict[str, Any]]
) -> None:
    check(forks, tmp_path, ranks, changes)


@full_only
def test_capacity_without_padding_sends_at_most_the_planned_rows(forks: ForkServer, tmp_path: Path) -> None:
    """Which assignments are dropped is known to no plan; as many rows as assignments are sent if none is."""
    changes = [SHARED | {"model__moe_expert_capacity_factor": factor} for factor in (1.99, 0.5)]
    roomy, tight = forks.call("counted_traffic", "compare", str(tmp_path), 2, changes)
    sent = "(0, 1) all-to-all"
    assert roomy["counted"] == roomy["planned"] == tight["planned"]
    assert tight["counted"][sent] < tight["planned"][sent] * 0.6
