"""Keys of parallelism that do not fit are told at once, each with a cure that is accepted."""

from __future__ import annotations

import pytest
from config_helpers import keep_last_overrides, load, problems
from tiers import looped

DEVICES = ["data=mock", "trainer.devices=8", "model.micro_batch_size=1"]
MOE = ["model.num_moe_experts=8", "model.moe_router_topk=2", "model.global_batch_size=32"]
PADDED = ["model.moe_pad_expert_input_to_capacity=true", "model.moe_expert_capacity_factor=1.0"]
TENSOR, CONTEXT = "model.tensor_model_parallel_size", "model.context_parallel_size"
SEQUENCE, OVERLAP = [f"{TENSOR}=2", "model.sequence_parallel=true"], "model.ub_tp_comm_overlap=true"
PIPELINE, VIRTUAL = "model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size"
FIRST, LAST = (f"model.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
COUNTS = [f"model.account_for_{part}_in_pipeline_split=true" for part in ("embedding", "loss")]
COUNTS_OFF = " ".join(key.replace("=true", "=false") for key in COUNTS)
STACKS = ["model.encoder.num_layers=1", "model.decoder.num_layers=6"]
OFFLOAD, FEWER = "model.cpu_offloading", "model.activations_checkpoint_layers_per_pipeline"
LAYERS, T5 = "model.num_layers", ["model=t5_tiny"]
SPLIT, PARTIAL = "model.pipeline_model_parallel_split_rank", "num_micro_batches_with_partial_activation_checkpoints"
BLOCK = [f"model.activations_checkpoint_{key}" for key in ("granularity=full", "method=block", "num_layers=1")]
EXPERT, COMM = "model.expert_model_parallel_size", "model.cp_comm_type"


def lora(layers: list[int] | None = None) -> list[str]:
    return ["model.peft.peft_scheme=lora", f"model.peft.lora_tuning.layer_selection={layers or 'null'}"]


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
            [f"{EXPERT}=2", *MOE, "model.moe_token_dispatcher_type=flex", "trainer.accelerator=cpu"],
            "model.moe_token_dispatcher_type",
            "needs GPUs, not `accelerator` (cpu)",
        ),
        (
            [f"{EXPERT}=2", *MOE, *PADDED, "model.moe_token_dispatcher_type=flex"],
            "model.moe_token_dispatcher_type",
            "does not pad experts",
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


@looped(
    ("keys", "refused", "words", "cure"),
    [
        ([f"{VIRTUAL}=2"], VIRTUAL, "needs several ranks of a pipeline", f"{VIRTUAL}=null"),
        ([f"{PIPELINE}=4", f"{LAYERS}=10"], PIPELINE, "(4) must divide `num_layers` (10)", f"{LAST}=1"),
        ([f"{PIPELINE}=8", f"{LAYERS}=6"], PIPELINE, "(8) must divide `num_layers` (6)", f"{PIPELINE}=2"),
        ([f"{PIPELINE}=8", f"{LAYERS}=1"], PIPELINE, "(8) must divide `num_layers` (1)", f"{LAYERS}=8"),
        (
            [f"{PIPELINE}=2", f"{VIRTUAL}=4", f"{LAYERS}=12"],
            PIPELINE,
            "times `virtual_pipeline_model_parallel_size` (4) must divide `num_layers` (12)",
            f"{VIRTUAL}=2",
        ),
        ([f"{PIPELINE}=4", f"{LAYERS}=8", *COUNTS], PIPELINE, "must divide `num_layers` (8) plus 2", COUNTS_OFF),
        (
            [f"{PIPELINE}=4", f"{LAYERS}=9", COUNTS[0], f"{LAST}=3"],
            PIPELINE,
            "`account_for_embedding_in_pipeline_split` (True) cannot be combined with",
            COUNTS_OFF.split()[0],
        ),
        (
            [f"{PIPELINE}=4", f"{LAYERS}=12", f"{FIRST}=2"],
            PIPELINE,
            "`num_layers_in_first_pipeline_stage` (2) must leave the other ranks",
            f"{FIRST}=3",
        ),
        (
            [f"{PIPELINE}=2", f"{LAYERS}=8", f"{FIRST}=4", f"{LAST}=3", f"{VIRTUAL}=2"],
            PIPELINE,
            "and `virtual_pipeline_model_parallel_size` (2) divide the layers of each",
            f"{LAST}=4",
        ),
        (
            [f"{PIPELINE}=4", f"{VIRTUAL}=2", f"{LAYERS}=8", "model.global_batch_size=20"],
            "model.global_batch_size",
            "* data-parallel ranks (2) * pipeline ranks (4), with virtual stages",
            "model.global_batch_size=16",
        ),
        (
            [f"{PIPELINE}=4", f"{VIRTUAL}=2", f"{LAYERS}=8", "model.rampup_batch_size=[8,4,100]"],
            "model.rampup_batch_size",
            "the increment of `rampup_batch_size` (4) must be a multiple of `micro_batch_size` times the data-parallel "
            "ranks and, with virtual stages, those of a pipeline (8)",
            "model.rampup_batch_size=[8,8,100]",
        ),
        (
            [f"{PIPELINE}=2", "model.cpu_offloading=true"],
            "model.cpu_offloading",
            "(2), whose",
            "model.cpu_offloading=false",
        ),
        ([f"{PIPELINE}=2", "model.peft.peft_scheme=ptuning"], PIPELINE, "soft prompts", None),
        (
            [f"{PIPELINE}=3", f"{LAYERS}=6"],
            PIPELINE,
            "the 8 processes must be a multiple of `pipeline_model_parallel_size` (3)",
            None,
        ),
        ([*T5, f"{PIPELINE}=2"], SPLIT, "(0), the ranks that have the encoder, must be from 1 to 1", f"{SPLIT}=1"),
        ([*T5, f"{PIPELINE}=4", f"{SPLIT}=4", *STACKS], SPLIT, "(4), the ranks", f"{SPLIT}=1"),
        (
            [*T5, f"{PIPELINE}=4", f"{SPLIT}=2", *STACKS],
            SPLIT,
            "(2) must divide `encoder.num_layers` (1)",
            f"{SPLIT}=1",
        ),
        (
            [*T5, f"{PIPELINE}=2", f"{SPLIT}=1", f"{VIRTUAL}=2"],
            VIRTUAL,
            "is not supported in a pipeline with an encoder and a decoder",
            f"{VIRTUAL}=null",
        ),
        ([f"{PIPELINE}=2", *lora([3, 4])], PIPELINE, "leaves rank 0 (layers 1-2) nothing to", f"{PIPELINE}=1"),
        (
            [f"{PIPELINE}=2", f"{VIRTUAL}=2", *lora([1, 3])],
            PIPELINE,
            "leaves rank 1 (layers 2, 4) nothing to train with `layer_selection` ([1, 3])",
            f"{PIPELINE}=1 {VIRTUAL}=null",
        ),
        (
            [*T5, f"{PIPELINE}=4", f"{SPLIT}=1", *STACKS, *lora([1])],
            PIPELINE,
            "leaves rank 2 (layers 3-4) and rank 3 (layers 5-6) nothing",
            f"{PIPELINE}=1",
        ),
        (
            [f"{PIPELINE}=4", *COUNTS, "model.num_layers=2", *lora()],
            PIPELINE,
            "leaves rank 0 (no layers) and rank 3 (no layers) nothing to train with `peft_scheme` (lora)",
            f"{PIPELINE}=1",
        ),
        ([*T5, f"{PIPELINE}=2", f"{SPLIT}=1", f"{FIRST}=1"], FIRST, "is not supported in", f"{FIRST}=null"),
        ([*T5, f"{PIPELINE}=2", f"{SPLIT}=1", COUNTS[0]], COUNTS[0][:-5], "is not supported in", COUNTS_OFF.split()[0]),
    ],
)
def test_layers_that_cannot_be_distributed_are_told_with_a_cure(
    keys: list[str], refused: str, words: str, cure: str | None
) -> None:
    given = keep_last_overrides([*DEVICES, "model.global_batch_size=32", *keys])
    found = problems(*given)
    assert refused in found, found.keys()
    assert words in found[refused].rule
    if cure is not None:
        assert found[refused].fix.split(", or ")[0] == cure
        load(*given, *cure.split())


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
        ([f"{FIRST}=2"], FIRST),
        ([COUNTS[1]], COUNTS[1][:-5]),
        ([f"{SPLIT}=1"], SPLIT),
        ([f"{PIPELINE}=2", f"{SPLIT}=1"], SPLIT),
        ([*T5, f"{SPLIT}=1"], SPLIT),
        ([*BLOCK, f"model.{PARTIAL}=1"], f"model.{PARTIAL}"),
        (
            [*BLOCK, "model.activations_checkpoint_layers_per_pipeline=1"],
            "model.activations_checkpoint_layers_per_pipeline",
        ),
        ([*BLOCK, f"{PIPELINE}=4", f"model.{PARTIAL}=4"], f"model.{PARTIAL}"),
        ([*BLOCK[:2], f"{BLOCK[2][:-1]}3", f"{PIPELINE}=2"], BLOCK[2][:-2]),
    ],
)
def test_what_has_no_effect_is_told(keys: list[str], named: str) -> None:
    config = load(*keep_last_overrides([*DEVICES, "model.global_batch_size=32", *keys]))
    assert named in {finding.keys[0] for finding in config.findings}


@pytest.mark.parametrize("size", [1, 2])
def test_a_dispatcher_acts_on_several_expert_ranks(size: int) -> None:
    config = load(*DEVICES, *MOE, f"{EXPERT}={size}", "model.moe_token_dispatcher_type=alltoall")
    told = {finding.keys[0] for finding in config.findings}
    assert ("model.moe_token_dispatcher_type" in told) == (size == 1)
