"""Training loop of a run: Lightning module, dataloader, callback, checkpoint saver and profilers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...models.build import TORCH_DTYPES, LanguageModel
from ...models.config.model import Family
from ...models.fp8 import fp8_modules
from ...models.memory.recompute import should_recompute
from ...models.model_cost import training_flops_per_sample
from ...models.parallel.context import shard_batch
from ...models.parallel.schedule import stage_in_flight
from ...models.stack import Stack
from ..callbacks.expert_load import build_expert_load_metrics
from ..callbacks.pipeline_timer import PipelineTimer
from ..callbacks.profiler import ProfilerList, build_profilers
from ..callbacks.reporting import ThroughputFactors
from ..callbacks.step_limit import StepLimit
from ..callbacks.train_loop import SaveFunction, TrainLoopCallback, ValidateFunction
from ..callbacks.watchdog import StepTimer, Watchdog
from ..checkpoint.async_saver import CheckpointSaver
from ..checkpoint.checkpoint_paths import RESOLVED_CONFIG
from ..checkpoint.loop_state import LoopState
from ..checkpoint.reader import EMA_WEIGHTS, FP8_SCALES, OPTIMIZER, tensors_to_save
from ..checkpoint.save_interval import SaveInterval
from ..checkpoint.writer import CheckpointContent, apply_retention
from ..config.captured_layers import captures_layers
from ..config.resolved_run import ResolvedRun
from ..config.schema.exp_manager import canonical_metric_name
from ..config.schema.optim import build_schedule
from ..data.batch_sampler import BatchSchedule, RankBatchSampler, parse_ramp_up
from ..data.dataloader import PrefetchingDataLoader, ShardFields
from ..data.subsets import validation_subset
from ..data.tokenizers.tokenizer import tokenizer_state
from ..device.choose_device import device_name
from ..distributed.data_parallel import DataParallel
from ..distributed.mesh import Mesh
from ..distributed.pipeline import Pipeline, StageShapes
from ..evaluation.held_out_loss import EvaluationResult, evaluate, loss_function, pipelined_loss_function
from ..lightning.cuda_graph import CapturedMicroBatches, RunMicroBatch, layer_capture, report_failure
from ..lightning.expert_balance import build_expert_balancer
from ..lightning.lightning_module import LanguageModule
from ..optim.optimizer_factory import recorded_settings
from ..plan.hardware import bf16_peak_flops
from ..utils.local_shard import local_shards
from .run_context import RunContext
from .training_state import TrainingState, fp8_scale_shards


@dataclass(frozen=True)
class TrainingLoop:
    """The parts that `lightning_trainer.fit` runs, and those that must be closed after it.

    Attributes:
        module: model, optimizer and dataloader, at the first step of this process.
        callback: logging, validation, checkpoints and stopping between steps.
        saver: checkpoint saver, perhaps still writing in the background.
        profilers: the enabled profilers.
        watchdog: watches the steps while training.
    """

    module: LanguageModule
    callback: TrainLoopCallback
    saver: CheckpointSaver
    profilers: ProfilerList
    watchdog: Watchdog


def build_training_loop(
    run: RunContext,
    state: TrainingState,
    seconds: float | None = None,
    on_first_step: Callable[[], None] | None = None,
) -> TrainingLoop:
    """Build the training loop of a run from its step on, to be shortened if it takes more than `seconds`.

    `on_first_step` is called after the first step of this process.
    """
    resolved, keys, ranks, start, log = run.resolved, run.resolved.model, run.ranks, state.start, run.logger.log
    schedule = BatchSchedule(
        keys.global_batch_size,
        first_step=start.step,
        consumed=start.consumed_samples,
        ramp_up=parse_ramp_up(keys.rampup_batch_size, keys.global_batch_size),
    )
    module = _build_module(run, state, schedule)
    limit = StepLimit(resolved.trainer.max_steps, seconds)
    saver = CheckpointSaver(
        run.directory.checkpoints,
        ranks,
        _retention(run),
        async_save=resolved.exp_manager.checkpoint_callback_params.async_save,
        on_saved=lambda path, seconds: run.events.write("save", checkpoint=path.name, seconds=round(seconds, 4)),
    )
    profilers = build_profilers(
        resolved.trainer, keys.memory_profile, run.directory.path, run.device, log, ranks.rank, start.step
    )
    if module.pipeline is not None:
        directory = run.directory.path if ranks.is_rank_zero else None
        profilers.add(PipelineTimer(module.pipeline, run.mesh.stages, run.device, directory, log))
    timer = StepTimer()
    save = _build_save(run, state, module, schedule, saver, limit)
    automatic = resolved.exp_manager.checkpoint_callback_params.every_n_train_steps == "auto" and save is not None
    callback = TrainLoopCallback(
        resolved.trainer,
        resolved.exp_manager,
        run.logger,
        run.stop,
        build_throughput(resolved, run.data.vocab_size, run.device),
        validate=_build_validation(run, state, module),
        save=save,
        checkpoint_directory=run.directory.checkpoints,
        consumed_samples=schedule.consumed_samples,
        state=start.loop,
        resumed_metrics=start.metrics,
        all_reduce_flags=ranks.all_reduce_flags_async,
        flags_are_async=ranks.world_size > 1,
        ema=state.ema,
        profilers=profilers,
        expert_load=build_expert_load_metrics(
            keys,
            state.model,
            run.directory.path if ranks.is_rank_zero else None,
            run.mesh.data,
            run.mesh.stages,
            resumed_at=start.step,
            state=start.loop.expert_load,
            report=log,
        ),
        save_interval=SaveInterval(ranks, run.past_events, start.step) if automatic else None,
        is_saving=lambda: saver.is_writing,
        events=run.events,
        timer=timer,
        limit=limit,
        users=run.callbacks,
        on_shorten=lambda: _shorten(run, module, limit.max_steps),
        on_first_step=on_first_step,
    )
    watchdog = Watchdog(timer, resolved.trainer.step_timeout, run.directory.path, ranks)
    return TrainingLoop(module, callback, saver, profilers, watchdog)


def _build_module(run: RunContext, state: TrainingState, schedule: BatchSchedule) -> LanguageModule:
    """Build the Lightning module with its dataloader."""
    keys, mesh = run.resolved.model, run.mesh
    # On a CPU weights are gathered when they are waited for: all ranks wait, or none, whichever have callbacks.
    waits, layout = bool(run.ranks.all_reduce_flags(bool(run.callbacks.callbacks))), run.resolved.layout
    if waits and keys.optim.overlap_param_sync and layout is not None and layout.gathers_updates:
        run.logger.log(
            "warning: `overlap_param_sync` (True) has no effect with callbacks of your own: they may read weights "
            "after a step, so it waits until all are gathered"
        )
    batches = RankBatchSampler(schedule, keys.micro_batch_size, mesh.data.rank, mesh.data.world_size)
    return LanguageModule(
        state.model,
        state.optimizer,
        build_schedule(keys.optim, run.resolved.trainer.max_steps),
        PrefetchingDataLoader(
            run.data.train,
            batches,
            run.device,
            keys.data.num_workers,
            _report_on_every_rank(run),
            shard=token_shard(keys.family, mesh),
        ),
        run.resolved.precision,
        seed=keys.seed,
        step=state.start.step,
        ranks=run.ranks,
        replicas=mesh.replicas,
        losses=mesh.losses,
        data_parallel=state.data_parallel,
        pipeline=_build_pipeline(run, state.model),
        graph_capture=_graph_capture(run, state.model, state.data_parallel, schedule),
        expert_balancer=build_expert_balancer(
            keys, state.model, lambda step: schedule.batch_size(step) // keys.micro_batch_size, mesh.data
        ),
        fp8_modules=[]
        if keys.fp8_params or not run.resolved.keeps_fp8_casts
        else list(fp8_modules(state.model).values()),
        fp8_scales=state.fp8_scales,
        fp8_weights=state.fp8_weights,
        waits_for_weights=waits,
    )


def _build_pipeline(run: RunContext, model: LanguageModel) -> Callable[[Callable[[], None]], Pipeline] | None:
    """Return a function that builds the pipeline of this rank, given what to call after each backward pass of a stage;
    None for one rank.
    """
    resolved, own = run.resolved, model.pipeline
    if own is None or resolved.pipeline is None:
        return None
    mesh, spec = resolved.mesh, resolved.batch_spec
    lengths = [spec.seq_length, spec.decoder_seq_length][: len(resolved.family.stacks)]
    dtype = TORCH_DTYPES[resolved.precision.weights]
    wide = torch.promote_types(dtype, torch.float32)
    shapes = StageShapes(
        micro_batch=resolved.model.micro_batch_size,
        lengths=tuple(length // mesh.context for length in lengths),
        hidden_size=resolved.family.stacks[0].hidden_size,
        dtype=dtype,
        residual_dtypes=tuple(wide if stack.fp32_residual else dtype for stack in resolved.family.stacks),
        sequence_ranks=mesh.tensor if mesh.sequence else 1,
    )
    stages = resolved.pipeline.stages(*(stack.num_layers for stack in resolved.family.stacks))
    return partial(Pipeline, own, stages, shapes, run.mesh.stages, run.device, reuses_gradients=run.uses_cuda_graph)


def token_shard(family: Family, mesh: Mesh) -> ShardFields | None:
    """Return a function that selects the tokens of a context-parallel rank; None for one rank."""
    ranks = mesh.context
    if ranks is None:
        return None
    return partial(shard_batch, rank=ranks.rank, size=ranks.size, causal=family != "bert")


def _shorten(run: RunContext, module: LanguageModule, max_steps: int) -> None:
    """Let the learning rate schedule, the log and the record of a run end after `max_steps`."""
    module.schedule = build_schedule(run.resolved.model.optim, max_steps)
    run.logger.shorten(max_steps)
    replace(run.config, document=_config_document(run, max_steps)).save(run.directory.path / RESOLVED_CONFIG)


def _config_document(run: RunContext, max_steps: int) -> dict[str, Any]:
    """Return the configuration as saved, with the steps that the run has after all."""
    document = run.config.document
    if max_steps == run.resolved.trainer.max_steps:
        return document
    return document | {"trainer": document["trainer"] | {"max_steps": max_steps}}


def _report_on_every_rank(run: RunContext) -> Callable[[str], None]:
    """Return a function that logs a line on rank 0, and prints it on others, whose logger is disabled."""
    if run.ranks.is_rank_zero:
        return run.logger.log
    return lambda line: print(f"rank {run.ranks.rank}: {line}", file=sys.stderr, flush=True)


def build_throughput(run: ResolvedRun, vocab_size: int, device: torch.device) -> ThroughputFactors:
    """Return the token and FLOP counts from which throughput and MFU of all processes are computed."""
    form = run.batch_spec
    tokens = form.seq_length + form.decoder_seq_length
    peak = bf16_peak_flops(device_name(device))
    return ThroughputFactors(
        tokens_per_sample=tokens,
        flops_per_token=training_flops_per_sample(
            run.model, run.with_vocabulary(vocab_size).padded_vocab_size, form, frozen=run.model.peft.is_on
        )
        / tokens,
        peak_flops=None if peak is None else peak * run.world_size,
    )


def _graph_capture(
    run: RunContext, model: LanguageModel, data_parallel: DataParallel | None, schedule: BatchSchedule
) -> Callable[[RunMicroBatch], RunMicroBatch] | None:
    """Return a wrapper that captures micro batches as CUDA graphs, or None for eager; see `model.enable_cuda_graph`.

    Of several processes the layers are captured, by themselves. With `enable_cuda_graph: null`, a capture that fails is
    logged and falls back to eager.
    """
    if not run.uses_cuda_graph:
        return None
    on_failure = None if run.resolved.model.enable_cuda_graph else _report_on_every_rank(run)
    if captures_layers(run.resolved.model, run.ranks.world_size):
        report = partial(report_failure, on_failure=on_failure)
        whole_weights = None if data_parallel is None else data_parallel.whole_weights
        for index, stack in enumerate(model.stacks):
            stack.capture_layers(layer_capture, report, _in_flight(run, model, index, schedule), whole_weights)
            if data_parallel is not None:
                stack.register_forward_pre_hook(partial(_before_forward, data_parallel))
        return None
    return lambda micro_batch: CapturedMicroBatches(micro_batch, model.parameters(), on_failure)


def _before_forward(data_parallel: DataParallel, stack: Stack, *arguments: Any) -> None:
    if should_recompute(stack):
        data_parallel.before_forward()


def _in_flight(
    run: RunContext, model: LanguageModel, stack: int, schedule: BatchSchedule
) -> Mapping[range, int] | None:
    """Return the `in_flight` of `Stack.capture_layers`; None without a pipeline."""
    split = run.resolved.pipeline
    if split is None or model.pipeline is None:
        return None
    # fewer micro batches than ranks, as a ramp-up may begin with, are all in flight at a time
    numbers = [size * run.resolved.micro_batches // schedule.global_batch_size for size in schedule.batch_sizes]
    return {
        stage.layers: max(stage_in_flight(stage.number, split.ranks, split.chunks, number) for number in numbers)
        for stage in model.pipeline.stages
        if stage.stack == stack
    }


def _build_validation(run: RunContext, state: TrainingState, module: LanguageModule) -> ValidateFunction | None:
    """Return a function that validates on `trainer.limit_val_batches` of the samples, or None if that is 0."""
    spec, model, pipeline = run.resolved.data, state.model, module.pipeline
    limit, size = spec.limit_val_batches, run.resolved.model.micro_batch_size
    if not limit or run.data.validation is None:
        return None
    samples = validation_subset(spec, run.data.validation)
    per_global_batch = spec.global_batch_size // size
    metrics = run.resolved.trainer.validation_metrics
    default_batches = limit if isinstance(limit, int) else None

    def validate(global_batches: int | None, should_stop: Callable[[], bool] | None) -> EvaluationResult:
        model.eval()
        batches = default_batches if global_batches is None else global_batches
        try:
            return evaluate(
                loss_function(model, run.resolved.precision, run.device)
                if pipeline is None
                else pipelined_loss_function(model, pipeline, run.resolved.precision, run.device, len(metrics)),
                samples,
                token_bytes=run.data.token_byte_counts,
                batch_size=size,
                limit_batches=None if batches is None else batches * per_global_batch,
                device=run.device,
                ranks=run.mesh.data,
                replicas=run.mesh.losses,
                pads_batches=run.mesh.tensor is not None or pipeline is not None,
                shard=token_shard(run.resolved.data.family, run.mesh),
                counts_targets=run.mesh.counts_targets,
                metrics=metrics,
                should_stop=should_stop,
            )
        finally:
            if pipeline is not None:
                pipeline.finish_forwards()
            if state.data_parallel is not None:
                state.data_parallel.reshard()
            model.train()

    return validate


def _build_save(
    run: RunContext,
    state: TrainingState,
    module: LanguageModule,
    schedule: BatchSchedule,
    saver: CheckpointSaver,
    limit: StepLimit,
) -> SaveFunction | None:
    """Return a function that saves a checkpoint of a step, or None if no checkpoint would be kept."""
    keys, start = run.resolved.exp_manager, state.start
    params = keys.checkpoint_callback_params
    if not keys.create_checkpoint_callback or (params.save_top_k == 0 and not params.save_last):
        return None

    def save(step: int, metrics: Mapping[str, float], loop: LoopState) -> Path:
        module.wait_for_weights()  # those that other ranks have updated may be on their way
        run_state = start.model_copy(
            update={
                "step": step,
                "updates": state.optimizer.step_count,
                "loss_scale": None if state.optimizer.loss_scale is None else state.optimizer.loss_scale.state(),
                "consumed_samples": schedule.consumed_samples(step),
                "val_loss": metrics.get("val_loss"),
                "metrics": {name: value for name, value in metrics.items() if name != "val_loss"},
                "loop": loop,
                "optimizer": start.optimizer | recorded_settings(run.resolved.model.optim, limit.max_steps),
            }
        )
        kind, state_dict = tensors_to_save(module.model)
        in_fp8 = {} if state.fp8_weights is None else state.fp8_weights.local_shards()
        tensors = {
            kind: local_shards(module.model, state_dict) | in_fp8,
            OPTIMIZER: state.optimizer.local_shards(),
        }
        if state.ema is not None:
            tensors[EMA_WEIGHTS] = state.ema.local_shards()
        if state.fp8_scales is not None:
            tensors[FP8_SCALES] = fp8_scale_shards(state.fp8_scales, run.mesh)
        tokenizer = tokenizer_state(run.data.tokenizer)
        return saver.save(CheckpointContent(run_state, tensors, _config_document(run, limit.max_steps), tokenizer))

    return save


def _retention(run: RunContext) -> Callable[[], None]:
    """Return a function that applies checkpoint retention; a run that is being stopped keeps its newest checkpoint."""
    params = run.resolved.exp_manager.checkpoint_callback_params

    def clean() -> None:
        apply_retention(
            run.directory.checkpoints,
            save_top_k=params.save_top_k,
            save_last=params.save_last or run.stop.is_failing or run.stop.reason is not None,
            monitor=canonical_metric_name(params.monitor),
            mode=params.mode,
        )

    return clean
