"""Inputs of a memory and time estimate of a rank: model slices, attention backends, layout and target device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...kernels.attention.dispatch import BackendSelection
from ...models.build import TORCH_DTYPES, ModelPlan, plan_model
from ...models.config.batch_shape import BatchSpec
from ...models.config.families import FamilySlice
from ...models.config.peft import PROJECTIONS, LoRASlice, PeftSlice, SelectiveSlice
from ...models.dispatch.attention_calls import CallContext
from ...models.dispatch.attention_choices import plan_attentions
from ...models.dispatch.context_calls import ContextSplit
from ...models.layers.cost import ByteWidths, StackInputs
from ...models.model_cost import (
    count_experts,
    shared_weights,
    stack_part,
    stacks_with_cross_attention,
    stage_slice,
)
from ...models.parallel.layout import ParallelLayout
from ...models.parallel.schedule import PipelinePass, pass_order
from ...models.parallel.stages import Stage, whole_stacks
from ...models.parallel.traffic import CommunicationAxis
from ...models.peft.lora_mlp import is_lora_mlp_fused
from ...models.recompute.per_stage import StageRecompute
from ...models.tensor_parallel import group_parts, rank_slice
from ..config.parameter_layout import DataParallelLayout
from ..config.resolved_run import ResolvedRun
from ..config.run_precision import RunPrecision
from ..config.schema.root import AnyModelBlock
from ..device.cuda_graph_support import cuda_graph_unsupported_reason, uses_cuda_graph
from ..distributed.data_parallel import grad_reduce_dtype
from .exchange_kind import moving_weights_reason
from .target import Target
from .trainable_count import ParameterCounts, count_rank, count_stages, count_trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """All inputs of an estimate.

    Attributes:
        run: the resolved configuration.
        target: device and software.
        family: slices of the rank's part of the model, for `vocab_size`.
        stacks: stacks in forward order; of a rank of a pipeline the parts that its stages have.
        stages: pipeline stages, one for each of `stacks`; without a pipeline each is a whole stack.
        pipeline_rank: rank of the pipeline; None: all ranks together.
        shared_weights: weights that several ranks of a pipeline have: axis, elements, and these ranks.
        reduce_itemsize: bytes per gradient element in the reduction over ranks.
        ema_itemsize: bytes per element of the exponential moving average (EMA); 0 without one.
        ema_on_host: the EMA is in host memory.
        ema_every_n_steps: steps between two updates of the EMA.
        vocab_size: of the tokenizer.
        counts: number of parameters of the rank.
        num_parameters: of the whole model.
        expert_parameters: those of the rank's experts, if these are split over ranks.
        can_use_cuda_graph: micro batches, or layers, can run as CUDA graphs, whether or not they are configured to.
    """

    run: ResolvedRun
    target: Target
    family: FamilySlice
    stacks: tuple[StackInputs, ...]
    stages: tuple[Stage, ...]
    pipeline_rank: int | None
    shared_weights: tuple[tuple[CommunicationAxis, int, tuple[int, ...]], ...]
    reduce_itemsize: int
    ema_itemsize: int
    ema_on_host: bool
    ema_every_n_steps: int
    vocab_size: int
    counts: ParameterCounts
    num_parameters: int
    expert_parameters: int
    can_use_cuda_graph: bool

    @property
    def uses_cuda_graph(self) -> bool:
        """True if micro batches run as CUDA graphs, each launched with one call, or layers, each with two."""
        return self.can_use_cuda_graph and self.model_config.enable_cuda_graph is not False

    @property
    def model_config(self) -> AnyModelBlock:
        """Configuration of the model and its batches."""
        return self.run.model

    @property
    def batch_spec(self) -> BatchSpec:
        """Shape of a sample."""
        return self.run.batch_spec

    @property
    def precision(self) -> RunPrecision:
        """Dtypes of the run."""
        return self.run.precision

    @property
    def layout(self) -> DataParallelLayout | None:
        """Sharding layout; None if no other rank has the same part of the model."""
        return self.run.layout

    @property
    def mesh(self) -> ParallelLayout:
        """Ranks that the model and its samples are split over."""
        return self.run.mesh

    @property
    def ranks_per_node(self) -> int:
        """Processes on each node."""
        return self.run.ranks_per_node

    @property
    def micro_batches(self) -> int:
        """Micro batches per rank and step."""
        return self.run.micro_batches

    @property
    def peft(self) -> PeftSlice | None:
        """Parameter-efficient fine-tuning; None without."""
        return self.run.peft

    @property
    def is_frozen(self) -> bool:
        """True if the model's own weights are frozen, as in parameter-efficient fine-tuning."""
        return self.run.model.peft.is_on

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
        return self.mesh.world_size

    @property
    def shards(self) -> int:
        """Number of shards of the optimizer state, except that of experts."""
        return self.layout.shards if self.layout else 1

    @property
    def shards_gradients(self) -> bool:
        """True if a rank keeps its rows of the gradients only."""
        return self.layout is not None and (self.layout.shards_gradients or not self.layout.replicates_weights)

    def sharded(self, elements: int) -> int:
        """Return the share of a rank of the elements that belong to its parameters, if these are sharded."""
        if not self.expert_parameters:
            return elements // self.shards
        experts = elements * self.expert_parameters // self.counts.total
        shards = self.mesh.world_size // self.mesh.pipeline // self.mesh.expert if self.shards > 1 else 1
        return (elements - experts) // self.shards + experts // shards

    @property
    def widths(self) -> ByteWidths:
        """Bytes per element, the same in all stacks and outside of them."""
        return self.stacks[0].widths

    @property
    def output_tokens(self) -> int:
        """Output positions per micro batch, for which logits are computed."""
        return self.stacks[-1].tokens

    @property
    def tensor_parallel(self) -> bool:
        """True if several ranks share each layer."""
        return self.mesh.tensor > 1

    def fully_recomputed(self, number: int) -> frozenset[int]:
        """Return the micro batches in which a pipeline stage, of this number on the rank, recomputes all layers, if
        others recompute fewer.
        """
        split, stage = self.run.pipeline, self.stages[number]
        recompute = self.run.family.stacks[stage.stack].recompute
        if split is None or self.pipeline_rank is None or recompute is None or recompute.partial_micro_batches is None:
            return frozenset()
        rank, micro = StageRecompute(recompute, split, self.pipeline_rank), self.micro_batches
        return frozenset(each for each in range(micro) if rank.covers_stage(stage, each, micro))

    @property
    def with_all_recomputed(self) -> RunInputs:
        """The same in those micro batches; itself if there are none."""
        stacks = dict(enumerate(self.stacks))
        for number, each in enumerate(self.stacks):
            recompute = each.stack.recompute
            if recompute is not None and self.fully_recomputed(number):
                part = replace(each.stack, recompute=replace(recompute, layers=each.stack.num_layers))
                stacks[number] = replace(each, stack=part)
        changed = any(stacks[number] is not each for number, each in enumerate(self.stacks))
        return replace(self, stacks=tuple(stacks.values())) if changed else self

    @property
    def pass_order(self) -> tuple[PipelinePass, ...]:
        """Passes of the rank in a step, through its `stages`; without a pipeline those of one micro batch."""
        split = self.run.pipeline
        if split is not None and self.pipeline_rank is not None:
            return pass_order(self.pipeline_rank, split.ranks, split.chunks, self.micro_batches)
        numbers = [stage.number for stage in self.stages]
        forward = [PipelinePass(number, 0, is_backward=False) for number in numbers]
        return (*forward, *(PipelinePass(number, 0, is_backward=True) for number in reversed(numbers)))

    @property
    def compiled(self) -> bool:
        """True if layers run through torch.compile."""
        return self.stacks[0].compiled


def collect_inputs(
    run: ResolvedRun,
    target: Target,
    *,
    vocab_size: int | None = None,
    model_plan: ModelPlan | None = None,
) -> RunInputs:
    """Collect the inputs of an estimate.

    Args:
        run: the run.
        target: device and software.
        vocab_size: vocabulary size of the tokenizer; None: `override_vocab_size`.
        model_plan: its attention backends on the target, if they have been chosen before.

    Raises:
        ValueError: no attention backend supports the run, compilation is not available, the vocabulary is too small, or
            the model cannot be split over these ranks.
        UserError: CUDA graphs are required but not supported for this run.
    """
    keys = run.model
    vocab_size = vocab_size or keys.override_vocab_size or 1
    mesh, whole = run.mesh, run.with_vocabulary(vocab_size)
    family = rank_slice(whole, mesh.tensor)
    all_counts = count_trainable(keys, vocab_size, run.batch_spec)
    counts = count_rank(all_counts, whole, family, mesh)
    split = run.context_split
    context: CallContext = {
        "device": target.device,
        "capability": target.capability,
        "dtype": run.precision.compute,
        "batch": keys.micro_batch_size,
        "deterministic": not target.flags.allow_nondeterministic,
    }
    if model_plan is None:
        model_plan = plan_model(
            family,
            run.batch_spec,
            context,
            flags=target.flags,
            software=target.software,
            kinds=("training",),
            peft=run.peft,
            context_parallel=split,
        )
    device, decisions = torch.device(target.device), model_plan.decisions
    moving = moving_weights_reason(run, target)
    uses_cuda_graph(run, device, decisions, moving)  # raises if CUDA graphs are required but not supported
    precision = run.precision
    widths = ByteWidths(
        weights=precision.weights_itemsize,
        compute=precision.compute_itemsize,
        residual=precision.weights_itemsize,
    )
    gradient_dtype = grad_reduce_dtype(keys, TORCH_DTYPES[precision.weights]) or TORCH_DTYPES[precision.weights]
    ema = run.exp_manager.ema
    return RunInputs(
        run=run,
        target=target,
        family=family,
        stacks=tuple(_stacks(run, whole, family, model_plan, widths, counts, split, context)),
        stages=whole_stacks(*(stack.num_layers for stack in family.stacks)),
        pipeline_rank=None,
        shared_weights=() if run.pipeline is None else tuple(shared_weights(family, run.pipeline)),
        reduce_itemsize=gradient_dtype.itemsize,
        ema_itemsize=max(4, precision.weights_itemsize) if ema.enable else 0,
        ema_on_host=ema.cpu_offload and target.device == "cuda",
        ema_every_n_steps=ema.every_n_steps,
        vocab_size=vocab_size,
        counts=counts,
        num_parameters=all_counts.total,
        expert_parameters=count_experts(family, expert_ranks=mesh.expert) if mesh.expert > 1 else 0,
        can_use_cuda_graph=cuda_graph_unsupported_reason(run, device, decisions, moving) is None,
    )


def pipeline_ranks(whole: RunInputs) -> tuple[RunInputs, ...]:
    """Return the inputs of each rank of the pipeline, given those of all together; only those without a pipeline.

    Raises:
        ValueError: the layers or the micro batches cannot be distributed so.
    """
    split, family = whole.run.pipeline, whole.family
    if split is None:
        return (whole,)
    stages = split.stages(*(stack.num_layers for stack in family.stacks))
    return tuple(
        _pipeline_rank(whole, rank, tuple(stage for stage in stages if split.rank_of(stage) == rank))
        for rank in range(split.ranks)
    )


def _pipeline_rank(whole: RunInputs, rank: int, stages: tuple[Stage, ...]) -> RunInputs:
    family, experts = stage_slice(whole.family, stages), whole.mesh.expert
    stacks: list[StackInputs] = []
    for stage in stages:
        stack = whole.stacks[stage.stack]
        part, first = stack_part(stack.stack, [stage]), max(0, stack.first_trained_layer - stage.layers.start)
        if part.recompute is not None and stack.stack.recompute is not None and whole.run.pipeline is not None:
            recomputed = StageRecompute(stack.stack.recompute, whole.run.pipeline, rank).first_layers(stage)
            part = replace(part, recompute=replace(part.recompute, layers=recomputed))
        stacks.append(replace(stack, stack=part, first_trained_layer=first))
    return replace(
        whole,
        family=family,
        stacks=tuple(stacks),
        stages=stages,
        pipeline_rank=rank,
        counts=count_stages(whole.counts, whole.family, family, whole.mesh),
        expert_parameters=count_experts(family, expert_ranks=experts) if experts > 1 else 0,
    )


def _stacks(
    run: ResolvedRun,
    whole: FamilySlice,
    family: FamilySlice,
    model_plan: ModelPlan,
    widths: ByteWidths,
    counts: ParameterCounts,
    split: ContextSplit | None,
    context: CallContext,
) -> Iterator[StackInputs]:
    peft, form, stacks = run.peft, run.layer_batch_spec, stacks_with_cross_attention(family)
    compiled, decisions = model_plan.compiled, model_plan.decisions
    if split is not None:  # the backends of a rank's calls, but the size of whole ones, which the ranks share
        calls = {each.label("training"): each.calls["training"] for each in plan_attentions(family, form, context)}
        decisions = {label: replace(decisions[label], call=call) for label, call in calls.items()}
    lora = peft if isinstance(peft, LoRASlice) else None
    # projections that only some layers update count as if all were trained
    targets = lora.targets if lora is not None and lora.layers.numbers is None else None
    names = ("encoder", "decoder") if len(stacks) > 1 else ("",)
    lengths = form.seq_length, form.decoder_seq_length
    for (stack, cross), name, length, first in zip(stacks, names, lengths, counts.first_backward_layers, strict=False):
        attention = decisions[f"{name} training".strip()]
        call = attention.call
        groups = whole.stacks[-1 if cross else 0].attention.groups
        yield StackInputs(
            name=name,
            stack=stack,
            batch=run.model.micro_batch_size,
            length=length,
            attention=attention,
            cross=cross,
            cross_attention=decisions["cross training"] if cross else None,
            encoder_length=form.seq_length if cross else 0,
            widths=replace(widths, residual=max(4, widths.residual)) if stack.fp32_residual else widths,
            compiled=compiled,
            trained_projections=PROJECTIONS if targets is None else targets,
            skips_norm_outputs=compiled and lora is not None and lora.can_skip_norm_output(stack),
            lora_experts=bool((targets or frozenset()) & {"mlp_fc1", "mlp_fc2"}),
            trains_router=peft is None or isinstance(peft, SelectiveSlice),
            fused_lora_mlp=is_lora_mlp_fused(peft, stack, call.device, call.dtype),
            first_trained_layer=first,
            mesh=run.mesh,
            context_split=split,
            frozen_matrices=lora is not None,
            keeps_fp8_casts=run.keeps_fp8_casts,
            shared_heads=run.mesh.tensor // group_parts(groups, run.mesh.tensor),
        )
