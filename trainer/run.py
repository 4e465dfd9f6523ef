"""The whole of a training run, from a validated configuration to the last checkpoint."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from ..models.gpt import GPT
from .checkpoint import Checkpoint
from .config.run_config import RunConfig
from .data.build import Data, build_data
from .errors import EXIT_DONE, UserError
from .evaluation import EvaluationResult
from .feed import BatchFeed
from .fit import fit
from .loop import RunLoop
from .memory import check_memory, is_out_of_memory
from .metrics import Journal
from .module import LanguageModule
from .panel import Panel
from .parts import (
    build_model,
    build_optimizer,
    build_rates,
    build_save,
    build_validation,
    check_attention,
    choose_device,
    consumed_samples,
    describe,
)
from .precision import PrecisionPlan, plan_precision
from .resume import check_resumed, describe_run, find_resumed
from .run_directory import RunDirectory, open_run_directory, record_start
from .schedule import build_schedule
from .stop import StopRequest


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended.

    Attributes:
        directory: the run directory.
        checkpoint: the newest checkpoint of this process, or the one it started from; None where none was written.
        step: completed optimizer steps.
        validation: the last validation of this process, or None.
        stopped_by: why it ended before its last step (a signal's name, `trainer.max_time=...`), or None.
        exit_code: 0, 130 after SIGINT, 143 after SIGTERM.
        model: the trained model, on its device.
        data: what it was trained on.
    """

    directory: Path
    checkpoint: Path | None
    step: int
    validation: EvaluationResult | None
    stopped_by: str | None
    exit_code: int
    model: GPT
    data: Data


def train(config: RunConfig) -> int:
    """Train as configured; returns the exit code."""
    return run_training(config).exit_code


def run_training(config: RunConfig) -> TrainingResult:
    """Train as configured, from scratch or from a checkpoint.

    Raises:
        UserError: what the configuration asks for cannot be done here, training diverged, or the disk is full.
    """
    root = config.root
    device = choose_device(root)
    precision = plan_precision(root.trainer, root.model.megatron_amp_O2, device)
    check_memory(root, precision, device)
    check_attention(root, precision, device)
    try:
        return _prepare_and_train(config, device, precision)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            [
                f"out of memory on {device.type}: {' '.join(str(error).split())[:200]}",
                "use a smaller model.micro_batch_size, model.encoder_seq_length or model",
            ]
        ) from error


def _prepare_and_train(config: RunConfig, device: torch.device, precision: PrecisionPlan) -> TrainingResult:
    root = config.root
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(root.trainer.max_time))
        data = build_data(root)  # before the run directory: text that cannot be read leaves nothing behind
        directory = stack.enter_context(open_run_directory(config))
        resumed, lines = find_resumed(root.exp_manager, directory)
        step = resumed.state.step if resumed else 0
        panel = Panel(root.trainer.max_steps, live=root.trainer.enable_progress_bar, title=root.name)
        journal = Journal(
            directory.path, panel, tensorboard=root.exp_manager.create_tensorboard_logger, resumed_at=step
        )
        with closing(journal):
            for line in [f"run directory {directory.path}", *lines]:
                journal.say(line)
            try:
                return _train(config, device, precision, data, directory, resumed, journal, stop)
            except UserError as error:
                journal.note("\n".join(error.lines))
                raise


def _train(
    config: RunConfig,
    device: torch.device,
    precision: PrecisionPlan,
    data: Data,
    directory: RunDirectory,
    resumed: Checkpoint | None,
    journal: Journal,
    stop: StopRequest,
) -> TrainingResult:
    root, keys = config.root, config.root.model
    start = describe_run(root, data, precision)

    model = build_model(root, data, precision, device)
    optimizer = build_optimizer(root, model, precision)
    if resumed is not None:
        for warning in check_resumed(resumed, start, data.tokenizer.to_document()):
            journal.say(f"warning: {warning}")
        resumed.load_weights(model)
        resumed.load_optimizer(optimizer)
        journal.say(f"going on from {resumed.path}, {resumed.state.consumed_samples:,} samples seen")
        start = start.model_copy(
            update={"step": resumed.state.step, "consumed_samples": resumed.state.consumed_samples}
        )
    record_start(config, directory, device)
    for line in describe(root, model, data, precision, device):
        journal.say(line)
    for decision in model.attention_decisions.values():
        journal.note(decision.table())

    feed = BatchFeed(data.train, start.consumed_samples, keys.global_batch_size, device, keys.data.num_workers)
    module = LanguageModule(
        model,
        optimizer,
        build_schedule(keys.optim, root.trainer.max_steps),
        feed,
        precision,
        micro_batch_size=keys.micro_batch_size,
        accumulates=keys.global_batch_size > keys.micro_batch_size,
        seed=keys.seed,
        step=start.step,
    )
    loop = RunLoop(
        root,
        journal,
        stop,
        build_rates(root, model, device),
        validate=build_validation(root, model, data, precision, device),
        save=build_save(config, directory, data, start, module),
        checkpoints=directory.checkpoints,
        consumed_samples=lambda step: consumed_samples(start, step),
    )
    if start.step < root.trainer.max_steps and stop.reason is None:
        with closing(feed):
            fit(module, loop, root.trainer.max_steps, device)
    stopped_by = None if module.step >= root.trainer.max_steps else loop.stopped_by or stop.reason
    journal.say(_last_line(directory, module.step, loop.checkpoint, stopped_by))
    return TrainingResult(
        directory=directory.path,
        checkpoint=loop.checkpoint or (resumed.path if resumed else None),
        step=module.step,
        validation=loop.validation,
        stopped_by=stopped_by,
        exit_code=stop.exit_code if stopped_by else EXIT_DONE,
        model=model,
        data=data,
    )


def _last_line(directory: RunDirectory, step: int, checkpoint: Path | None, stopped_by: str | None) -> str:
    where = f"; checkpoint {checkpoint}" if checkpoint else ""
    if stopped_by is None:
        return f"done after step {step:,}{where}"
    again = f"exp_manager.explicit_log_dir={directory.path} exp_manager.resume_if_exists=True"
    return f"stopped by {stopped_by} after step {step:,}{where}; go on with {again}"
