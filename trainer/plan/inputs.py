"""Inputs of a memory and time estimate: model slices, attention backends, sharding layout and target device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from ...kernels.attention.call_spec import AttentionCall, Installed
from ...kernels.attention.dispatch import Decision
from ...kernels.attention.flags import AttentionFlags
from ...models.build import DTYPE_NAMES, compile_policy
from ...models.config.batch_shape import SampleForm
from ...models.config.families import FamilySlice, family_slice
from ...models.config.peft_slice import (
    PROJECTIONS,
    LoRASlice,
    PeftSlice,
    Projection,
    PromptSlice,
    SelectiveSlice,
    peft_dropout,
    peft_slice,
)
from ...models.config.slices import AttentionSlice, StackSlice
from ...models.config.t5_slice import T5Slice
from ...models.dispatch.attention_calls import CallKind, decide
from ...models.dispatch.attention_choices import CallFacts, planned_attentions
from ...models.peft.lora_mlp import is_one_operation
from ...models.recompute.analysis import has_dropout
from ..config.batch_spec import sample_form
from ..config.parameter_layout import DataLayout
from ..config.schema.root import AnyModelBlock, RootBlock
from ..device.cuda_graph_support import uses_cuda_graph, why_not_recorded
from ..device.precision import PrecisionPlan, plan_precision
from ..distributed.layout_from_config import layout_of, reduce_dtype
from .hardware import Card
from .trainable_count import count_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Device and software that a run is planned for.

    Attributes:
        device: device type.
        capability: CUDA compute capability; None on other devices.
        card: GPU; None without one.
        memory: device memory in bytes; None for a CPU or if unknown.
        software: installed, or assumed, packages.
        flags: attention flags from environment variables.
        world_size: number of processes.
        host_memory: host memory per process in bytes; None if unknown.
    """

    device: str
    capability: tuple[int, int] | None
    card: Card | None
    memory: int | None
    software: Installed
    flags: AttentionFlags
    world_size: int = 1
    host_memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Bytes per element.

    Attributes:
        weights: of parameters and their gradients.
        compute: of matmul operands.
        stream: of the residual stream.
    """

    weights: int
    compute: int
    stream: int

    @property
    def casts_weights(self) -> bool:
        """True if layers multiply with low-precision copies of their weights (autocast)."""
        return self.compute < self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """One transformer stack and the shape of its micro batches.

    Attributes:
        name: `encoder` or `decoder` for T5, otherwise empty.
        stack: configuration of the stack.
        batch: samples per micro batch.
        length: tokens per sample.
        attention: backend chosen for self-attention in training.
        cross: configuration of cross-attention; None without one.
        cross_attention: backend chosen for cross-attention in training.
        memory_length: tokens per sample of the encoder output that cross-attention reads.
        widths: bytes per element.
        compiled: layers run through torch.compile.
        learnt: projections whose weights or LoRA updates are trained, and which therefore save their input.
        spares_norms: these projections save the residual stream, not the norm's output; see `models.normed_linear`.
        low_rank_mlp: MLPs with LoRA run as one fused operation; see `kernels.lora_gated_mlp`.
        low_rank_experts: experts have LoRA updates; see `kernels.moe.lora_experts`.
        trains_router: the MoE router is trained.
        begins: index of the first layer whose backward pass runs.
    """

    name: str
    stack: StackSlice
    batch: int
    length: int
    attention: Decision
    cross: AttentionSlice | None
    cross_attention: Decision | None
    memory_length: int
    widths: Widths
    compiled: bool
    learnt: frozenset[Projection]
    spares_norms: bool
    low_rank_mlp: bool
    low_rank_experts: bool
    trains_router: bool
    begins: int

    @property
    def tokens(self) -> int:
        """Tokens per micro batch."""
        return self.batch * self.length

    @property
    def keeps_scores(self) -> bool:
        """True if self- or cross-attention saves its scores for the backward pass."""
        cross = self.cross_attention
        return self.attention.keeps_scores or (cross is not None and cross.keeps_scores)

    @property
    def memory_tokens(self) -> int:
        """Tokens per micro batch that cross-attention reads."""
        return self.batch * self.memory_length


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All inputs of an estimate.

    Attributes:
        keys: configuration of the model and its batches.
        target: device and software.
        family: configuration of the model family.
        form: shape of a sample.
        stacks: stacks in forward order.
        precision: dtypes of the run.
        layout: sharding layout; None for one process.
        reduce_width: bytes per gradient element in the reduction over ranks.
        micro_batches: per rank and step.
        average_width: bytes per element of the exponential moving average (EMA); 0 without one.
        average_on_host: the EMA is in host memory.
        average_every: steps between two updates of the EMA.
        vocab_size: of the tokenizer.
        can_be_recorded: micro batches can run as CUDA graphs, whether or not they are configured to.
    """

    keys: AnyModelBlock
    target: Target
    family: FamilySlice
    form: SampleForm
    stacks: tuple[StackFacts, ...]
    precision: PrecisionPlan
    layout: DataLayout | None
    reduce_width: int
    micro_batches: int
    average_width: int
    average_on_host: bool
    average_every: int
    vocab_size: int
    can_be_recorded: bool

    @property
    def is_recorded(self) -> bool:
        """True if micro batches run as CUDA graphs, each launched with one call."""
        return self.can_be_recorded and self.keys.enable_cuda_graph is not False

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.target.world_size

    @property
    def shards(self) -> int:
        """Number of shards of the optimizer state."""
        return self.layout.shards if self.layout else 1

    @property
    def widths(self) -> Widths:
        """Bytes per element, the same in all stacks and outside of them."""
        return self.stacks[0].widths

    @property
    def out_tokens(self) -> int:
        """Output positions per micro batch, for which logits are computed."""
        return self.stacks[-1].tokens

    @property
    def compiled(self) -> bool:
        """True if layers run through torch.compile."""
        return self.stacks[0].compiled


def facts_of(root: RootBlock, target: Target, precision: PrecisionPlan, *, vocab_size: int | None = None) -> RunFacts:
    """Collect the inputs of an estimate from a configuration.

    Args:
        root: validated configuration.
        target: device and software.
        precision: dtypes of the run on that device.
        vocab_size: of the tokenizer; if None, `override_vocab_size` is used.

    Raises:
        ValueError: no attention backend supports the run, compilation is not available, or the vocabulary is too small.
        UserError: CUDA graphs are required but not supported for this run.
    """
    keys, form = root.model, sample_form(root)
    vocab_size = vocab_size or keys.override_vocab_size or 1
    family = family_slice(keys, vocab_size=vocab_size, form=form)
    dtype = precision.autocast or precision.weights
    common: CallFacts = {
        "device": target.device,
        "capability": target.capability,
        "dtype": DTYPE_NAMES[dtype],
        "batch": keys.micro_batch_size,
        "deterministic": not target.flags.allow_nondeterministic,
    }
    peft = peft_slice(keys.peft)
    layer_form = form  # prompt tuning lengthens the sequences that layers see
    if isinstance(peft, PromptSlice):
        layer_form = replace(form, length=form.length + peft.virtual_tokens)
    decisions: dict[str, Decision] = {}
    for planned in planned_attentions(family, layer_form, common):
        calls: dict[CallKind, AttentionCall] = {"training": planned.calls["training"]}
        decisions[planned.name] = decide(planned.attention, calls, target.flags, target.software)["training"]
    in_training = {f"{name} training".strip(): decision for name, decision in decisions.items()}
    graph_args = (root, torch.device(target.device), target.world_size, in_training)
    uses_cuda_graph(*graph_args)  # raises if CUDA graphs are required but not supported
    dropout = any(map(has_dropout, family.stacks)) or peft_dropout(peft) > 0
    compiled, _ = compile_policy(keys.compile, target.device, target.software.torch, dropout=dropout)
    widths = Widths(
        weights=precision.weights.itemsize,
        compute=dtype.itemsize,
        stream=precision.weights.itemsize if precision.autocast else dtype.itemsize,
    )
    layout = layout_of(root, target.world_size)
    gradient_dtype = reduce_dtype(root, precision.weights) or precision.weights
    ema = root.exp_manager.ema
    return RunFacts(
        keys=keys,
        target=target,
        family=family,
        form=form,
        stacks=_stacks(
            family, layer_form, decisions, keys, widths, count_trained(keys, vocab_size, form).begins, compiled=compiled
        ),
        precision=precision,
        layout=layout,
        reduce_width=gradient_dtype.itemsize,
        micro_batches=keys.global_batch_size // keys.micro_batch_size // target.world_size,
        average_width=max(4, precision.weights.itemsize) if ema.enable else 0,
        average_on_host=ema.cpu_offload and target.device == "cuda",
        average_every=ema.every_n_steps,
        vocab_size=vocab_size,
        can_be_recorded=why_not_recorded(*graph_args) is None,
    )


def _stacks(
    family: FamilySlice,
    form: SampleForm,
    decisions: dict[str, Decision],
    keys: AnyModelBlock,
    widths: Widths,
    begins: tuple[int, ...],
    *,
    compiled: bool,
) -> tuple[StackFacts, ...]:
    peft = peft_slice(keys.peft)
    cross = family.cross_attention if isinstance(family, T5Slice) else None
    names, lengths = (("encoder", "decoder"), (form.length, form.decoder_length)) if cross else (("",), (form.length,))
    stacks: list[StackFacts] = []
    for index, (name, stack, length) in enumerate(zip_longest(names, family.stacks, lengths)):
        stack_cross, call = cross if index else None, decisions[name].call
        stacks.append(
            StackFacts(
                name=name,
                stack=stack,
                batch=keys.micro_batch_size,
                length=length,
                attention=decisions[name],
                cross=stack_cross,
                cross_attention=decisions["cross"] if stack_cross else None,
                memory_length=form.length if stack_cross else 0,
                widths=widths,
                compiled=compiled,
                learnt=_trained_projections(peft),
                spares_norms=compiled and isinstance(peft, LoRASlice) and peft.spares_norms(stack),
                low_rank_experts=isinstance(peft, LoRASlice)
                and peft.layers.numbers is None
                and bool(peft.targets & {"mlp_fc1", "mlp_fc2"}),
                trains_router=peft is None or isinstance(peft, SelectiveSlice),
                low_rank_mlp=is_one_operation(peft, stack, call.device, call.dtype),
                begins=begins[index],
            )
        )
    return tuple(stacks)


def _trained_projections(peft: PeftSlice | None) -> frozenset[Projection]:
    return peft.targets if isinstance(peft, LoRASlice) and peft.layers.numbers is None else PROJECTIONS


def precision_there(root: RootBlock, target: Target) -> PrecisionPlan:
    """Return the precision of a run on the target device; null is resolved from the target's compute capability."""
    trainer = root.trainer
    if trainer.precision is None:
        has_bf16 = target.device == "cuda" and (target.capability or (0, 0)) >= (8, 0)
        trainer = trainer.model_copy(update={"precision": "bf16" if has_bf16 else "32"})
    return plan_precision(trainer, root.model.megatron_amp_O2, torch.device(target.device))
