"""Inputs of a memory and time estimate: model slices, attention backends, sharding layout and target device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...kernels.attention.call_spec import AttentionCall, DType, InstalledSoftware
from ...kernels.attention.dispatch import BackendSelection
from ...kernels.attention.flags import AttentionFlags
from ...models.build import DTYPE_NAMES, decide_compile
from ...models.config.batch_shape import BatchSpec
from ...models.config.families import FamilySlice, family_slice
from ...models.config.peft import (
    PROJECTIONS,
    LoRASlice,
    PeftSlice,
    PromptSlice,
    SelectiveSlice,
    peft_dropout,
    peft_slice,
)
from ...models.dispatch.attention_calls import CallContext, CallKind, choose_backends
from ...models.dispatch.attention_choices import plan_attentions
from ...models.layers.cost import ByteWidths, StackInputs
from ...models.model_cost import stacks_with_cross_attention
from ...models.peft.lora_mlp import is_lora_mlp_fused
from ...models.recompute.analysis import has_dropout
from ..config.batch_spec import batch_spec
from ..config.parameter_layout import DataParallelLayout, layout_from_config
from ..config.schema.root import AnyModelBlock, RootBlock
from ..device.cuda_graph_support import cuda_graph_unsupported_reason, uses_cuda_graph
from ..device.precision import PrecisionPlan, plan_precision
from ..distributed.data_parallel import grad_reduce_dtype
from .hardware import GPUSpec
from .trainable_count import ParameterCounts, count_trainable


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
        counts: number of parameters.
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
    counts: ParameterCounts
    can_use_cuda_graph: bool

    @property
    def uses_cuda_graph(self) -> bool:
        """True if micro batches run as CUDA graphs, each launched with one call."""
        return self.can_use_cuda_graph and self.model_config.enable_cuda_graph is not False

    @property
    def peft(self) -> PeftSlice | None:
        """Parameter-efficient fine-tuning; None without."""
        return peft_slice(self.model_config.peft)

    @property
    def is_frozen(self) -> bool:
        """True if the model's own weights are frozen, as in parameter-efficient fine-tuning."""
        return self.model_config.peft.is_on

    @property
    def decisions(self) -> dict[str, BackendSelection]:
        """Backend of each attention in training, by its label."""
        decisions: dict[str, BackendSelection] = {}
        for stack in self.stacks:
            decisions[f"{stack.name} training".strip()] = stack.attention
            if stack.cross_attention is not None:
                decisions["cross training"] = stack.cross_attention
        return decisions

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
    """Collect the inputs of an estimate; `vocab_size` of the tokenizer is `override_vocab_size` if None.

    Raises:
        ValueError: no attention backend supports the run, compilation is not available, or the vocabulary is too small.
        UserError: CUDA graphs are required but not supported for this run.
    """
    keys, form = root.model, batch_spec(root)
    vocab_size = vocab_size or keys.override_vocab_size or 1
    family, counts = family_slice(keys, vocab_size=vocab_size, batch_spec=form), count_trainable(keys, vocab_size, form)
    peft = peft_slice(keys.peft)
    layer_form = form  # prompt tuning lengthens the sequences that layers see
    if isinstance(peft, PromptSlice):
        layer_form = replace(form, seq_length=form.seq_length + peft.virtual_tokens)
    dtype = precision.autocast_dtype or precision.param_dtype
    decisions = _training_backends(family, layer_form, target, DTYPE_NAMES[dtype], keys.micro_batch_size)
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
    gradient_dtype = grad_reduce_dtype(root, precision.param_dtype) or precision.param_dtype
    ema = root.exp_manager.ema
    return RunInputs(
        model_config=keys,
        target=target,
        family=family,
        batch_spec=form,
        stacks=tuple(_stacks(family, layer_form, decisions, keys, widths, counts, compiled=compiled)),
        precision=precision,
        layout=layout_from_config(root, target.world_size),
        reduce_itemsize=gradient_dtype.itemsize,
        micro_batches=keys.global_batch_size // keys.micro_batch_size // target.world_size,
        ema_itemsize=max(4, precision.param_dtype.itemsize) if ema.enable else 0,
        ema_on_host=ema.cpu_offload and target.device == "cuda",
        ema_every_n_steps=ema.every_n_steps,
        vocab_size=vocab_size,
        counts=counts,
        can_use_cuda_graph=cuda_graph_unsupported_reason(*graph_args) is None,
    )


def _training_backends(
    family: FamilySlice, form: BatchSpec, target: Target, dtype: DType, batch: int
) -> dict[str, BackendSelection]:
    """Choose the backend of each attention in training, by its name."""
    context: CallContext = {
        "device": target.device,
        "capability": target.capability,
        "dtype": dtype,
        "batch": batch,
        "deterministic": not target.flags.allow_nondeterministic,
    }
    decisions: dict[str, BackendSelection] = {}
    for planned in plan_attentions(family, form, context):
        calls: dict[CallKind, AttentionCall] = {"training": planned.calls["training"]}
        decisions[planned.name] = choose_backends(planned.attention, calls, target.flags, target.software)["training"]
    return decisions


def _stacks(
    family: FamilySlice,
    form: BatchSpec,
    decisions: dict[str, BackendSelection],
    keys: AnyModelBlock,
    widths: ByteWidths,
    counts: ParameterCounts,
    *,
    compiled: bool,
) -> Iterator[StackInputs]:
    peft, stacks = peft_slice(keys.peft), stacks_with_cross_attention(family)
    lora = peft if isinstance(peft, LoRASlice) else None
    # projections that only some layers update count as if all were trained
    targets = lora.targets if lora is not None and lora.layers.numbers is None else None
    names = ("encoder", "decoder") if len(stacks) > 1 else ("",)
    lengths = form.seq_length, form.decoder_seq_length
    for (stack, cross), name, length, first in zip(stacks, names, lengths, counts.first_backward_layers, strict=False):
        call = decisions[name].call
        yield StackInputs(
            name=name,
            stack=stack,
            batch=keys.micro_batch_size,
            length=length,
            attention=decisions[name],
            cross=cross,
            cross_attention=decisions["cross"] if cross else None,
            encoder_length=form.seq_length if cross else 0,
            widths=widths,
            compiled=compiled,
            trained_projections=PROJECTIONS if targets is None else targets,
            skips_norm_outputs=compiled and lora is not None and lora.can_skip_norm_output(stack),
            lora_experts=bool((targets or frozenset()) & {"mlp_fc1", "mlp_fc2"}),
            trains_router=peft is None or isinstance(peft, SelectiveSlice),
            fused_lora_mlp=is_lora_mlp_fused(peft, stack, call.device, call.dtype),
            first_trained_layer=first,
        )


def target_precision(root: RootBlock, target: Target) -> PrecisionPlan:
    """Return the precision of a run on the target device; null is resolved from the target's compute capability."""
    trainer = root.trainer
    if trainer.precision is None:
        has_bf16 = target.device == "cuda" and (target.capability or (0, 0)) >= (8, 0)
        trainer = trainer.model_copy(update={"precision": "bf16" if has_bf16 else "32"})
    return plan_precision(trainer, root.model.megatron_amp_O2, torch.device(target.device))
