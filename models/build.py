"""Build a model from its configuration keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from ..kernels.attention.backends.registry import get_attention_function
from ..kernels.attention.call_spec import AttentionCall, DType, InstalledSoftware
from ..kernels.attention.dispatch import BackendSelection, NoBackendError
from ..kernels.attention.flags import AttentionFlags
from ..kernels.attention.installed_software import detect_installed_software
from .assemble import Backends, LanguageModel, assemble
from .config.batch_shape import BatchSpec
from .config.families import FamilyKeys, FamilySlice, family_slice
from .config.fp8 import check_fp8
from .config.peft import PeftSlice, PromptSlice
from .config.stack import StackSlice
from .config.t5 import T5Slice
from .context_parallel import apply_context_parallel, check_parts
from .dispatch.attention_calls import CallContext, CallKind, choose_backends
from .dispatch.attention_choices import PlannedAttention, plan_attentions
from .dispatch.context_calls import ContextSplit
from .expert_parallel import apply_expert_parallel
from .fp8 import apply_fp8
from .init import InitRules, initialize_, own_initializers
from .memory.host_copies import CopyEngine, CudaCopyEngine, PinnedMemoryPool
from .memory.offload_activations import ActivationOffload
from .memory.offload_weights import WeightOffload
from .parallel.collectives import TensorParallel
from .parallel.context import ContextParallel
from .parallel.expert import ExpertParallel
from .parallel.pipeline import PipelineParallel
from .parallel.relay import Relay
from .peft.added_parameters import peft_initializers
from .peft.apply import apply_peft
from .pipeline_parallel import apply_pipeline_parallel, distribute_layers
from .recompute.analysis import modules_with_rng, training_labels
from .recompute.apply_recompute import apply_recompute
from .tensor_parallel import apply_tensor_parallel, rank_slice

ALL_CALL_KINDS: tuple[CallKind, ...] = ("training", "evaluation", "generation")

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
DTYPE_NAMES: dict[torch.dtype, DType] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Sharding(Protocol):
    """Sharding of the parameters of a model over processes."""

    def shard(self, model: LanguageModel) -> None:
        """Shard the parameters of a model on the meta device, in place."""
        ...

    def initial_rows(self, parameter: Tensor) -> tuple[Tensor, int]:
        """Return the local rows of a parameter, whose memory it shares, and the first of them."""
        ...


def build_model(
    keys: FamilyKeys,
    *,
    vocab_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
    flags: AttentionFlags,
    micro_batch_size: int,
    batch_spec: BatchSpec,
    compute_dtype: torch.dtype | None = None,
    kinds: Collection[CallKind] = ALL_CALL_KINDS,
    sharding: Sharding | None = None,
    peft: PeftSlice | None = None,
    plan: ModelPlan | None = None,
    tensor_parallel: TensorParallel | None = None,
    expert_parallel: ExpertParallel | None = None,
    context_parallel: ContextParallel | None = None,
    pipeline_parallel: PipelineParallel | None = None,
    relay: Relay | None = None,
) -> LanguageModel:
    """Build a model of any family and initialize its weights.

    Args:
        keys: validated configuration keys of the model.
        vocab_size: vocabulary size of the tokenizer.
        device: device of the parameters; `meta` builds shapes only, without weights, attention backends or compilation.
        dtype: dtype of the parameters.
        flags: attention settings from environment variables.
        micro_batch_size: samples per call.
        batch_spec: shape of the samples of training and evaluation.
        compute_dtype: compute dtype under autocast; None: `dtype`.
        kinds: kinds of call the model is built for; it raises on any other.
        sharding: shards the parameters over processes; None for no sharding.
        peft: PEFT scheme, whose parameters are added and trained while the others are frozen; None trains all.
        plan: decisions made before (`plan_model`, of the same arguments); None makes them.
        tensor_parallel: the ranks that share each layer, of which this process builds one's part; None for one.
        expert_parallel: the ranks that share the experts of each layer; None: every rank has all.
        context_parallel: the ranks that share the tokens of each sequence, in training and evaluation; None for one.
        pipeline_parallel: the ranks that share the layers, in training and evaluation; None for one.
        relay: the ranks that share the layers, in evaluation and generation; None for one.

    Raises:
        ValueError: `override_vocab_size` is too small, `compile` is not supported, `peft` selects layers or parameters
            that do not exist, or the model or `peft` cannot be split over the tensor-parallel, context-parallel or
            expert-parallel ranks.
        NoBackendError: no attention backend supports a kind of call.
    """
    device = torch.device(device)
    described = full = family_slice(keys, vocab_size=vocab_size, batch_spec=batch_spec)
    if tensor_parallel is not None:
        described = rank_slice(full, tensor_parallel.size)
        has_experts = any(stack.moe is not None for stack in full.stacks)
        if has_experts and "training" in kinds and not tensor_parallel.sequence:
            raise ValueError(
                f"`sequence_parallel` (False) must be True to train experts on {tensor_parallel.size} tensor-parallel "
                "ranks, each of which routes its own tokens; use `sequence_parallel: True`."
            )
    if context_parallel is not None:
        check_parts(peft, context_parallel.size)
    if "generation" in kinds and (context_parallel is not None or pipeline_parallel is not None):
        axis = "context-parallel" if pipeline_parallel is None else "pipeline"
        raise ValueError(
            f"`kinds` ({', '.join(kinds)}) must be training and evaluation in a model of {axis} ranks; build another "
            "one for generation."
        )

    def assembled(decisions: Mapping[str, BackendSelection], backends: Mapping[str, Backends]) -> LanguageModel:
        """Build the modules of the model on the meta device, split over the ranks, and those of PEFT."""
        model = assemble(described, batch_spec, decisions, backends)
        if tensor_parallel is not None:
            apply_tensor_parallel(model, full, tensor_parallel)
        if peft is not None:
            with torch.device("meta"):
                apply_peft(model, described, peft)
        if expert_parallel is not None:
            apply_expert_parallel(model, expert_parallel)
        if "training" in kinds:
            apply_fp8(model.stacks, described.stacks, tensor_parallel, context_parallel, expert_parallel)
        if pipeline_parallel is not None:
            apply_pipeline_parallel(model, pipeline_parallel)
        if relay is not None:
            distribute_layers(model, relay)
        return model.to(dtype)

    if device.type == "meta":
        return assembled({}, {})
    plan = plan or plan_model(
        described,
        batch_spec,
        call_context(device, compute_dtype or dtype, micro_batch_size, flags),
        flags=flags,
        software=detect_installed_software(device.type),
        kinds=kinds,
        peft=peft,
        context_parallel=None if context_parallel is None else context_parallel.split,
    )
    backends: dict[str, Backends] = {
        planned.name: {
            kind: get_attention_function(
                plan.decisions[planned.label(kind)],
                masked_softmax_fusion=flags.masked_softmax_fusion and planned.attention.masked_softmax_fusion,
            )
            for kind in kinds
        }
        for planned in plan.attentions
    }
    model = assembled(plan.decisions, backends)
    make_copies = copy_engine_factory(device) if "training" in kinds else None
    stages = () if model.pipeline is None else model.pipeline.stages
    described_stacks = zip(described.stacks, model.stacks, training_labels(described), strict=True)
    for index, (stack_slice, stack, labels) in enumerate(described_stacks):
        apply_recompute(
            stack,
            stack_slice,
            plan.decisions,
            *labels,
            offloads=make_copies is not None,
            stages=[stage for stage in stages if stage.stack == index],
            pipeline=pipeline_parallel,
        )
    if context_parallel is not None:
        apply_context_parallel(model, context_parallel)
    model.compiled, model.compile_reason = plan.compiled, plan.compile_reason
    if plan.compiled:
        generation = {planned.label("generation") for planned in plan.attentions}
        whole = all(decision.supports_compile for label, decision in plan.decisions.items() if label not in generation)
        whole &= not any(stack.fp8 is not None and stack.fp8.uses_transformer_engine for stack in described.stacks)
        for stack in model.stacks:
            stack.compile_layers(fullgraph=whole)
    if sharding is None:
        model = model.to_empty(device=device)
        initialize_(model, _init_rules_of(model, described))
    else:
        sharding.shard(model)
        model.to_empty(device=device)
        initialize_(model, _init_rules_of(model, described), sharding.initial_rows)
    if make_copies is not None:
        enable_offloading(model, described, make_copies)
    return model


def _init_rules_of(model: nn.Module, described: FamilySlice) -> InitRules:
    rules = init_rules(described)
    return replace(rules, initializers={**own_initializers(model, rules.seed), **peft_initializers(model)})


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Decisions of `build_model`: attention backends and compilation.

    Attributes:
        attentions: attentions of the model.
        decisions: chosen attention backend and reason by label (`PlannedAttention.label`).
        compiled: the layers are compiled.
        compile_reason: reason for compiling or not.
    """

    attentions: tuple[PlannedAttention, ...]
    decisions: Mapping[str, BackendSelection]
    compiled: bool
    compile_reason: str


def call_context(device: torch.device, dtype: torch.dtype, micro_batch_size: int, flags: AttentionFlags) -> CallContext:
    """Return the properties of all attention calls of a model on a device of this machine.

    Raises:
        ValueError: the compute `dtype` is not supported.
    """
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"`dtype` ({dtype}) must be one of {', '.join(str(known) for known in DTYPE_NAMES)}.")
    return CallContext(
        device=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=DTYPE_NAMES[dtype],
        batch=micro_batch_size,
        deterministic=not flags.allow_nondeterministic,
    )


def plan_model(
    model: FamilySlice,
    batch_spec: BatchSpec,
    context: CallContext,
    *,
    flags: AttentionFlags,
    software: InstalledSoftware,
    kinds: Collection[CallKind] = ALL_CALL_KINDS,
    peft: PeftSlice | None = None,
    context_parallel: ContextSplit | None = None,
) -> ModelPlan:
    """Choose the attention backend of each kind of call, and decide on compilation, without building the model.

    Args:
        model: slice of the model.
        batch_spec: shape of the samples.
        context: device, dtype and micro batch size; the device need not be present.
        flags: attention settings from environment variables.
        software: installed, or assumed, packages.
        kinds: kinds of call the model is built for.
        peft: PEFT scheme; soft prompts lengthen the sequences that attention sees.
        context_parallel: how ranks share the tokens of each sequence; None for one rank.

    Raises:
        ValueError: `compile` or `fp8` is not supported, or the tokens cannot be shared so.
        NoBackendError: no attention backend supports a kind of call.
    """
    if "training" in kinds:
        for stack in model.stacks:
            if stack.fp8 is not None:
                check_fp8(stack.fp8, context["device"], context["capability"], context["dtype"])
    if isinstance(peft, PromptSlice):
        batch_spec = replace(batch_spec, seq_length=batch_spec.seq_length + peft.virtual_tokens)
    attentions = tuple(plan_attentions(model, batch_spec, context, context_parallel))
    decisions: dict[str, BackendSelection] = {}
    problems: list[NoBackendError] = []
    for planned in attentions:
        calls: dict[CallKind, AttentionCall] = {kind: call for kind, call in planned.calls.items() if kind in kinds}
        try:
            chosen = choose_backends(planned.attention, calls, flags, software)
        except NoBackendError as error:
            message = f"attention `{planned.name}`: {error}" if planned.name else str(error)
            problems.append(NoBackendError(message, error.rows))
            continue
        decisions |= {planned.label(kind): decision for kind, decision in chosen.items()}
    if problems:
        rows = tuple(row for problem in problems for row in problem.rows)
        raise NoBackendError("\n".join(map(str, problems)), rows)
    uses_rng = "training" in kinds and any(modules_with_rng(model, decisions))
    compiled, reason = decide_compile(model.compile, context["device"], software.torch, uses_rng=uses_rng)
    return ModelPlan(attentions, decisions, compiled, reason)


def copy_engine_factory(device: torch.device) -> Callable[[], CopyEngine] | None:
    """Return a factory of copy engines that share one pool of pinned memory; None for a device other than a GPU."""
    return partial(CudaCopyEngine, device, PinnedMemoryPool(pinned=True)) if device.type == "cuda" else None


def enable_offloading(model: LanguageModel, model_slice: FamilySlice, make_engine: Callable[[], CopyEngine]) -> None:
    """Enable the CPU offloading of activations and weights that the slice asks for; weights must be on their device.

    Args:
        model: built from `model_slice`.
        model_slice: slice of the model.
        make_engine: factory of copy engines; weights and activations get separate streams.

    Raises:
        ValueError: weight offloading with sharded weights.
    """
    for stack_slice, stack in zip(model_slice.stacks, model.stacks, strict=True):
        settings = stack_slice.offload
        if settings is None:
            continue
        if settings.activations:
            stack.activation_offload = ActivationOffload(make_engine(), settings.layers)
        if settings.weights:
            stack.weight_offload = WeightOffload(make_engine(), list(stack.layers), settings.layers)


def num_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model, counting shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------- policies


def decide_compile(
    requested: bool | None, device_type: str, torch_release: tuple[int, int], *, uses_rng: bool
) -> tuple[bool, str]:
    """Decide whether to compile the layers; return the decision and its reason.

    Args:
        uses_rng: the layers draw from PyTorch's generator in training (`modules_with_rng`).

    Raises:
        ValueError: compilation is requested where it would silently give wrong random numbers.
    """
    wrong_masks = uses_rng and device_type == "cuda" and torch_release >= (2, 13)
    release = ".".join(map(str, torch_release))
    if requested is False:
        return False, "`compile` is False"
    if wrong_masks:
        if requested:
            raise ValueError(
                f"`compile` (True) must not be combined with `attention_dropout` in a backend that is not ours, on a "
                f"GPU under PyTorch {release}, whose compiled random numbers are wrong (pytorch #198333); use "
                "compile=null, attention_backend=triton, or PyTorch 2.12."
            )
        return False, f"random numbers compiled by PyTorch {release} are wrong (pytorch #198333)"
    if requested:
        return True, "`compile` is True"
    if device_type == "cuda":
        return True, "on a GPU"
    return False, f"off by default on {device_type}; `compile: True` forces it"


def init_rules(model: FamilySlice) -> InitRules:
    """Return the initialization of a model; in T5, the decoder's parameters follow the keys of the decoder."""
    match model:
        case T5Slice():
            encoder, decoder = (_stack_rules(model.seed, stack) for stack in model.stacks)
            prefix_rules = dict.fromkeys(("decoder.", "decoder_position", "cross_positions.", "head."), decoder)
            return replace(encoder, embedding_std=model.embedding_std, prefix_rules=prefix_rules)
        case _:
            return replace(_stack_rules(model.seed, model.stack), embedding_std=model.embedding_std)


def _stack_rules(seed: int, stack: StackSlice) -> InitRules:
    return InitRules(
        seed=seed,
        std=stack.init_std,
        output_std=stack.output_init_std,
        norm_weight=0.0 if stack.norm.zero_centered else 1.0,
    )
