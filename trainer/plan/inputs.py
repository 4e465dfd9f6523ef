"""Inputs of a memory and time estimate: model slices, attention backends, sharding layout and target device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from ...kernels.attention.call_spec import AttentionCall, InstalledSoftware
from ...kernels.attention.dispatch import BackendSelection
from ...kernels.attention.flags import AttentionFlags
from ...models.build import DTYPE_NAMES, decide_compile
from ...models.config.batch_shape import BatchSpec
from ...models.config.families import FamilySlice, family_slice
from ...models.config.peft import (
    PROJECTIONS,
    LoRASlice,
    PeftSlice,
    Projection,
    PromptSlice,
    SelectiveSlice,
    peft_dropout,
    peft_slice,
)
from ...models.config.stack import AttentionSlice, StackSlice
from ...models.config.t5 import T5Slice
from ...models.dispatch.attention_calls import CallContext, CallKind, choose_backends
from ...models.dispatch.attention_choices import plan_attentions
from ...models.peft.lora_mlp import is_lora_mlp_fused
from ...models.recompute.analysis import has_dropout
from ..config.batch_spec import batch_spec
from ..config.parameter_layout import DataParallelLayout, layout_from_config
from ..config.schema.root import AnyModelBlock, RootBlock
from ..device.cuda_graph_support import cuda_graph_unsupported_reason, uses_cuda_graph
from ..device.precision import PrecisionPlan, plan_precision
from ..distributed.data_parallel import grad_reduce_dtype
from .hardware import GPUSpec
from .trainable_count import count_trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Device and software that a run is planned for.

    Attributes:
        device: device type.
        capability: CUDA compute capability; None on other devices.
        gpu: GPU; None without one.
        memory: device memory in bytes; None for a CPU or if unknown.
        software: installed, or assumed, packages.
        flags: attention flags from environment variables.
        world_size: number of processes.
        host_memory: host memory per process in bytes; None if unknown.
    """

    device: str
    capability: tuple[int, int] | None
    gpu: GPUSpec | None
    memory: int | None
    software: InstalledSoftware
    flags: AttentionFlags
    world_size: int = 1
    host_memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteWidths:
    """Bytes per element.

    Attributes:
        weights: of parameters and their gradients.
        compute: of matmul operands.
        residual: of the residual stream.
    """

    weights: int
    compute: int
    residual: int

    @property
    def casts_weights(self) -> bool:
        """True if layers multiply with low-precision copies of their weights (autocast)."""
        return self.compute < self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StackInputs:
    """One transformer stack and the shape of its micro batches.

    Attributes:
        name: `encoder` or `decoder` for T5, otherwise empty.
        stack: configuration of the stack.
        batch: samples per micro batch.
        length: tokens per sample.
        attention: backend chosen for self-attention in training.
        cross: configuration of cross-attention; None without one.
        cross_attention: backend chosen for cross-attention in training.
        encoder_length: tokens per sample of the encoder output that cross-attention reads.
        widths: bytes per element.
        compiled: layers run through torch.compile.
        trained_projections: projections whose weights or LoRA updates are trained, and which therefore save their
            input.
        skips_norm_outputs: these projections save the residual stream, not the norm's output; see
            `models.layers.fused_linear`.
        fused_lora_mlp: MLPs with LoRA run as one fused operation; see `kernels.lora.lora_gated_mlp`.
        lora_experts: experts have LoRA updates; see `kernels.moe.lora_experts`.
        trains_router: the MoE router is trained.
        first_trained_layer: index of the first layer whose backward pass runs.
    """

    name: str
    stack: StackSlice
    batch: int
    length: int
    attention: BackendSelection
    cross: AttentionSlice | None
    cross_attention: BackendSelection | None
    encoder_length: int
    widths: ByteWidths
    compiled: bool
    trained_projections: frozenset[Projection]
    skips_norm_outputs: bool
    fused_lora_mlp: bool
    lora_experts: bool
    trains_router: bool
    first_trained_layer: int

    @property
    def tokens(self) -> int:
        """Tokens per micro batch."""
        return self.batch * self.length

    @property
    def saves_scores(self) -> bool:
        """True if self- or cross-attention saves its scores for the backward pass."""
        cross = self.cross_attention
        return self.attention.saves_scores or (cross is not None and cross.saves_scores)

    @property
    def encoder_tokens(self) -> int:
        """Tokens per micro batch that cross-attention reads."""
        return self.batch * self.encoder_length


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """All inputs of an estimate.

    Attributes:
        model_config: configuration of the model and its batches.
        target: device and software.
        family: configuration of the model family.
        batch_spec: shape of a sample.
        stacks: stacks in forward order.
        precision: dtypes of the run.
        layout: sharding layout; None for one process.
        reduce_itemsize: bytes per gradient element in the reduction over ranks.
        micro_batches: per rank and step.
        ema_itemsize: bytes per element of the exponential moving average (EMA); 0 without one.
        ema_on_host: the EMA is in host memory.
        ema_every_n_steps: steps between two updates of the EMA.
        vocab_size: of the tokenizer.
        can_use_cuda_graph: micro batches can run as CUDA graphs, whether or not they are configured to.
    """

    model_config: AnyModelBlock
    target: Target
    family: FamilySlice
    batch_spec: BatchSpec
    stacks: tuple[StackInputs, ...]
    precision: PrecisionPlan
    layout: DataParallelLayout | None
    reduce_itemsize: int
    micro_batches: int
    ema_itemsize: int
    ema_on_host: bool
    ema_every_n_steps: int
    vocab_size: int
    can_use_cuda_graph: bool

    @property
    def uses_cuda_graph(self) -> bool:
        """True if micro batches run as CUDA graphs, each launched with one call."""
        return self.can_use_cuda_graph and self.model_config.enable_cuda_graph is not False

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.target.world_size

    @property
    def shards(self) -> int:
        """Number of shards of the optimizer state."""
        return self.layout.shards if self.layout else 1

    @property
    def widths(self) -> ByteWidths:
        """Bytes per element, the same in all stacks and outside of them."""
        return self.stacks[0].widths

    @property
    def output_tokens(self) -> int:
        """Output positions per micro batch, for which logits are computed."""
        return self.stacks[-1].tokens

    @property
    def compiled(self) -> bool:
        """True if layers run through torch.compile."""
        return self.stacks[0].compiled


def collect_inputs(
    root: RootBlock, target: Target, precision: PrecisionPlan, *, vocab_size: int | None = None
) -> RunInputs:
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
    keys, form = root.model, batch_spec(root)
    vocab_size = vocab_size or keys.override_vocab_size or 1
    family = family_slice(keys, vocab_size=vocab_size, batch_spec=form)
    dtype = precision.autocast_dtype or precision.param_dtype
    common: CallContext = {
        "device": target.device,
        "capability": target.capability,
        "dtype": DTYPE_NAMES[dtype],
        "batch": keys.micro_batch_size,
        "deterministic": not target.flags.allow_nondeterministic,
    }
    peft = peft_slice(keys.peft)
    layer_form = form  # prompt tuning lengthens the sequences that layers see
    if isinstance(peft, PromptSlice):
        layer_form = replace(form, seq_length=form.seq_length + peft.virtual_tokens)
    decisions: dict[str, BackendSelection] = {}
    for planned in plan_attentions(family, layer_form, common):
        calls: dict[CallKind, AttentionCall] = {"training": planned.calls["training"]}
        decisions[planned.name] = choose_backends(planned.attention, calls, target.flags, target.software)["training"]
    in_training = {f"{name} training".strip(): decision for name, decision in decisions.items()}
    graph_args = (root, torch.device(target.device), target.world_size, in_training)
    uses_cuda_graph(*graph_args)  # raises if CUDA graphs are required but not supported
    dropout = any(map(has_dropout, family.stacks)) or peft_dropout(peft) > 0
    compiled, _ = decide_compile(keys.compile, target.device, target.software.torch, dropout=dropout)
    widths = ByteWidths(
        weights=precision.param_dtype.itemsize,
        compute=dtype.itemsize,
        residual=precision.param_dtype.itemsize if precision.autocast_dtype else dtype.itemsize,
    )
    layout = layout_from_config(root, target.world_size)
    gradient_dtype = grad_reduce_dtype(root, precision.param_dtype) or precision.param_dtype
    ema = root.exp_manager.ema
    return RunInputs(
        model_config=keys,
        target=target,
        family=family,
        batch_spec=form,
        stacks=_stacks(
            family,
            layer_form,
            decisions,
            keys,
            widths,
            count_trainable(keys, vocab_size, form).first_backward_layers,
            compiled=compiled,
        ),
        precision=precision,
        layout=layout,
        reduce_itemsize=gradient_dtype.itemsize,
        micro_batches=keys.global_batch_size // keys.micro_batch_size // target.world_size,
        ema_itemsize=max(4, precision.param_dtype.itemsize) if ema.enable else 0,
        ema_on_host=ema.cpu_offload and target.device == "cuda",
        ema_every_n_steps=ema.every_n_steps,
        vocab_size=vocab_size,
        can_use_cuda_graph=cuda_graph_unsupported_reason(*graph_args) is None,
    )


def _stacks(
    family: FamilySlice,
    form: BatchSpec,
    decisions: dict[str, BackendSelection],
    keys: AnyModelBlock,
    widths: ByteWidths,
    begins: tuple[int, ...],
    *,
    compiled: bool,
) -> tuple[StackInputs, ...]:
    peft = peft_slice(keys.peft)
    cross = family.cross_attention if isinstance(family, T5Slice) else None
    names, lengths = (
        (("encoder", "decoder"), (form.seq_length, form.decoder_seq_length)) if cross else (("",), (form.seq_length,))
    )
    stacks: list[StackInputs] = []
    for index, (name, stack, length) in enumerate(zip_longest(names, family.stacks, lengths)):
        stack_cross, call = cross if index else None, decisions[name].call
        stacks.append(
            StackInputs(
                name=name,
                stack=stack,
                batch=keys.micro_batch_size,
                length=length,
                attention=decisions[name],
                cross=stack_cross,
                cross_attention=decisions["cross"] if stack_cross else None,
                encoder_length=form.seq_length if stack_cross else 0,
                widths=widths,
                compiled=compiled,
                trained_projections=_trained_projections(peft),
                skips_norm_outputs=compiled and isinstance(peft, LoRASlice) and peft.can_skip_norm_output(stack),
                lora_experts=isinstance(peft, LoRASlice)
                and peft.layers.numbers is None
                and bool(peft.targets & {"mlp_fc1", "mlp_fc2"}),
                trains_router=peft is None or isinstance(peft, SelectiveSlice),
                fused_lora_mlp=is_lora_mlp_fused(peft, stack, call.device, call.dtype),
                first_trained_layer=begins[index],
            )
        )
    return tuple(stacks)


def _trained_projections(peft: PeftSlice | None) -> frozenset[Projection]:
    return peft.targets if isinstance(peft, LoRASlice) and peft.layers.numbers is None else PROJECTIONS


def target_precision(root: RootBlock, target: Target) -> PrecisionPlan:
    """Return the precision of a run on the target device; null is resolved from the target's compute capability."""
    trainer = root.trainer
    if trainer.precision is None:
        has_bf16 = target.device == "cuda" and (target.capability or (0, 0)) >= (8, 0)
        trainer = trainer.model_copy(update={"precision": "bf16" if has_bf16 else "32"})
    return plan_precision(trainer, root.model.megatron_amp_O2, torch.device(target.device))
