"""Training run, from a validated configuration to the last checkpoint."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..kernels.attention.dispatch import format_selections
from ..models.build import LanguageModel
from ..models.memory.host_copies import HostMemoryError
from .callbacks.early_stopping import STOP_REASON_PREFIX, continue_hint
from .callbacks.expert_load import build_expert_load_metrics
from .callbacks.preemption import StopHandler
from .callbacks.profiler import build_profilers, check_profiling
from .callbacks.train_loop import TrainLoopCallback
from .checkpoint.async_saver import CheckpointSaver
from .checkpoint.reader import BaseRecord, Checkpoint, checkpoint_paths, open_checkpoint
from .checkpoint.run_directory import RunDirectory, open_run_directory, save_run_record
from .config.lr_schedule import build_schedule
from .config.parameter_layout import layout_from_config
from .config.run_config import RunConfig
from .config.schema.root import RootBlock
from .conversion.pretrained import PretrainedWeights, find_configured_pretrained
from .conversion.warm_start import load_pretrained_weights
from .core.debug_runs import fast_dev_run, overfit_batches
from .core.factory import (
    build_ema,
    build_graph_capture,
    build_model,
    build_optimizer,
    build_retention,
    build_save,
    build_throughput,
    build_validation,
    check_attention,
    check_metrics,
    check_splits,
    choose_device,
    data_parallel_from_config,
)
from .core.resume import check_resume_compatibility, find_resume_checkpoint, initial_run_state, load_resumed_weights
from .core.run_summary import describe_offload_traffic, describe_optimizer_offload, summarize_run
from .data.batch_sampler import BatchSchedule, RankBatchSampler, parse_ramp_up
from .data.build_datasets import Data, build_data
from .data.dataloader import PrefetchingDataLoader
from .device.cuda_graph_support import uses_cuda_graph
from .device.determinism import attention_flags, deterministic_algorithms
from .device.precision import PrecisionPlan, plan_precision
from .distributed.process_group import DistributedContext, describe_process
from .evaluation.held_out_loss import EvaluationResult
from .lightning.expert_balance import build_expert_balancer
from .lightning.lightning_module import LanguageModule
from .lightning.lightning_trainer import fit
from .loggers.logger_backends import check_loggers
from .loggers.progress_bar import ProgressDisplay
from .loggers.run_logger import RunLogger
from .plan.memory_check import check_memory
from .plan.report import measured_line, out_of_memory_lines, summary_lines
from .plan.run_plan import Plan, plan_run
from .utils.environment import set_variables
from .utils.errors import EXIT_OK, UserError
from .utils.host_memory import is_out_of_host_memory, is_out_of_memory
from .utils.text import pluralize


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run.

    Attributes:
        directory: the run directory.
        checkpoint: the newest checkpoint of this process, or the one it resumed from; None if there is none.
        step: completed optimizer steps.
        validation: the last validation of this process, or None.
        stop_reason: why it stopped before `max_steps` (a signal's name, `trainer.max_time=...`), or None.
        exit_code: 0, 130 after SIGINT, 143 after SIGTERM.
        model: the trained model, on its device.
        data: the training data.
    """

    directory: Path
    checkpoint: Path | None
    step: int
    validation: EvaluationResult | None
    stop_reason: str | None
    exit_code: int
    model: LanguageModel
    data: Data


def train(config: RunConfig) -> int:
    """Train as configured and return the exit code."""
    return run_training(config).exit_code


def run_training(config: RunConfig, ranks: DistributedContext | None = None) -> TrainingResult:
    """Train as configured, from scratch or from a checkpoint.

    Args:
        config: the same on every rank.
        ranks: the initialized ranks of the run; None for a single process.

    Raises:
        UserError: the configuration is not supported on this machine, training diverged, or the disk is full.
    """
    config = fast_dev_run(config)
    root = config.root
    set_variables(root.env_vars)  # for callers from Python; the CLI has set them before torch was imported
    ranks = ranks or DistributedContext()
    if len(set(ranks.all_gather_text(config.digest))) > 1:
        raise UserError("the ranks have different configurations; start them with the same files and overrides")
    device = choose_device(root, ranks)
    precision = plan_precision(root.trainer, root.model.megatron_amp_O2, device)
    check_loggers(root.exp_manager)
    check_profiling(root, device)
    _free_previous_runs(device)
    with deterministic_algorithms(root.trainer.deterministic), _report_out_of_memory(root, device):
        check_memory(root, precision, device, layout_from_config(root, ranks.world_size))
        uses_cuda_graph(root, device, ranks.world_size, check_attention(root, precision, device))
        return _prepare_and_train(config, device, precision, ranks)


def _free_previous_runs(device: torch.device) -> None:
    """Free the device memory of earlier runs in this process and reset its peak statistics.

    Lightning's loop and its module form a reference cycle that keeps the model alive until garbage collection.
    """
    if device.type == "cuda" and torch.cuda.is_initialized():  # the allocator has no statistics before
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def _report_out_of_memory(root: RootBlock, device: torch.device, plan: Plan | None = None) -> Iterator[None]:
    """Turn a failed allocation into a UserError, with the keys that would help if there is a plan."""
    try:
        yield
    except HostMemoryError as error:
        raise UserError(f"out of host memory: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = " ".join(str(error).split())[:200]
        on_host = device.type != "cpu" and is_out_of_host_memory(error)
        where = "out of host memory" if on_host else f"out of memory on {device.type}"
        fixes = (
            ["offload less to host memory, or prefetch fewer batches"] if on_host else out_of_memory_lines(root, plan)
        )
        raise UserError([where + (f": {message}" if message else ""), *fixes]) from error


def _prepare_and_train(
    config: RunConfig, device: torch.device, precision: PrecisionPlan, ranks: DistributedContext
) -> TrainingResult:
    root = config.root
    with ExitStack() as stack:
        stop = stack.enter_context(StopHandler(root.trainer.max_time, root.exp_manager.max_time_per_run))
        data = _build_data(root, ranks)  # before the run directory, so that unreadable data leaves none behind
        warnings = check_metrics(root, data) + check_splits(root, data)
        directory, resumed, lines = _open_directory_and_checkpoint(config, ranks, stack)
        step = resumed.state.step if resumed else 0
        if ranks.is_rank_zero:
            progress = ProgressDisplay(root.trainer.max_steps, live=root.trainer.enable_progress_bar, title=root.name)
            validates_again = resumed is not None and resumed.state.loop.validation_due
            logger = RunLogger.open(config, directory.path, progress, resumed_at=step, drop_validation=validates_again)
        else:
            logger = RunLogger.disabled()
        with logger:
            for line in [f"run directory {directory.path}", *lines, *(f"warning: {text}" for text in warnings)]:
                logger.log(line)
            plan = plan_run(root, device, world_size=ranks.world_size, vocab_size=data.vocab_size)
            for line in summary_lines(plan) if plan is not None else ():
                logger.log(line)
            try:
                with _report_out_of_memory(root, device, plan):
                    result = _train(config, device, precision, data, directory, resumed, logger, stop, ranks)
                if plan is not None and device.type == "cuda" and result.step > (resumed.state.step if resumed else 0):
                    allocated = torch.cuda.max_memory_allocated(device)
                    logger.log(measured_line(plan, allocated, torch.cuda.max_memory_reserved(device)))
                for line in describe_offload_traffic(result.model):
                    logger.log(line)
                return result
            except UserError as error:
                with suppress(UserError):  # if run.log cannot be written either, keep the original error
                    logger.log_to_file("\n".join(error.lines))
                raise


def _build_data(root: RootBlock, ranks: DistributedContext) -> Data:
    """Build the data on local rank 0 first, then on the other ranks of the node, which reuse its index files."""
    data, problem = None, None
    for is_our_turn in (ranks.local_rank == 0, ranks.local_rank != 0):
        if is_our_turn:
            try:
                data = overfit_batches(build_data(root), root)
                if ranks.world_size > 1 and ranks.local_rank == 0:
                    data.train.batch(0, 1)  # builds the index of the first epoch, if it is cached in files
            except UserError as error:
                problem = error
        ranks.raise_on_all_ranks(problem)
    assert data is not None
    return data


def _open_directory_and_checkpoint(
    config: RunConfig, ranks: DistributedContext, stack: ExitStack
) -> tuple[RunDirectory, Checkpoint | None, list[str]]:
    """Choose the run directory and the checkpoint to resume from on rank 0, and broadcast them."""
    directory, resumed, lines, problem = None, None, [], None
    if ranks.is_rank_zero:
        try:
            directory = stack.enter_context(open_run_directory(config))
            resumed, lines = find_resume_checkpoint(config.root.exp_manager, directory)
        except UserError as error:
            problem = error
    ranks.raise_on_all_ranks(problem)
    paths = [str(directory.path), str(directory.checkpoints), str(resumed.path) if resumed else ""] if directory else []
    path, checkpoints, start = json.loads(ranks.broadcast_text(json.dumps(paths)))
    if directory is None:
        directory = RunDirectory(Path(path), Path(checkpoints))
        resumed = open_checkpoint(Path(start), verify=False) if start else None
    return directory, resumed, lines


def _train(
    config: RunConfig,
    device: torch.device,
    precision: PrecisionPlan,
    data: Data,
    directory: RunDirectory,
    resumed: Checkpoint | None,
    logger: RunLogger,
    stop: StopHandler,
    ranks: DistributedContext,
) -> TrainingResult:
    root, keys = config.root, config.root.model
    base = find_configured_pretrained(keys.restore_from_path)
    start = initial_run_state(root, data, precision, _base_record(root, base, ranks))

    data_parallel = data_parallel_from_config(root, precision, device, ranks)
    model = build_model(root, data, precision, device, data_parallel)
    if resumed is None:
        for line in load_pretrained_weights(root, model, data.tokenizer, base):
            logger.log(line)
    optimizer = build_optimizer(root, model, precision, data_parallel)
    if resumed is not None:
        changes = check_resume_compatibility(resumed, start, data.tokenizer.to_dict(), root)
        load_resumed_weights(resumed, model, base, root)
        for warning in changes:  # logged only after the weights fit
            logger.log(f"warning: {warning}")
        resumed.load_optimizer(optimizer)
        logger.log(f"resuming from {resumed.path}, {pluralize(resumed.state.consumed_samples, 'sample')} consumed")
        start = start.model_copy(
            update={
                "step": resumed.state.step,
                "consumed_samples": resumed.state.consumed_samples,
                "loop": resumed.state.loop,
                "metrics": resumed.state.metrics,
            }
        )
    ema = build_ema(root, model, optimizer, data_parallel)
    if ema is not None and resumed is not None:
        if resumed.has_ema:
            resumed.load_ema(ema.local_shards())
        else:
            logger.log(f"warning: {resumed.path} holds no EMA weights; the EMA starts from the current weights")
    processes = [
        json.loads(text) for text in ranks.all_gather_text(json.dumps(describe_process(ranks, device, config.digest)))
    ]
    if ranks.is_rank_zero:
        save_run_record(config, directory, device, processes)
    for line in summarize_run(root, model, data, precision, device, data_parallel.layout if data_parallel else None):
        logger.log(line)
    for line in describe_optimizer_offload(root, optimizer, device):
        logger.log(line)
    flags = attention_flags(root)
    log = logger.log if flags.debug else logger.log_to_file
    for text in (*flags.notes(), *format_selections(model.attention_decisions)):
        log(text)

    batch_schedule = BatchSchedule(
        keys.global_batch_size,
        first_step=start.step,
        consumed=start.consumed_samples,
        ramp_up=parse_ramp_up(keys.rampup_batch_size, keys.global_batch_size),
    )
    batches = RankBatchSampler(batch_schedule, keys.micro_batch_size, ranks.rank, ranks.world_size)
    dataloader = PrefetchingDataLoader(data.train, batches, device, keys.data.num_workers)
    module = LanguageModule(
        model,
        optimizer,
        build_schedule(keys.optim, root.trainer.max_steps),
        dataloader,
        precision,
        seed=keys.seed,
        step=start.step,
        ranks=ranks,
        data_parallel=data_parallel,
        graph_capture=build_graph_capture(root, model, device, ranks.world_size, logger.log),
        expert_balancer=build_expert_balancer(
            root, model, lambda step: batch_schedule.batch_size(step) // keys.micro_batch_size, ranks
        ),
    )
    params = root.exp_manager.checkpoint_callback_params
    clean = build_retention(root, directory.checkpoints, stop)
    saver = CheckpointSaver(directory.checkpoints, ranks, clean, async_save=params.async_save)
    profilers = build_profilers(root, directory.path, device, logger.log, ranks.rank, start.step)
    train_loop = TrainLoopCallback(
        root,
        logger,
        stop,
        build_throughput(root, model, device, ranks.world_size),
        validate=build_validation(root, model, data, precision, device, ranks, data_parallel),
        save=build_save(config, data, start, module, batch_schedule, saver, ema),
        checkpoint_directory=directory.checkpoints,
        consumed_samples=batch_schedule.consumed_samples,
        state=start.loop,
        resumed_metrics=start.metrics,
        all_reduce_flags=ranks.all_reduce_flags_async,
        flags_are_async=ranks.world_size > 1,
        ema=ema,
        profilers=profilers,
        expert_load=build_expert_load_metrics(
            root,
            model,
            directory.path,
            ranks,
            resumed_at=start.step,
            state=start.loop.expert_load,
            report=logger.log,
        ),
    )
    if start.step >= root.trainer.max_steps and not train_loop.validation_pending:
        logger.log(
            f"this run is finished: step {start.step:,} of `trainer.max_steps` ({root.trainer.max_steps:,}); raise it "
            "to continue training"
        )
    try:
        if train_loop.validation_pending:
            train_loop.run_pending_validation(module)
        stopped_by = train_loop.stop_reason
        if start.step < root.trainer.max_steps and stopped_by is None:
            stopped_by = stop.apply_flags(ranks.all_reduce_flags(stop.flags))  # signals received during setup
        if start.step < root.trainer.max_steps and stopped_by is None:
            with closing(dataloader):
                fit(module, train_loop, root.trainer.max_steps, device, ranks)
    finally:
        profilers.close()
        saver.wait()
    is_done = module.step >= root.trainer.max_steps and not train_loop.validation_pending
    stopped_by = None if is_done else train_loop.stop_reason or stopped_by or stop.reason
    if stopped_by is not None and module.step == start.step and stop.signal is None and train_loop.stop_reason is None:
        logger.log(f"warning: {stopped_by} elapsed before the first step, and would again; raise it")
    # Not `train_loop.checkpoint`: retention (`save_top_k`) may have deleted it.
    written = next(reversed(checkpoint_paths(directory.checkpoints)), None) if train_loop.checkpoint else None
    logger.log(_last_line(root, directory, module.step, written, stopped_by))
    return TrainingResult(
        directory=directory.path,
        checkpoint=written or (resumed.path if resumed else None),
        step=module.step,
        validation=train_loop.validation,
        stop_reason=stopped_by,
        exit_code=stop.exit_code if stopped_by else EXIT_OK,
        model=model,
        data=data,
    )


def _base_record(root: RootBlock, base: PretrainedWeights | None, ranks: DistributedContext) -> BaseRecord | None:
    """Return the record of the base weights for adapter checkpoints, hashed by rank 0; None without PEFT."""
    if base is None or not root.model.peft.is_on:
        return None
    text = base.record().model_dump_json() if ranks.is_rank_zero else ""
    return BaseRecord.model_validate_json(ranks.broadcast_text(text))


def _last_line(
    root: RootBlock, directory: RunDirectory, step: int, checkpoint: Path | None, stopped_by: str | None
) -> str:
    where = f"; checkpoint {checkpoint}" if checkpoint else ""
    if stopped_by is None:
        return f"done after step {step:,}{where}"
    overrides = f"exp_manager.explicit_log_dir={directory.path} exp_manager.resume_if_exists=True"
    if stopped_by.startswith(STOP_REASON_PREFIX):  # its state is in the checkpoint, so it would stop again at once
        overrides += f" and {continue_hint(root.exp_manager.early_stopping_callback_params)}"
    return f"stopped by {stopped_by} after step {step:,}{where}; resume with {overrides}"
