"""Facts that follow from the configuration of a run before its data are known, derived once and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...models.config.batch_shape import BatchSpec
from ...models.config.families import FamilySlice, family_slice
from ...models.config.model import Family
from ...models.config.peft import PeftSlice, PromptSlice, peft_slice
from ...models.dispatch.context_calls import ContextSplit
from ...models.parallel.layout import ParallelLayout
from ...models.parallel.stages import PipelineSplit
from .data_task import Task, batch_spec, task_from_keys
from .node_counts import ranks_per_node
from .parameter_layout import DataParallelLayout, context_split, layout_from_keys, parallel_layout, pipeline_split
from .run_precision import RunPrecision, resolve_precision
from .schema.exp_manager import ExpManagerBlock
from .schema.root import AnyModelBlock, ModelBlock, RootBlock
from .schema.trainer_and_data import DataBlock, TokenizerBlock, TrainerBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Inputs of the tokenizer and the samples of a run.

    Attributes:
        keys: `model.data`.
        tokenizer: `model.tokenizer`.
        task: the training task and its sequence lengths.
        family: the model family.
        vocab_size: `model.override_vocab_size`.
        seed: `model.seed`.
        answer_only_loss: the loss of fine-tuning is computed on answers only.
        global_batch_size: samples per optimizer step.
        limit_val_batches: `trainer.limit_val_batches`; 0 without validation.
    """

    keys: DataBlock
    tokenizer: TokenizerBlock
    task: Task
    family: Family
    vocab_size: int | None
    seed: int
    answer_only_loss: bool
    global_batch_size: int
    limit_val_batches: int | float

    @property
    def length_key(self) -> str:
        """The key that sets the sequence length."""
        if self.keys.seq_length is not None:
            return "model.data.seq_length"
        return "model.seq_length" if self.family == "t5" else "model.encoder_seq_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A run as its configuration describes it.

    Attributes:
        env_vars: `env_vars`.
        trainer: `trainer`.
        exp_manager: `exp_manager`.
        model: `model`.
        data: inputs of its tokenizer and samples.
        batch_spec: shape of a sample.
        family: slices of the model and its stacks, with recomputation and offloading of every layer; for a vocabulary
            of one token if `override_vocab_size` is not set (`with_vocabulary`).
        peft: parameter-efficient fine-tuning; None without.
        precision: dtypes of weights and arithmetic.
        mesh: the processes by axis: data, context, tensor and pipeline parallelism.
        context_split: how context-parallel ranks share attention; None for one.
        pipeline: how the layers are distributed over the ranks of a pipeline; None for one.
        layout: distribution of parameters and optimizer state over the data-parallel ranks; None if there is one.
    """

    env_vars: Mapping[str, str | int | float | bool]
    trainer: TrainerBlock
    exp_manager: ExpManagerBlock
    model: AnyModelBlock
    data: DataSpec
    batch_spec: BatchSpec
    family: FamilySlice
    peft: PeftSlice | None
    precision: RunPrecision
    mesh: ParallelLayout
    context_split: ContextSplit | None
    pipeline: PipelineSplit | None
    layout: DataParallelLayout | None

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.mesh.world_size

    @property
    def ranks_per_node(self) -> int:
        """Number of processes on each node."""
        return ranks_per_node(self.trainer, self.world_size)

    @property
    def layer_batch_spec(self) -> BatchSpec:
        """Shape of a sample as layers see it: prompt tuning lengthens the sequences."""
        virtual = self.peft.virtual_tokens if isinstance(self.peft, PromptSlice) else 0
        return replace(self.batch_spec, seq_length=self.batch_spec.seq_length + virtual)

    @property
    def micro_batches(self) -> int:
        """Micro batches per data-parallel rank and optimizer step."""
        return self.model.global_batch_size // self.model.micro_batch_size // self.mesh.data

    @property
    def keeps_fp8_casts(self) -> bool:
        """True if the fp8 casts of weights are made once for several passes: for the micro batches of a step, those of
        frozen weights once, and those that are all there is of a weight. Not of weights that are gathered for each pass
        (FSDP2), nor with offloaded activations.
        """
        moves = (self.layout is not None and not self.layout.replicates_weights) or any(
            stack.offload for stack in self.family.stacks
        )
        has_fp8 = any(stack.fp8 for stack in self.family.stacks)
        return has_fp8 and not moves and (self.micro_batches > 1 or self.peft is not None or self.model.fp8_params)

    @property
    def why_not_fp8_params(self) -> str:
        """Why trained weights cannot be kept in fp8 on these devices, which rules do not know; empty if they can."""
        if not self.model.fp8 or not self.model.fp8_params or self.peft is not None:
            return ""
        if not self.precision.main_weights:
            return (
                "`model.fp8_params` (True) casts trained weights from fp32 main weights, and this run has "
                f"{self.precision.name}; set trainer.precision=bf16, or model.fp8_params=false"
            )
        if self.layout is not None and self.layout.shards > 1 and self.model.fp8_recipe not in ("tensorwise", None):
            return (
                f"`model.fp8_params` (True) needs model.fp8_recipe=tensorwise, not {self.model.fp8_recipe}, on "
                f"{self.layout.shards} ranks that each update some rows of a weight"
            )
        return ""

    @property
    def overlaps_param_sync(self) -> bool:
        """True if updated weights are gathered while the next forward pass runs (`overlap_param_sync` not False): not
        where all are read before its start, by callbacks, or to be cast to fp8, nor where layers are offloaded.
        """
        gathers = self.layout is not None and self.layout.gathers_updates
        casts = self.keeps_fp8_casts and not self.model.fp8_params
        moves = any(stack.offload and stack.offload.weights for stack in self.family.stacks)
        return (
            self.model.optim.overlap_param_sync is not False
            and gathers
            and not (casts or moves or self.trainer.callbacks)
        )

    def with_vocabulary(self, vocab_size: int) -> FamilySlice:
        """Return the slices of the model for the vocabulary of a tokenizer.

        Raises:
            ValueError: `override_vocab_size` is smaller.
        """
        return family_slice(self.model, vocab_size=vocab_size, batch_spec=self.batch_spec)


def resolve_run(
    root: RootBlock, *, world_size: int | None = None, capability: tuple[int, int] | None = None
) -> ResolvedRun:
    """Resolve the configuration of a run.

    Args:
        world_size: number of processes; None for a use of the model in one process, whatever the keys of parallelism.
        capability: CUDA compute capability of the device; None for other devices.

    Raises:
        ValueError: the sequence lengths are invalid; configuration rules report that earlier.
        UserError: the processes do not make up whole replicas of the model; with `trainer.devices: auto`, since rules
            report that earlier too.
    """
    keys = root.model
    mesh = ParallelLayout() if world_size is None else parallel_layout(keys, world_size)
    task = task_from_keys(keys)
    spec = batch_spec(task, keys.data)
    data = DataSpec(
        keys=keys.data,
        tokenizer=keys.tokenizer,
        task=task,
        family=keys.family,
        vocab_size=keys.override_vocab_size,
        seed=keys.seed,
        answer_only_loss=isinstance(keys, ModelBlock) and keys.answer_only_loss is not False,
        global_batch_size=keys.global_batch_size,
        limit_val_batches=root.trainer.limit_val_batches,
    )
    return ResolvedRun(
        env_vars=root.env_vars,
        trainer=root.trainer,
        exp_manager=root.exp_manager,
        model=keys,
        data=data,
        batch_spec=spec,
        family=family_slice(keys, vocab_size=keys.override_vocab_size or 1, batch_spec=spec),
        peft=peft_slice(keys.peft),
        precision=resolve_precision(root.trainer.precision, keys.megatron_amp_O2, capability),
        mesh=mesh,
        context_split=context_split(keys) if mesh.context > 1 else None,
        pipeline=pipeline_split(keys) if mesh.pipeline > 1 else None,
        layout=layout_from_keys(keys, mesh, ranks_per_node(root.trainer, mesh.world_size)),
    )
