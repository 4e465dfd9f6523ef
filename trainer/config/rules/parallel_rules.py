"""Rules of model parallelism: which models, samples and processes can be split over which ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....models.config.families import keys_by_stack
from ....models.config.key_block import Finding
from ....models.parallel.layout import ParallelLayout
from ....models.parallel.rules import (
    COMM_TYPE,
    CONTEXT,
    EXPERT,
    PIPELINE,
    TENSOR,
    SplitModel,
    parallel_rules,
    world_rules,
)
from ..data_task import task_from_keys
from .rule_context import RuleContext, no_effect, num_data_ranks, unused

_HIERARCHY = "model.hierarchical_context_parallel_sizes"


def processes_make_up_replicas(context: RuleContext) -> Iterator[Finding]:
    """The processes make up whole replicas of the model; with `devices: auto` a run checks that when it starts."""
    trainer = context.root.trainer
    if isinstance(trainer.devices, int) and _mesh(context).model_ranks > 1:
        yield from world_rules(_mesh(context), trainer.devices, trainer.num_nodes)


def models_and_samples_split(context: RuleContext) -> Iterator[Finding]:
    """Heads, channels, vocabulary, tokens and experts are split evenly."""
    keys = context.root.model
    try:
        task = task_from_keys(keys)
    except ValueError:  # reported by another rule
        return
    length = "model.seq_length" if keys.family == "t5" else "model.encoder_seq_length"
    lengths = {length if keys.data.seq_length is None else "model.data.seq_length": task.length}
    if task.is_encoder_decoder:
        lengths["model.data.seq_length_dec"] = task.decoder_length
    mesh = replace(_mesh(context), sequence=keys.sequence_parallel)
    split = SplitModel(
        keys=keys, mesh=mesh, lengths=lengths, micro_batch=keys.micro_batch_size, comm_type=keys.cp_comm_type
    )
    auto = context.root.trainer.devices == "auto"
    yield from (found for found in parallel_rules(split) if not (auto and found.keys == (EXPERT, "trainer.devices")))


def overlap_needs_sequence_parallel(context: RuleContext) -> Iterator[Finding]:
    """Communication of tensor-parallel ranks overlaps where they share the tokens, as in Megatron, and on GPUs;
    `accelerator: auto` is checked when the run starts.
    """
    keys, accelerator = context.root.model, context.root.trainer.accelerator
    path, parts = "model.ub_tp_comm_overlap", ("model.tp_comm_overlap_ag", "model.tp_comm_overlap_rs")
    if not keys.ub_tp_comm_overlap:
        for part in parts:
            yield from unused(context, part, path, "without `ub_tp_comm_overlap`")
    elif keys.tensor_model_parallel_size == 1 or not keys.sequence_parallel:
        missing = TENSOR if keys.tensor_model_parallel_size == 1 else "model.sequence_parallel"
        yield no_effect(path, missing, "without tensor-parallel ranks and `sequence_parallel`")
    elif accelerator in ("cpu", "mps"):
        yield no_effect(path, "trainer.accelerator", f"with `accelerator` ({accelerator})")
    elif not (keys.tp_comm_overlap_ag or keys.tp_comm_overlap_rs):
        yield no_effect(path, parts[0], "without `tp_comm_overlap_ag` and `tp_comm_overlap_rs`")


def parts_of_models_split(context: RuleContext) -> Iterator[Finding]:
    """Some parts of a model are not supported on several ranks."""
    keys = context.root.model
    scheme = keys.peft.peft_scheme
    for path, why in ((CONTEXT, "after the ranks have shared them"), (PIPELINE, "inside the first stage")):
        name = path.removeprefix("model.")
        if getattr(keys, name) > 1 and scheme in ("ptuning", "prompt"):
            message = (
                f"`{name}` ({getattr(keys, name)}) does not support soft prompts (`peft_scheme`: {scheme}), which "
                f"lengthen sequences {why}"
            )
            yield Finding.error((path, "model.peft.peft_scheme"), message, f"{path}=1")
    if keys.expert_model_parallel_size > 1 and keys.fsdp and keys.fsdp_sharding_strategy == "hybrid":
        yield Finding.error(
            ("model.fsdp_sharding_strategy", EXPERT),
            "`fsdp_sharding_strategy` (hybrid) does not support experts that ranks share "
            f"(`expert_model_parallel_size`: {keys.expert_model_parallel_size})",
            "model.fsdp_sharding_strategy=full",
        )


def hierarchy_of_context_ranks_fits(context: RuleContext) -> Iterator[Finding]:
    """`a2a+p2p` needs the sizes of its groups, which multiply to the context-parallel ranks."""
    keys = context.root.model
    sizes, ranks = keys.hierarchical_context_parallel_sizes, keys.context_parallel_size
    if keys.cp_comm_type != "a2a+p2p" or ranks == 1:
        if sizes is not None:
            yield Finding.warning(
                (_HIERARCHY, COMM_TYPE),
                f"`hierarchical_context_parallel_sizes` ({sizes}) has no effect without `cp_comm_type` a2a+p2p and "
                "several context-parallel ranks",
                f"{_HIERARCHY}=null",
            )
        return
    if sizes is None or sizes[0] * sizes[1] != ranks:
        fits = next((size for size in range(2, ranks) if ranks % size == 0), None)
        yield Finding.error(
            (_HIERARCHY, COMM_TYPE, CONTEXT),
            f"`hierarchical_context_parallel_sizes` ({sizes}) must be two sizes whose product is "
            f"`context_parallel_size` ({ranks}), for `cp_comm_type` a2a+p2p",
            f"{_HIERARCHY}=[{fits},{ranks // fits}]" if fits else f"{COMM_TYPE}=p2p",
        )


def dispatcher_needs_expert_ranks(context: RuleContext) -> Iterator[Finding]:
    """Dispatchers send tokens to experts on other ranks; `flex` through the memory of GPUs, which a run checks."""
    accelerator = context.root.trainer.accelerator
    ranks = context.root.model.expert_model_parallel_size
    for at, stack in keys_by_stack(context.root.model).items():
        path, name = f"model.{at}moe_token_dispatcher_type", stack.moe_token_dispatcher_type
        if name is None:
            continue
        if ranks == 1:
            message = (
                f"`moe_token_dispatcher_type` ({name}) has no effect with `expert_model_parallel_size` (1): each rank "
                "holds all experts, and no tokens are exchanged."
            )
            yield Finding.info((path,), message)
        elif name == "flex" and accelerator in ("cpu", "mps"):
            message = f"`moe_token_dispatcher_type` (flex) needs GPUs, not `accelerator` ({accelerator})"
            yield Finding.error((path, "trainer.accelerator"), message, f"{path}=alltoall")
        elif name == "flex" and (stack.moe_pad_expert_input_to_capacity or stack.moe_token_dropping):
            message = "`moe_token_dispatcher_type` (flex) does not pad experts to their capacity"
            yield Finding.error((path, f"model.{at}moe_pad_expert_input_to_capacity"), message, f"{path}=alltoall")


def _mesh(context: RuleContext) -> ParallelLayout:
    keys = context.root.model
    return ParallelLayout(
        data=num_data_ranks(context),
        tensor=keys.tensor_model_parallel_size,
        context=keys.context_parallel_size,
        pipeline=keys.pipeline_model_parallel_size,
        expert=keys.expert_model_parallel_size,
    )
