"""Training run, from a validated configuration to the last checkpoint: resolve, build, fit, finish."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from ..kernels.attention.dispatch import format_selections
from ..models.build import LanguageModel
from ..models.parallel.layout import AXES
from .callbacks.early_stopping import STOP_REASON_PREFIX, EarlyStopping
from .checkpoint.checkpoint_paths import RESOLVED_CONFIG, checkpoint_paths
from .checkpoint.run_directory import save_run_record
from .config.resolved_run import ResolvedRun
from .config.run_config import RunConfig
from .core.run_context import RunContext, open_run
from .core.run_report import describe_end, describe_start
from .core.run_summary import describe_offload_traffic, describe_optimizer_offload, summarize_run
from .core.training_loop import TrainingLoop, build_training_loop
from .core.training_state import TrainingState, build_training_state
from .data.build_datasets import Data
from .device.determinism import attention_flags
from .distributed.placement import Placement
from .distributed.process_group import (
    DistributedContext,
    describe_process,
    init_distributed,
    open_store,
    shutdown_distributed,
)
from .evaluation.held_out_loss import EvaluationResult
from .lightning.lightning_imports import Logger, pl
from .lightning.lightning_trainer import fit
from .lightning.user_loggers import RunMetricsLogger
from .plan.report import measured_line
from .utils.environment import has_rendezvous
from .utils.errors import EXIT_OK


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training run.

    Attributes:
        directory: the run directory.
        checkpoint: the newest checkpoint of this process, or the one it resumed from; None if there is none.
        step: completed optimizer steps.
        validation: the last validation of this process, or None.
        stop_reason: why it stopped before `max_steps` (a signal's name, `trainer.max_time=...`), or None.
        exit_code: 0, 130 after SIGINT, 143 after SIGTERM and the like.
        run: what follows from its configuration.
        model: the trained model, on its device.
        data: the training data.
    """

    directory: Path
    checkpoint: Path | None
    step: int
    validation: EvaluationResult | None
    stop_reason: str | None
    exit_code: int
    run: ResolvedRun
    model: LanguageModel
    data: Data


def train(config: RunConfig) -> int:
    """Train as configured and return the exit code."""
    return run_training(config).exit_code


def run_training(
    config: RunConfig,
    ranks: DistributedContext | None = None,
    *,
    seconds: float | None = None,
    callbacks: Sequence[pl.Callback] = (),
    loggers: Sequence[Logger] = (),
) -> TrainingResult:
    """Train as configured, from scratch or from a checkpoint.

    Args:
        config: the same on every rank.
        ranks: the initialized ranks of the run; None for a single process.
        seconds: shorten the run, of a single process, and its learning rate schedule if training would take longer.
        callbacks: Lightning callbacks of the user.
        loggers: Lightning loggers of the user.

    Raises:
        UserError: the configuration is not supported on this machine, training diverged, or the disk is full.
    """
    with open_run(config, ranks or DistributedContext(), callbacks, loggers) as run:
        state = build_training_state(run)
        on_first_step = _record_start(run, state)
        loop = build_training_loop(run, state, seconds, on_first_step)
        stop_reason = _fit(run, loop)
        result = _finish(run, state, loop, stop_reason)
        if run.logger.failure is not None:
            raise run.logger.failure
        return result


def train_as_rank(
    config: RunConfig,
    placement: Placement,
    *,
    callbacks: Sequence[pl.Callback] = (),
    loggers: Sequence[Logger] = (),
) -> TrainingResult:
    """Train as a rank started by torchrun or srun; see `run_training`."""
    store = None
    if not has_rendezvous():  # srun sets ranks but no rendezvous
        assert placement.rendezvous is not None
        store = open_store(placement.rank or 0, placement.world_size, placement.rendezvous)
    place = (placement.rank or 0, placement.world_size, placement.local_rank)
    return train_in_group(config, *place, store, callbacks=callbacks, loggers=loggers)


def train_in_group(
    config: RunConfig,
    rank: int,
    world_size: int,
    local_rank: int,
    store: Store | None,
    signals: Mapping[str, Callable[..., None]] | None = None,
    *,
    callbacks: Sequence[pl.Callback] = (),
    loggers: Sequence[Logger] = (),
) -> TrainingResult:
    """Initialize the process group, train as one of its ranks, and end it.

    Args:
        config: the same on every rank.
        rank: rank of this process.
        world_size: number of ranks.
        local_rank: rank on this node, the index of the device.
        store: the store of the group; None for that of torchrun's variables.
        signals: functions that report to the launcher, attributes of `DistributedContext`.
        callbacks: Lightning callbacks of the user.
        loggers: Lightning loggers of the user.
    """
    timeout = config.root.trainer.process_timeout
    ranks = init_distributed(rank, world_size, local_rank, store=store, timeout=timeout)
    for name, signal_to_launcher in (signals or {}).items():
        setattr(ranks, name, signal_to_launcher)
    result = run_training(config, ranks, callbacks=callbacks, loggers=loggers)
    ranks.barrier()
    shutdown_distributed()
    return result


def _record_start(run: RunContext, state: TrainingState) -> Callable[[], None] | None:
    """Log a summary, and write the record of the run, so that its directory is kept from here on.

    Returns:
        A function that writes the record of a run that is resumed, to be called after its first step; None if written.
    """
    description = json.dumps(describe_process(run.ranks, run.device, run.config.digest))
    processes = [json.loads(text) for text in run.ranks.all_gather_text(description)]

    def record() -> None:
        if run.ranks.is_rank_zero:
            save_run_record(run.config, run.directory, run.device, processes)
        run.report.record_start(lambda: describe_start(run, state.model))

    # The record of a run that is resumed stays that of the steps it has trained, until there is one of this start.
    defers = run.resumed is not None and (run.directory.path / RESOLVED_CONFIG).is_file()
    if defers:
        run.directory.created.clear()  # kept, as checkpoints may be saved there
        run.report.keep_earlier()
    else:
        record()
    if run.ranks.is_rank_zero:
        hosts = list(dict.fromkeys(process["host"] for process in processes))
        layout = {axis: size for axis in AXES if (size := run.resolved.mesh.size(axis)) > 1}
        run.events.write("start", step=run.first_step, processes=len(processes), layout=layout, hosts=hosts)
        if run.resumed is not None:
            run.events.write("resume", checkpoint=str(run.resumed.path), step=run.first_step)
    for line in summarize_run(run.resolved, state.model, run.data, run.device, cuda_graph=run.uses_cuda_graph):
        run.logger.log(line)
    for line in describe_optimizer_offload(run.resolved, state.optimizer, run.device):
        run.logger.log(line)
    flags = attention_flags(run.resolved.trainer.deterministic)
    log = run.logger.log if flags.debug else run.logger.log_to_file
    for line in (*flags.notes(), *format_selections(state.model.attention_decisions)):
        log(line)
    return record if defers else None


def _fit(run: RunContext, loop: TrainingLoop) -> str | None:
    """Train up to `max_steps`; return why training stopped before that, or None."""
    module, callback, max_steps = loop.module, loop.callback, run.resolved.trainer.max_steps
    if run.first_step >= max_steps and not callback.validation_pending:
        epochs = run.resolved.trainer.max_epochs
        limit = "`trainer.max_steps` (" if epochs is None else f"`trainer.max_epochs` ({epochs}: "
        run.logger.log(
            f"this run is finished: step {run.first_step:,} of {limit}{max_steps:,}); raise it to continue training"
        )
    try:
        if callback.validation_pending:
            callback.run_pending_validation(module)
        stop_reason = callback.stop_reason
        if run.first_step < max_steps and stop_reason is None:
            stop_reason = run.stop.apply_flags(run.ranks.all_reduce_flags(run.stop.flags))  # received during setup
            if stop_reason is None:
                with closing(module.dataloader), loop.watchdog:
                    users: dict[str, Any] = {}
                    if run.callbacks.callbacks or run.loggers:
                        own = RunMetricsLogger(run.logger.log_values, str(run.directory.path))
                        users = {"users": run.callbacks.callbacks, "loggers": [*run.loggers, own]}
                        users["log_every_n_steps"] = run.resolved.trainer.log_every_n_steps
                    fit(module, callback, max_steps, run.device, run.ranks, **users)
    finally:
        loop.profilers.close()
        loop.saver.wait()
    if module.step >= callback.limit.max_steps and not callback.validation_pending:
        return None
    return callback.stop_reason or stop_reason or run.stop.reason


def _finish(run: RunContext, state: TrainingState, loop: TrainingLoop, stop_reason: str | None) -> TrainingResult:
    """Log how the run ended and return its result."""
    step, stop, logger = loop.module.step, run.stop, run.logger
    if stop_reason is not None and step == run.first_step and stop.signal is None and loop.callback.stop_reason is None:
        logger.log(f"warning: {stop_reason} elapsed before the first step, and would again; raise it")
    # Not `callback.checkpoint`: retention (`save_top_k`) may have deleted it.
    written = next(reversed(checkpoint_paths(run.directory.checkpoints)), None) if loop.callback.checkpoint else None
    logger.log(_last_line(run, step, written, stop_reason, loop.callback.early_stopping))
    if stop_reason is None:
        run.events.write("end", step=step, exit_code=EXIT_OK)
    else:
        run.events.write("stop", step=step, reason=stop_reason, exit_code=stop.exit_code)
    if run.device.type == "cuda" and step > run.first_step:
        allocated = torch.cuda.max_memory_allocated(run.device)
        logger.log(measured_line(run.plan, allocated, torch.cuda.max_memory_reserved(run.device)))
    for line in describe_offload_traffic(state.model):
        logger.log(line)
    if step > run.first_step:
        run.report.record(lambda: describe_end(run, state.model, step))
    return TrainingResult(
        directory=run.directory.path,
        checkpoint=written or (run.resumed.path if run.resumed else None),
        step=step,
        validation=loop.callback.validation,
        stop_reason=stop_reason,
        exit_code=stop.exit_code if stop_reason else EXIT_OK,
        run=run.resolved,
        model=state.model,
        data=run.data,
    )


def _last_line(
    run: RunContext, step: int, checkpoint: Path | None, stop_reason: str | None, early_stopping: EarlyStopping | None
) -> str:
    where = f"; checkpoint {checkpoint}" if checkpoint else ""
    if stop_reason is None:
        return f"done after step {step:,}{where}"
    overrides = f"{shlex.quote(f'exp_manager.explicit_log_dir={run.directory.path}')} exp_manager.resume_if_exists=True"
    if early_stopping is not None and stop_reason.startswith(STOP_REASON_PREFIX):  # it would stop again at once
        overrides += f" and {early_stopping.continue_hint}"
    return f"stopped by {stop_reason} after step {step:,}{where}; resume with {overrides}"
