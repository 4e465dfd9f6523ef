"""What memory and time of a run follow from: its slices, the attention it will take, and what each rank holds."""

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
    """Where a run is planned for.

    Attributes:
        device: kind of device.
        capability: CUDA compute capability, None elsewhere.
        card: the card, None where there is none.
        memory: bytes of the device, None where unknown or for a CPU.
        software: what is installed there, or taken to be.
        flags: what the environment says about attention there.
        world_size: processes of the run.
        host_memory: bytes of the host for each process, None where unknown.
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
    """Bytes of a number.

    Attributes:
        weights: of the parameters and their gradients.
        compute: of what is multiplied.
        stream: of the residual stream.
    """

    weights: int
    compute: int
    stream: int

    @property
    def casts_weights(self) -> bool:
        """Whether layers multiply with narrow copies of their weights (autocast)."""
        return self.compute < self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """One stack of a run and the micro batch that goes through it.

    Attributes:
        name: `encoder` or `decoder` of a T5, empty elsewhere.
        stack: what it is.
        batch: samples in a micro batch.
        length: tokens of a sample.
        attention: the choice for its self-attention in training.
        cross: its cross-attention, None without one.
        cross_attention: the choice for that in training.
        memory_length: tokens of a sample that cross-attention reads.
        widths: bytes of its numbers.
        compiled: whether its layers run through torch.compile.
        learnt: projections of a layer whose matrices, or updates of them, are trained, and so keep what they read.
        spares_norms: these projections keep the stream and not its norm, see `models.normed_linear`.
        low_rank_mlp: its MLPs with low-rank updates are one operation, see `kernels.lora_gated_mlp`.
        low_rank_experts: its experts have low-rank updates, see `kernels.moe.lora_experts`.
        trains_router: the router of its experts is trained.
        begins: its first layer whose backward pass runs.
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
        """Tokens of a micro batch."""
        return self.batch * self.length

    @property
    def keeps_scores(self) -> bool:
        """Whether any of its attentions keeps scores for the backward pass."""
        cross = self.cross_attention
        return self.attention.keeps_scores or (cross is not None and cross.keeps_scores)

    @property
    def memory_tokens(self) -> int:
        """Tokens of a micro batch that cross-attention reads."""
        return self.batch * self.memory_length


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Everything a plan reads.

    Attributes:
        keys: the configuration of the model and of its batches.
        target: where it runs.
        family: what the model is.
        form: its samples.
        stacks: its stacks, in the order data goes through them.
        precision: of the run.
        layout: what each rank holds; None for one process.
        reduce_width: bytes of a gradient that is summed over ranks.
        micro_batches: of a rank in each step.
        average_width: bytes of each number of the moving average, 0 without one.
        average_on_host: the average is in host memory.
        average_every: steps between two updates of it.
        vocab_size: tokens of the tokenizer.
        can_be_recorded: a micro batch can run as a CUDA graph, whether it shall or not.
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
        """Whether micro batches run as CUDA graphs, which the host launches at once."""
        return self.can_be_recorded and self.keys.enable_cuda_graph is not False

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.target.world_size

    @property
    def shards(self) -> int:
        """Ranks that hold different rows of the optimizer's state."""
        return self.layout.shards if self.layout else 1

    @property
    def widths(self) -> Widths:
        """Bytes of the numbers outside of the stacks, which are those within."""
        return self.stacks[0].widths

    @property
    def out_tokens(self) -> int:
        """Tokens of a micro batch whose next one is predicted."""
        return self.stacks[-1].tokens

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled."""
        return self.stacks[0].compiled


def facts_of(root: RootBlock, target: Target, precision: PrecisionPlan, *, vocab_size: int | None = None) -> RunFacts:
    """What a plan of these keys reads.

    Args:
        root: the keys; the rules have found no error in them.
        target: where the run will be.
        precision: of the run there.
        vocab_size: tokens of the tokenizer; None where it is not known, which `override_vocab_size` makes up for.

    Raises:
        ValueError: no attention backend is left, compilation cannot be had, or the vocabulary is too small.
        UserError: micro batches shall be recorded as CUDA graphs and cannot be.
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
    read = form  # what its layers read
    if isinstance(peft, PromptSlice):
        read = replace(form, length=form.length + peft.virtual_tokens)
    decisions: dict[str, Decision] = {}
    for planned in planned_attentions(family, read, common):
        asked: dict[CallKind, AttentionCall] = {"training": planned.calls["training"]}
        decisions[planned.name] = decide(planned.attention, asked, target.flags, target.software)["training"]
    in_training = {f"{name} training".strip(): decision for name, decision in decisions.items()}
    recording = (root, torch.device(target.device), target.world_size, in_training)
    uses_cuda_graph(*recording)  # refuses what is asked for and cannot be had
    dropout = any(map(has_dropout, family.stacks)) or peft_dropout(peft) > 0
    compiled, _ = compile_policy(keys.compile, target.device, target.software.torch, dropout=dropout)
    widths = Widths(
        weights=precision.weights.itemsize,
        compute=dtype.itemsize,
        stream=precision.weights.itemsize if precision.autocast else dtype.itemsize,
    )
    layout = layout_of(root, target.world_size)
    summed = reduce_dtype(root, precision.weights) or precision.weights
    average = root.exp_manager.ema
    return RunFacts(
        keys=keys,
        target=target,
        family=family,
        form=form,
        stacks=_stacks(
            family, read, decisions, keys, widths, count_trained(keys, vocab_size, form).begins, compiled=compiled
        ),
        precision=precision,
        layout=layout,
        reduce_width=summed.itemsize,
        micro_batches=keys.global_batch_size // keys.micro_batch_size // target.world_size,
        average_width=max(4, precision.weights.itemsize) if average.enable else 0,
        average_on_host=average.cpu_offload and target.device == "cuda",
        average_every=average.every_n_steps,
        vocab_size=vocab_size,
        can_be_recorded=why_not_recorded(*recording) is None,
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
    found: list[StackFacts] = []
    for number, (name, stack, length) in enumerate(zip_longest(names, family.stacks, lengths)):
        reads, call = cross if number else None, decisions[name].call
        found.append(
            StackFacts(
                name=name,
                stack=stack,
                batch=keys.micro_batch_size,
                length=length,
                attention=decisions[name],
                cross=reads,
                cross_attention=decisions["cross"] if reads else None,
                memory_length=form.length if reads else 0,
                widths=widths,
                compiled=compiled,
                learnt=_learnt(peft),
                spares_norms=compiled and isinstance(peft, LoRASlice) and peft.spares_norms(stack),
                low_rank_experts=isinstance(peft, LoRASlice)
                and peft.layers.numbers is None
                and bool(peft.targets & {"mlp_fc1", "mlp_fc2"}),
                trains_router=peft is None or isinstance(peft, SelectiveSlice),
                low_rank_mlp=is_one_operation(peft, stack, call.device, call.dtype),
                begins=begins[number],
            )
        )
    return tuple(found)


def _learnt(peft: PeftSlice | None) -> frozenset[Projection]:
    return peft.targets if isinstance(peft, LoRASlice) and peft.layers.numbers is None else PROJECTIONS


def precision_there(root: RootBlock, target: Target) -> PrecisionPlan:
    """The precision of a run on a device that need not be here: null is decided by the capability of the target."""
    trainer = root.trainer
    if trainer.precision is None:
        narrow = target.device == "cuda" and (target.capability or (0, 0)) >= (8, 0)
        trainer = trainer.model_copy(update={"precision": "bf16" if narrow else "32"})
    return plan_precision(trainer, root.model.megatron_amp_O2, torch.device(target.device))
