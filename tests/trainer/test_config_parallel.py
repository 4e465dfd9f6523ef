"""Keys of parallelism that do not fit are told at once, each with a cure that is accepted."""

from __future__ import annotations

import pytest
from config_helpers import load, problems
from tiers import looped

DEVICES = ["data=mock", "trainer.devices=8", "model.micro_batch_size=1"]
MOE = ["model.num_moe_experts=8", "model.moe_router_topk=2", "model.global_batch_size=32"]
TENSOR, CONTEXT = "model.tensor_model_parallel_size", "model.context_parallel_size"
SEQUENCE, OVERLAP = [f"{TENSOR}=2", "model.sequence_parallel=true"], "model.ub_tp_comm_overlap=true"
EXPERT, COMM = "model.expert_model_parallel_size", "model.cp_comm_type"


@looped(
    ("keys", "refused", "words"),
    [
        ([f"{TENSOR}=16", "model.num_attention_heads=16"], TENSOR, "the 8 processes must be a multiple of"),
        ([f"{TENSOR}=8", "model.num_attention_heads=4"], TENSOR, "must divide `num_attention_heads` (4)"),
        ([f"{CONTEXT}=2", "model.encoder_seq_length=66"], CONTEXT, "must divide `encoder_seq_length` (66)"),
        ([f"{CONTEXT}=4", f"{COMM}=a2a+p2p"], "model.hierarchical_context_parallel_sizes", "must be two sizes"),
        ([f"{EXPERT}=2"], EXPERT, "needs a model with experts"),
        ([f"{EXPERT}=8", *MOE, "model.num_moe_experts=4"], EXPERT, "must divide `num_moe_experts` (4)"),
        ([f"{TENSOR}=2", *MOE], "model.sequence_parallel", "needs `sequence_parallel`"),
        (
            [f"{EXPERT}=2", *MOE, "model.moe_token_dispatcher_type=flex"],
            "model.moe_token_dispatcher_type",
            "needs the kernels of DeepEP",
        ),
        ([f"{CONTEXT}=2", "model.peft.peft_scheme=ptuning"], CONTEXT, "does not support soft prompts"),
        (
            [f"{EXPERT}=2", *MOE, "model.fsdp=True", "model.fsdp_sharding_strategy=hybrid", "model.fsdp_shard_size=4"],
            "model.fsdp_sharding_strategy",
            "does not support experts that ranks share",
        ),
    ],
)
def test_what_does_not_fit_is_told_with_a_cure(keys: list[str], refused: str, words: str) -> None:
    given = [*DEVICES, "model.global_batch_size=32", "model.num_attention_heads=8", *keys]
    found = problems(*given)
    assert refused in found, found.keys()
    assert words in found[refused].rule
    cure = found[refused].fix.split(", or ")[0].removeprefix("use ").split()
    assert refused not in _still(*given, *cure)


def _still(*overrides: str) -> set[str]:
    try:
        load(*overrides)
    except Exception:
        return set(problems(*overrides))
    return set()


@looped(
    ("keys", "named"),
    [
        (["model.sequence_parallel=True"], "model.sequence_parallel"),
        ([f"{COMM}=a2a"], COMM),
        ([f"{TENSOR}=2", OVERLAP], "model.ub_tp_comm_overlap"),
        ([*SEQUENCE, OVERLAP, "trainer.accelerator=cpu"], "model.ub_tp_comm_overlap"),
        (
            [*SEQUENCE, OVERLAP, "model.tp_comm_overlap_ag=false", "model.tp_comm_overlap_rs=false"],
            OVERLAP.split("=")[0],
        ),
        ([*SEQUENCE, "model.tp_comm_overlap_rs=false"], "model.tp_comm_overlap_rs"),
        (["model.hierarchical_context_parallel_sizes=[2,2]"], "model.hierarchical_context_parallel_sizes"),
        ([*MOE, "model.moe_token_dispatcher_type=allgather"], "model.moe_token_dispatcher_type"),
    ],
)
def test_what_has_no_effect_is_told(keys: list[str], named: str) -> None:
    config = load(*DEVICES, "model.global_batch_size=32", *keys)
    assert named in {finding.keys[0] for finding in config.findings}


@pytest.mark.parametrize("size", [1, 2])
def test_a_dispatcher_acts_on_several_expert_ranks(size: int) -> None:
    config = load(*DEVICES, *MOE, f"{EXPERT}={size}", "model.moe_token_dispatcher_type=alltoall")
    told = {finding.keys[0] for finding in config.findings}
    assert ("model.moe_token_dispatcher_type" in told) == (size == 1)
