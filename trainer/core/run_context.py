"""Prepares a run before its model is built: device, data, run directory, checkpoint to resume from, logger."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...models.build import ModelPlan
from ...models.memory.host_copies import HostMemoryError
from ..callbacks.preemption import StopHandler
from ..callbacks.profiler import check_profiling
from ..callbacks.user_callbacks import UserCallbacks
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.run_directory import RunDirectory, open_run_directory
from ..config.resolved_run import ResolvedRun, resolve_run
from ..config.run_config import RunConfig
from ..config.schema.root import RootBlock
from ..data.build_datasets import Data, build_data
from ..device.bench_table import BenchTable
from ..device.choose_device import choose_device, compute_capability
from ..device.cuda_graph_support import uses_cuda_graph
from ..device.determinism import deterministic_algorithms
from ..distributed.mesh import Mesh, build_mesh, layout_on
from ..distributed.process_group import DistributedContext
from ..lightning.lightning_imports import Logger, pl
from ..lightning.user_loggers import UserLogger, build_loggers
from ..loggers.logger_backends import LoggedRun, check_loggers
from ..loggers.progress_bar import ProgressDisplay
from ..loggers.run_events import RunEvents, read_events
from ..loggers.run_logger import RunLogger
from ..plan.exchange_kind import moving_weights_reason
from ..plan.memory_check import check_memory
from ..plan.report import out_of_memory_lines, summary_lines
from ..plan.run_plan import Plan, local_target, make_plan
from ..utils.environment import set_variables
from ..utils.errors import UserError
from ..utils.host_memory import is_out_of_host_memory, is_out_of_memory
from ..utils.text import one_line
from .debug_runs import fast_dev_run, overfit_batches
from .rank_checks import check_same_data, check_same_setup, check_shared_directory, mark_shared_directory
from .report_writer import RunReport
from .resume import find_resume_checkpoint
from .run_checks import (
    attention_changes,
    attention_warnings,
    check_default_dropout,
    check_metrics,
    check_splits,
    choose_attention,
    find_run_table,
    recorded_table,
)
from .run_length import resolve_run_length


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """A run on one rank, before its model is built.

    Attributes:
        config: the configuration, the same on every rank.
        ranks: the ranks of the run.
        mesh: their process groups.
        device: device of this rank.
        resolved: what follows from the configuration.
        model_plan: attention backends and compilation.
        uses_cuda_graph: micro batches, or layers, run as CUDA graphs.
        stop: signals and time limits of this process.
        data: the datasets and the tokenizer.
        directory: the run directory.
        resumed: the checkpoint to resume from; None for a new run.
        logger: metrics and log lines; disabled on all ranks but the first.
        events: the events of the run; likewise.
        past_events: those of earlier starts, on rank 0.
        plan: predicted memory and time.
        callbacks: Lightning callbacks of the user.
        loggers: Lightning loggers of the user.
        report: the report of the run; disabled on all ranks but the first.
        attention_times: measured times that the attention backends were chosen by; None if they were not.
    """

    config: RunConfig
    ranks: DistributedContext
    mesh: Mesh
    device: torch.device
    resolved: ResolvedRun
    model_plan: ModelPlan
    uses_cuda_graph: bool
    stop: StopHandler
    data: Data
    directory: RunDirectory
    resumed: Checkpoint | None
    logger: RunLogger
    events: RunEvents
    past_events: list[dict[str, Any]]
    plan: Plan
    callbacks: UserCallbacks
    loggers: list[Logger]
    report: RunReport
    attention_times: BenchTable | None = None

    @property
    def first_step(self) -> int:
        """Completed optimizer steps when this process starts."""
        return self.resumed.state.step if self.resumed else 0


@contextmanager
def open_run(
    config: RunConfig,
    ranks: DistributedContext,
    callbacks: Sequence[pl.Callback] = (),
    loggers: Sequence[Logger] = (),
) -> Iterator[RunContext]:
    """Prepare a run and log its start; within the context, failed allocations and errors are reported to the user.

    Args:
        config: the configuration.
        ranks: the ranks of the run.
        callbacks: Lightning callbacks of the user, besides those of `trainer.callbacks`.
        loggers: Lightning loggers of the user, besides those of `exp_manager.loggers`.

    Raises:
        UserError: the configuration is not supported on this machine, the data or the checkpoint cannot be used, or the
            run directory cannot be written.
    """
    config = fast_dev_run(config)
    root = config.root
    set_variables(root.env_vars)  # for callers from Python; the CLI has set them before torch was imported
    check_same_setup(ranks, config.digest)
    device = choose_device(root.trainer, ranks.local_rank)
    resolved = resolve_run(root, world_size=ranks.world_size, capability=compute_capability(device))
    check_loggers(resolved.exp_manager)
    with ranks.raise_on_all_ranks():  # instances may differ between ranks
        users = UserCallbacks(resolved.trainer.callbacks or (), callbacks)
        own_loggers = build_loggers(resolved.exp_manager.loggers, loggers)
    check_profiling(resolved.model.memory_profile, device)
    free_previous_runs(device)
    with ExitStack() as stack:
        stack.enter_context(deterministic_algorithms(resolved.trainer.deterministic))
        stack.enter_context(report_out_of_memory(root, device))
        table = find_run_table(device, ranks)
        model_plan = choose_attention(resolved, device, table.times)
        check_memory(resolved, device, model_plan)
        moving = moving_weights_reason(resolved, local_target(resolved, device, table))
        graphs = uses_cuda_graph(resolved, device, model_plan.decisions, moving)
        stop = stack.enter_context(StopHandler(resolved.trainer.max_time, resolved.exp_manager.max_time_per_run))
        data = build_data_by_rank(resolved, ranks)  # before the run directory: unreadable data leaves none behind
        check_same_data(ranks, data.fingerprint, data.vocab_size)
        resolved = resolve_run_length(resolved, data.train.samples)
        layout, no_overlap = layout_on(device, resolved.mesh, ranks)
        resolved = replace(resolved, mesh=layout)
        warnings = [
            *attention_warnings(model_plan),
            *check_default_dropout(config, resolved, device, model_plan, table.times),
            *check_metrics(resolved.exp_manager, resolved.data, data),
            *check_splits(resolved.data, data),
            *filter(None, [no_overlap]),
        ]
        directory, resumed, lines = _open_directory_and_checkpoint(config, ranks, stack)
        if resumed is not None:  # keeps its kernels, whatever has been measured since
            kept = recorded_table(resumed, table, device)
            fresh, model_plan = model_plan, choose_attention(resolved, device, kept.times)
            if changes := attention_changes(fresh, model_plan):
                check_memory(resolved, device, model_plan)
                graphs = uses_cuda_graph(resolved, device, model_plan.decisions, moving)
                by = f" by {table.source}" if table.table else ""
                lines.append(f"attention stays as before {resumed.path.name}: {', '.join(changes)}{by}")
            table = kept
        lines += filter(None, [table.ignored])
        logger = stack.enter_context(_open_logger(config, resolved, ranks, directory, resumed))
        for own in own_loggers if ranks.is_rank_zero else ():
            logger.add(type(own).__name__, UserLogger(own, config.document))
        for line in [f"run directory {directory.path}", *lines, *(f"warning: {text}" for text in warnings)]:
            logger.log(line)
        plan = make_plan(
            resolved, local_target(resolved, device, table), vocab_size=data.vocab_size, model_plan=model_plan
        )
        for line in summary_lines(plan):
            logger.log(line)
        events = RunEvents(directory.path if ranks.is_rank_zero else None)
        reports = ranks.is_rank_zero and resolved.exp_manager.create_report
        report = stack.enter_context(RunReport(directory.path if reports else None, logger.log))
        stack.enter_context(_errors_in_log(logger, events))
        stack.enter_context(report_out_of_memory(root, device, plan))
        yield RunContext(
            config=config,
            ranks=ranks,
            mesh=build_mesh(resolved.mesh, resolved.context_split, ranks, resolved.pipeline),
            device=device,
            resolved=resolved,
            model_plan=model_plan,
            uses_cuda_graph=graphs,
            stop=stop,
            data=data,
            directory=directory,
            resumed=resumed,
            logger=logger,
            events=events,
            past_events=read_events(directory.path) if ranks.is_rank_zero else [],
            plan=plan,
            callbacks=users,
            loggers=own_loggers,
            report=report,
            attention_times=table.table
            and table.table.recorded({each.call.head_dim for each in model_plan.decisions.values()}),
        )


def free_previous_runs(device: torch.device) -> None:
    """Free the device memory of earlier runs in this process and reset its peak statistics.

    Lightning's loop and its module form a reference cycle that keeps the model alive until garbage collection.
    """
    if device.type == "cuda" and torch.cuda.is_initialized():  # the allocator has no statistics before
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def report_out_of_memory(root: RootBlock, device: torch.device, plan: Plan | None = None) -> Iterator[None]:
    """Turn a failed allocation into a UserError, with the keys that would help if there is a plan."""
    try:
        yield
    except HostMemoryError as error:
        raise UserError(f"out of host memory: {error}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        message = one_line(error, 200)
        on_host = device.type != "cpu" and is_out_of_host_memory(error)
        where = "out of host memory" if on_host else f"out of memory on {device.type}"
        fixes = (
            ["offload less to host memory, or prefetch fewer batches"] if on_host else out_of_memory_lines(root, plan)
        )
        raise UserError([where + (f": {message}" if message else ""), *fixes]) from error


def build_data_by_rank(run: ResolvedRun, ranks: DistributedContext) -> Data:
    """Build the data on local rank 0 first, then on the other ranks of the node, which reuse its index files."""
    data = None
    for is_our_turn in (ranks.local_rank == 0, ranks.local_rank != 0):
        with ranks.raise_on_all_ranks():
            if is_our_turn:
                data = overfit_batches(build_data(run.data), run.trainer.overfit_batches, run.model.global_batch_size)
                if ranks.world_size > 1 and ranks.local_rank == 0:
                    data.train.batch(0, 1)  # builds the index of the first epoch, if it is cached in files
    assert data is not None
    return data


def _open_directory_and_checkpoint(
    config: RunConfig, ranks: DistributedContext, stack: ExitStack
) -> tuple[RunDirectory, Checkpoint | None, list[str]]:
    """Choose the run directory and the checkpoint to resume from on rank 0, and broadcast them."""
    directory, resumed, lines, shared = None, None, [], []
    with ranks.raise_on_all_ranks():
        if ranks.is_rank_zero:
            directory = stack.enter_context(open_run_directory(config))
            resumed, lines = find_resume_checkpoint(config.root.exp_manager, directory)
            token = mark_shared_directory(directory) if ranks.world_size > 1 else ""
            shared = [str(directory.path), str(directory.checkpoints), str(resumed.path) if resumed else "", token]
    path, checkpoints, start, token = json.loads(ranks.broadcast_text(json.dumps(shared)))
    with ranks.raise_on_all_ranks():
        if directory is None:
            directory = RunDirectory(Path(path), Path(checkpoints))
            writes = config.root.exp_manager.create_checkpoint_callback
            elsewhere = directory.checkpoints.parent != directory.path and writes
            check_shared_directory(token, directory.path, *([directory.checkpoints] if elsewhere else []))
            resumed = open_checkpoint(Path(start), verify=False) if start else None
    assert directory is not None
    return directory, resumed, lines


def _open_logger(
    config: RunConfig,
    resolved: ResolvedRun,
    ranks: DistributedContext,
    directory: RunDirectory,
    resumed: Checkpoint | None,
) -> RunLogger:
    if not ranks.is_rank_zero:
        return RunLogger.disabled()
    keys = resolved.trainer
    return RunLogger.open(
        LoggedRun(config.root.name, config.root.exp_manager, config.document),
        directory.path,
        ProgressDisplay(keys.max_steps, live=keys.enable_progress_bar, title=config.root.name),
        resumed_at=resumed.state.step if resumed else 0,
        drop_validation=resumed is not None and resumed.state.loop.validation_due,
    )


@contextmanager
def _errors_in_log(logger: RunLogger, events: RunEvents) -> Iterator[None]:
    """Copy the message of a UserError to run.log, and its first line to the events."""
    try:
        yield
    except UserError as error:
        with suppress(UserError):  # if run.log cannot be written either, keep the original error
            logger.log_to_file("\n".join(error.lines))
        kind = "error" if events.has_started else "refused"
        events.write(kind, reason=error.lines[0], exit_code=error.exit_code)
        raise
