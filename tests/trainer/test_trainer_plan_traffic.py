"""The planned bytes of each collective of a training step are those that a hook counts in a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from tiers import full_only

TENSOR: dict[str, Any] = {"model__tensor_model_parallel_size": 2}
SEQUENCE = TENSOR | {"model__sequence_parallel": True}
STILL: dict[str, Any] = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0, "model__num_layers": 3}
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
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
T5: dict[str, Any] = {
    "model": {
        "family": "t5", "seq_length": 16, "embedding_dropout": 0.0, "share_token_embeddings": False,
        "encoder": _STACK, "decoder": _STACK | {"num_layers": 3, "num_query_groups": 1},
        "micro_batch_size": 2, "global_batch_size": 4, "data": {"data_impl": "mock", "seq_length_dec": 8},
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
EXPERTS = [
    recomputing(MIXTRAL, keys) | SEQUENCE
    for keys in (
        {},
        FULL,
        CHUNKS,
        MODULES,
        {f"{RECOMPUTE}_modules": ["moe"]},
        {f"{RECOMPUTE}_modules": ["norm", "moe"]},
    )
]
FAST = [recomputing(LLAMA, MODULES) | SEQUENCE, recomputing(T5, CHUNKS) | SEQUENCE, BERT | TENSOR]
DATA: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"model__optim__name": "distributed_fused_adam"},
    "fsdp": {"model__fsdp": True},
    "grad": {"model__fsdp": True, "model__fsdp_sharding_strategy": "grad"},
    "hybrid": {"model__fsdp": True, "model__fsdp_sharding_strategy": "hybrid", "model__fsdp_shard_size": 2},
}


def check(forks: ForkServer, directory: Path, ranks: int, changes: list[dict[str, Any]]) -> None:
    found = forks.call("counted_traffic", "compare", str(directory), ranks, changes)
    for change, bytes_of in zip(changes, found, strict=True):
        assert bytes_of["counted"] == bytes_of["planned"], change
        assert bytes_of["counted"]


def test_planned_bytes_of_tensor_parallel_ranks_are_counted(forks: ForkServer, tmp_path: Path) -> None:
    check(forks, tmp_path, 2, FAST)


@full_only
def test_planned_bytes_of_all_models_and_recomputations_are_counted(forks: ForkServer, tmp_path: Path) -> None:
    check(forks, tmp_path, 2, TWO_RANKS + EXPERTS)


@full_only
@pytest.mark.parametrize("data", [*DATA])
def test_planned_bytes_of_data_parallel_ranks_are_counted(forks: ForkServer, tmp_path: Path, data: str) -> None:
    split = {} if data == "hybrid" else SEQUENCE
    check(forks, tmp_path, 4, [LLAMA | split | DATA[data]])
