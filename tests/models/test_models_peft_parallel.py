"""Fine-tuned models split over tensor-parallel ranks have the loss, gradients and logits of one process, in fp64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from parallel_models import build
from tiers import extra, full_only

from stoker.models.parallel.collectives import TensorParallel, shard_tokens
from stoker.models.peft.apply import trainable_parameters
from stoker.trainer.utils.local_shard import local_shards

LLAMA: dict[str, Any] = {
    "activation": "swiglu", "num_query_groups": 2, "normalization": "rmsnorm", "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False, "bias": False,
}  # fmt: skip
SHARED_HEADS: dict[str, Any] = {"num_query_groups": 1, "qk_layernorm": True}
T5: dict[str, Any] = {
    "family": "t5", "position_embedding_type": "relative", "relative_attention_num_buckets": 8, "activation": "geglu",
    "num_query_groups": 1,
}  # fmt: skip


def lora(*targets: str, **more: Any) -> dict[str, Any]:
    keys = {"target_modules": targets or ["all"], "adapter_dim": 3, "alpha": 5.0, "row_init_method": "normal"}
    return {"peft_scheme": "lora", "lora_tuning": keys | more}


ADAPTERS: dict[str, Any] = {"peft_scheme": "adapter", "adapter_tuning": {"adapter_dim": 5, "row_init_method": "normal"}}
PROMPT = {"peft_scheme": "ptuning", "p_tuning": {"virtual_tokens": 4, "bottleneck_dim": 6, "embedding_dim": 5}}
IA3 = {"peft_scheme": "ia3"}
SELECTED = {"peft_scheme": "selective", "selective_tuning": {"tunable_base_param_names": ["layers.1.mlp", "qkv.bias"]}}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 8}
RECOMPUTED = {"activations_checkpoint_modules": ["norm", "mlp_activation", "core_attention"]}

CASES: list[tuple[dict[str, Any], bool]] = [
    ({**LLAMA, "peft": lora()}, True),
    ({**SHARED_HEADS, "peft": lora(adapter_dropout=0.3)}, False),
    ({**T5, "peft": lora(adapter_dropout=0.3)}, True),
    ({**SHARED_HEADS, "peft": lora()}, False),
    ({**T5, "peft": lora()}, True),
    ({**SHARED_HEADS, "peft": IA3}, True),
    ({**SHARED_HEADS, "peft": ADAPTERS, "transformer_block_type": "normformer"}, True),
    ({**LLAMA, "position_embedding_type": "alibi", "peft": PROMPT}, True),
    *extra(
        ({**SHARED_HEADS, "peft": SELECTED}, True),
        *(
            ({**model, "peft": lora(adapter_dropout=0.3)}, sequence)
            for model in (LLAMA, SHARED_HEADS, T5, LLAMA | RECOMPUTED, {"family": "bert"})
            for sequence in (False, True)
        ),
        ({**LLAMA, **EXPERTS, "peft": lora(adapter_dropout=0.3)}, True),
        ({**LLAMA, "ffn_dropout": 0.2, "peft": lora()}, True),
        ({**LLAMA, "compile": True, "peft": lora(adapter_dropout=0.3)}, True),
        ({**T5, "peft": IA3}, False),
        ({**LLAMA, **EXPERTS, "peft": lora()}, True),
        ({**SHARED_HEADS, "peft": lora()}, True),
        ({**LLAMA, "peft": lora("attention_qkv", variant="nemo")}, True),
        ({**LLAMA, **RECOMPUTED, "peft": lora("mlp", layer_selection=[2])}, True),
        ({**T5, "peft": lora()}, False),
        ({**T5, "peft": IA3}, True),
        ({**T5, "peft": {**ADAPTERS, "adapter_tuning": {**ADAPTERS["adapter_tuning"], "adapter_dropout": 0.3}}}, True),
        ({**T5, "peft": ADAPTERS}, False),
        ({**T5, "peft": PROMPT}, True),
        ({**LLAMA, "peft": IA3}, False),
        ({"family": "bert", "peft": lora()}, True),
    ),
]


@pytest.mark.parametrize("size", [2, *extra(4)])
def test_ranks_together_are_one_process(size: int, forks: ForkServer, tmp_path: Path) -> None:
    for case, differences in zip(
        CASES, forks.call("parallel_models", "compare", str(tmp_path), size, CASES), strict=True
    ):
        exact = {name: value for name, value in differences.items() if name != "parts"}
        assert all(value < 1e-12 for value in exact.values()), (case, differences)


@pytest.mark.parametrize(
    "keys", [{**SHARED_HEADS, "peft": lora()}, *extra({**T5, "peft": IA3}, {**LLAMA, "peft": lora()})]
)
def test_ranks_together_save_the_tensors_of_one_process(keys: dict[str, Any]) -> None:
    """And each element once."""
    found = {name: torch.full_like(each, math.nan) for name, each in trainable_parameters(build(keys)).items()}
    for rank in range(4):
        part = build(keys, TensorParallel(rank, 4, "no group"))
        for name, shard in local_shards(part, trainable_parameters(part)).items():
            saved = shard.part_to_save()
            columns = slice(None)
            if saved.columns is not None:
                columns = slice(saved.columns.first, saved.columns.first + saved.local.shape[1])
            for start, rows in saved.local_ranges():
                full = found[name][rows.first : rows.first + rows.size]
                full = full if full.ndim == 1 else full[:, columns]
                assert full.isnan().all(), name
                full.copy_(saved.local[start : start + rows.size])
    for name, wanted in trainable_parameters(build(keys)).items():
        assert torch.equal(found[name], wanted), name


def test_tokens_that_do_not_split_evenly_are_refused() -> None:
    ranks = TensorParallel(0, 4, "no group", sequence=True)
    odd = build(
        {"peft": {"peft_scheme": "ptuning", "p_tuning": {"virtual_tokens": 3}}, "position_embedding_type": "alibi"},
        ranks,
    )
    with pytest.raises(
        ValueError, match=r"`tokens` \(2 x 19, with those of a prompt\) must be a multiple of the 4 ranks"
    ):
        shard_tokens(odd.prompt(torch.zeros(2, 16, 32)), ranks)


@full_only
def test_compiled_layers_communicate_inside_their_graphs(forks: ForkServer, tmp_path: Path) -> None:
    norm = {"transformer_block_type": "normformer"}
    cases = [({**keys, **norm, "compile": True}, True) for keys in (LLAMA, SHARED_HEADS)]
    cases += [
        ({**keys, "peft": peft, "compile": True}, True) for keys in (LLAMA, T5) for peft in (lora(), IA3, ADAPTERS)
    ]
    for case, differences in zip(cases, forks.call("parallel_models", "compare", str(tmp_path), 2, cases), strict=True):
        assert all(value < 1e-12 for name, value in differences.items() if name != "parts"), (case, differences)
