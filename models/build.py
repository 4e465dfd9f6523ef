"""From keys to a model: the only reader of the configuration in this room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from ..kernels.attention.backends.registry import function_of, installed, torch_version
from ..kernels.attention.call_spec import AttentionCall, DType
from ..kernels.attention.dispatch import Decision, NoBackendError
from ..kernels.attention.flags import AttentionFlags
from .assemble import Backends, LanguageModel, assemble
from .bert import BERT
from .config.batch_shape import SampleForm
from .config.families import FamilyKeys, FamilySlice, family_slice
from .config.gpt import GPTKeys
from .config.peft_slice import PeftSlice, PromptSlice, peft_dropout
from .config.slices import StackSlice
from .config.t5_slice import T5Slice
from .dispatch.attention_calls import CallKind, decide
from .dispatch.attention_choices import CallFacts, PlannedAttention, planned_attentions
from .gpt import GPT
from .init import InitRules, initialise_
from .memory.host_copies import Copies, CudaCopies, HostPool
from .memory.offload_activations import ActivationOffload
from .memory.offload_weights import WeightOffload
from .peft.added_parameters import initial_values
from .peft.apply import adapt
from .recompute.analysis import has_dropout, training_labels
from .recompute.policies import policies_of
from .stack import Stack
from .t5 import T5

ALL_KINDS: tuple[CallKind, ...] = ("training", "evaluation", "generation")

DTYPE_NAMES: dict[torch.dtype, DType] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Sharding(Protocol):
    """What cuts the parameters of a model over several processes."""

    def cut(self, model: LanguageModel) -> None:
        """Replace the parameters of a model on the meta device by this process's parts of them."""
        ...

    def fill(self, parameter: Tensor, whole: Tensor) -> None:
        """Copy this process's part of a whole parameter (fp32, CPU) into what `cut` made of it."""
        ...


def build_model(
    keys: FamilyKeys,
    *,
    vocab_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
    flags: AttentionFlags,
    micro_batch_size: int,
    form: SampleForm,
    compute_dtype: torch.dtype | None = None,
    kinds: Collection[CallKind] = ALL_KINDS,
    sharding: Sharding | None = None,
    peft: PeftSlice | None = None,
) -> LanguageModel:
    """Build a model of any family with its initial weights.

    Args:
        keys: what the model is; the rules have found no error in it.
        vocab_size: tokens of the tokenizer.
        device: where the parameters shall lie; `meta` builds shapes only, without weights, decisions or compilation.
        dtype: of the parameters.
        flags: what the environment says about attention.
        micro_batch_size: samples in a call.
        form: the samples of training and evaluation.
        compute_dtype: the dtype of the arithmetic where it is not that of the parameters.
        kinds: the kinds of call the run can make; the model raises on any other.
        sharding: cuts the parameters over processes; None leaves them whole.
        peft: what is added to the model and trained, the rest being frozen; None trains all of it.

    Raises:
        ValueError: `override_vocab_size` is too small, `compile` cannot be had, or `peft` names what is not there.
        NoBackendError: no attention backend is left for a kind of call.
    """
    device = torch.device(device)
    described = family_slice(keys, vocab_size=vocab_size, form=form)
    if device.type == "meta":
        return _assembled(described, form, {}, {}, peft).to(dtype)
    plan = plan_model(
        described,
        device=device,
        dtype=compute_dtype or dtype,
        flags=flags,
        micro_batch_size=micro_batch_size,
        form=replace(form, length=form.length + peft.virtual_tokens) if isinstance(peft, PromptSlice) else form,
        kinds=kinds,
        peft=peft,
    )
    backends: dict[str, Backends] = {
        planned.name: {
            kind: function_of(
                plan.decisions[planned.label(kind)],
                masked_softmax_fusion=flags.masked_softmax_fusion and planned.attention.masked_softmax_fusion,
            )
            for kind in kinds
        }
        for planned in plan.attentions
    }
    model = _assembled(described, form, plan.decisions, backends, peft).to(dtype)
    make_copies = copies_of(device) if "training" in kinds else None
    for part, stack, labels in zip(described.stacks, stacks_of(model), training_labels(described), strict=True):
        for policy in policies_of(part, plan.decisions, *labels, offloads=make_copies is not None):
            policy.apply(stack)
    model.compiled, model.compile_reason = plan.compiled, plan.compile_reason
    if plan.compiled:
        generation = {planned.label("generation") for planned in plan.attentions}
        whole = all(decision.compiles for label, decision in plan.decisions.items() if label not in generation)
        for stack in stacks_of(model):
            stack.compile_parts(hooked=sharding is not None, whole=whole)
    if sharding is None:
        model = model.to_empty(device=device)
        initialise_(model, _init_rules_of(model, described))
    else:
        sharding.cut(model)
        model.to_empty(device=device)
        initialise_(model, _init_rules_of(model, described), sharding.fill)
    if make_copies is not None:
        offload(model, described, make_copies)
    return model


def _assembled(
    described: FamilySlice,
    form: SampleForm,
    decisions: Mapping[str, Decision],
    backends: Mapping[str, Backends],
    peft: PeftSlice | None,
) -> LanguageModel:
    """The modules of a model on the meta device, with what fine-tuning adds."""
    model = assemble(described, form, decisions, backends)
    if peft is not None:
        with torch.device("meta"):
            adapt(model, stacks_of(model), described, peft)
    return model


def _init_rules_of(model: nn.Module, described: FamilySlice) -> InitRules:
    return replace(init_rules(described), added=initial_values(model))


def build_gpt(
    keys: GPTKeys,
    *,
    vocab_size: int,
    device: torch.device | str,
    dtype: torch.dtype,
    flags: AttentionFlags,
    micro_batch_size: int,
    seq_length: int | None = None,
    compute_dtype: torch.dtype | None = None,
    kinds: Collection[CallKind] = ALL_KINDS,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    sharding: Sharding | None = None,
) -> GPT:
    """`build_model` for a GPT.

    Args:
        keys: and all others: as in `build_model`.
        seq_length: tokens in a sample; None is `encoder_seq_length`.
        reset_position_ids: in training and evaluation the positions of each document of a sample begin at 0.
        reset_attention_mask: in training and evaluation a token sees no earlier document of its sample.

    Raises:
        ValueError: `override_vocab_size` is too small, or `compile` cannot be had.
        NoBackendError: no attention backend is left for a kind of call.
    """
    model = build_model(
        keys,
        vocab_size=vocab_size,
        device=device,
        dtype=dtype,
        flags=flags,
        micro_batch_size=micro_batch_size,
        form=SampleForm(
            length=seq_length or keys.encoder_seq_length, packed=reset_attention_mask, restart=reset_position_ids
        ),
        compute_dtype=compute_dtype,
        kinds=kinds,
        sharding=sharding,
    )
    assert isinstance(model, GPT)
    return model


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What `build_model` decides before it builds.

    Attributes:
        attentions: of the model.
        decisions: for each attention and kind of call (`PlannedAttention.label`), what the dispatcher chose and why.
        compiled: whether the layers run through torch.compile.
        compile_reason: why, or why not.
    """

    attentions: tuple[PlannedAttention, ...]
    decisions: Mapping[str, Decision]
    compiled: bool
    compile_reason: str


def plan_model(
    model: FamilySlice,
    *,
    device: torch.device,
    dtype: torch.dtype,
    flags: AttentionFlags,
    micro_batch_size: int,
    form: SampleForm,
    kinds: Collection[CallKind] = ALL_KINDS,
    peft: PeftSlice | None = None,
) -> ModelPlan:
    """What `build_model` decides: the attention of each kind of call, and whether to compile and why.

    Args:
        model: what the model is.
        device: where it shall run.
        dtype: of the arithmetic.
        flags: what the environment says about attention.
        micro_batch_size: samples in a call.
        form: the samples of training and evaluation.
        kinds: the kinds of call the run can make.
        peft: what fine-tuning adds.

    Raises:
        ValueError: compilation cannot be had.
        NoBackendError: no attention backend is left for a kind of call.
    """
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"`dtype` ({dtype}) must be one of {', '.join(str(known) for known in DTYPE_NAMES)}.")
    facts: CallFacts = {
        "device": device.type,
        "capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        "dtype": DTYPE_NAMES[dtype],
        "batch": micro_batch_size,
        "deterministic": not flags.allow_nondeterministic,
    }
    attentions = tuple(planned_attentions(model, form, facts))
    software = installed(device.type)
    decisions: dict[str, Decision] = {}
    problems: list[NoBackendError] = []
    for planned in attentions:
        asked: dict[CallKind, AttentionCall] = {kind: call for kind, call in planned.calls.items() if kind in kinds}
        try:
            made = decide(planned.attention, asked, flags, software)
        except NoBackendError as error:
            told = f"attention `{planned.name}`: {error}" if planned.name else str(error)
            problems.append(NoBackendError(told, error.rows))
            continue
        decisions |= {planned.label(kind): decision for kind, decision in made.items()}
    if problems:
        rows = tuple(row for problem in problems for row in problem.rows)
        raise NoBackendError("\n".join(map(str, problems)), rows)
    dropout = any(map(has_dropout, model.stacks)) or peft_dropout(peft) > 0
    compiled, reason = compile_policy(model.compile, device.type, torch_version(), dropout=dropout)
    return ModelPlan(attentions, decisions, compiled, reason)


def stacks_of(model: LanguageModel) -> tuple[Stack, ...]:
    """The stacks of a model, in the order data goes through them."""
    match model:
        case T5():
            return model.encoder, model.decoder
        case BERT():
            return (model.encoder,)
        case _:
            return (model.decoder,)


def copies_of(device: torch.device) -> Callable[[], Copies] | None:
    """What makes copies between a device and host memory, all from one pool; None where these are one and the same."""
    return partial(CudaCopies, device, HostPool(pinned=True)) if device.type == "cuda" else None


def offload(model: LanguageModel, described: FamilySlice, make_copies: Callable[[], Copies]) -> None:
    """Have a model, whose weights are on their device, keep in host memory what its slice says.

    Args:
        model: as `described`.
        described: its slice.
        make_copies: makes those of its device; weights and activations have streams of their own.

    Raises:
        ValueError: weights are cut over processes, of which only rows are on the device.
    """
    for part, stack in zip(described.stacks, stacks_of(model), strict=True):
        if part.offload is None:
            continue
        if part.offload.activations:
            stack.activation_offload = ActivationOffload(make_copies(), part.offload.layers)
        if part.offload.weights:
            stack.weight_offload = WeightOffload(make_copies(), list(stack.layers), part.offload.layers)


def parameter_count(model: nn.Module) -> int:
    """Parameters of a built model, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------- policies


def compile_policy(
    wish: bool | None, device_type: str, torch_release: tuple[int, int], *, dropout: bool
) -> tuple[bool, str]:
    """Whether to compile the layers, and why.

    Raises:
        ValueError: compilation is asked for where it silently gives wrong dropout masks.
    """
    wrong_masks = dropout and device_type == "cuda" and torch_release >= (2, 13)
    release = ".".join(map(str, torch_release))
    if wish is False:
        return False, "`compile` is False"
    if wrong_masks:
        if wish:
            raise ValueError(
                f"`compile` (True) must not be combined with dropout on a GPU under PyTorch {release}, whose compiled "
                "dropout masks are wrong (pytorch #198333); use compile=null, dropouts of 0, or PyTorch 2.12."
            )
        return False, f"dropout masks compiled by PyTorch {release} are wrong (pytorch #198333)"
    if wish:
        return True, "`compile` is True"
    if device_type == "cuda":
        return True, "on a GPU"
    return False, f"not worth its time on {device_type}; `compile: True` forces it"


def init_rules(model: FamilySlice) -> InitRules:
    """How the parameters of a model start; those of T5's decoder by the keys of the decoder."""
    match model:
        case T5Slice():
            encoder, decoder = (_stack_rules(model.seed, stack) for stack in model.stacks)
            parts = dict.fromkeys(("decoder.", "decoder_position", "cross_positions.", "head."), decoder)
            return replace(encoder, embedding_std=model.embedding_std, parts=parts)
        case _:
            return replace(_stack_rules(model.seed, model.stack), embedding_std=model.embedding_std)


def _stack_rules(seed: int, stack: StackSlice) -> InitRules:
    return InitRules(
        seed=seed,
        std=stack.init_std,
        output_std=stack.output_init_std,
        norm_weight=0.0 if stack.norm.zero_centered else 1.0,
    )
