"""Lightning callback for logging, validation, checkpointing and stopping.

It keeps its own schedule by step: Lightning's `val_check_interval` counts from a restart, ours from the first step of
training, so a resumed run validates and saves at the same steps.

Every rank has one. Metrics and steps are the same on all ranks; signals and clocks are not, so those are all-reduced
first (`preemption.AllReduceFlags`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...models.fp8 import weights_in_fp8
from ..checkpoint.loop_state import LoopState
from ..checkpoint.reader import checkpoint_paths
from ..checkpoint.save_interval import SaveInterval
from ..config.schema.exp_manager import OWN_METRIC, ExpManagerBlock
from ..config.schema.trainer_and_data import TrainerBlock
from ..data.dataloader_workers import WorkerLostError
from ..evaluation.held_out_loss import EvaluationInterruptedError, EvaluationResult
from ..lightning.lightning_imports import pl
from ..lightning.lightning_module import LanguageModule
from ..loggers.run_events import RunEvents
from ..loggers.run_logger import RunLogger
from ..optim.ema import EMA
from ..utils.async_host_copy import is_async
from ..utils.errors import UserError
from ..utils.local_shard import local_tensor
from ..utils.text import parse_duration, pluralize
from .divergence import DivergedError, LossMonitor
from .early_stopping import STOP_REASON_PREFIX, EarlyStopping
from .expert_load import ExpertLoadMetrics
from .preemption import INTERRUPTING_FLAGS, AllReduceFlags, StopFlag, StopHandler, local_flags
from .profiler import ProfilerList
from .reporting import StepReporter, ThroughputFactors
from .step_limit import StepLimit
from .user_callbacks import UserCallbacks
from .watchdog import StepTimer

ValidateFunction = Callable[[int | None, Callable[[], bool] | None], EvaluationResult]
"""Run a validation of a number of global batches (None: as configured); the second argument is polled between batches,
and `EvaluationInterruptedError` is raised when it returns True."""
SaveFunction = Callable[[int, Mapping[str, float], LoopState], Path]
"""Save a checkpoint of a step, with the finite metrics of that step and the loop state; return its path."""


class TrainLoopCallback(pl.Callback):
    """Log, validate, save checkpoints and stop training after the steps at which each is due.

    Args:
        keys: `trainer`.
        manager: `exp_manager`.
        logger: the run's logger.
        stop_handler: signals and time limits of this process.
        throughput: tokens and FLOPs of a sample, for throughput and MFU.
        validate: runs the validation; None without one.
        save: saves a checkpoint; None without checkpoints.
        checkpoint_directory: the directory `save` writes to.
        consumed_samples: number of samples trained on after a number of steps.
        state: loop state of the checkpoint the run resumes from.
        resumed_metrics: metrics of the step the run resumes from.
        all_reduce_flags: called once after every step, and between validation batches.
        flags_are_async: `all_reduce_flags` returns the result of the previous call.
        save_interval: of `every_n_train_steps: auto`.
        is_saving: returns whether a checkpoint is written in the background.
        events: the events of the run.
        timer: measures the steps.
        limit: when the run ends; by default after `trainer.max_steps`.
        users: the user's callbacks, which are called before this one and around its validations.
        on_shorten: called when `limit` has shortened the run.
        on_first_step: called after the first step.

    Attributes:
        limit: when the run ends.
        validation: the last validation result.
        validation_pending: the validation of the last step was interrupted and is still to be run.
        checkpoint: the last checkpoint written.
        stop_reason: why training stopped before `max_steps`, or None. Set at construction if the resumed run had
            already been ended by early stopping.
        early_stopping: early stopping, or None.
    """

    def __init__(
        self,
        keys: TrainerBlock,
        manager: ExpManagerBlock,
        logger: RunLogger,
        stop_handler: StopHandler,
        throughput: ThroughputFactors,
        *,
        validate: ValidateFunction | None,
        save: SaveFunction | None,
        checkpoint_directory: Path,
        consumed_samples: Callable[[int], int],
        state: LoopState | None = None,
        resumed_metrics: Mapping[str, float] | None = None,
        all_reduce_flags: AllReduceFlags = local_flags,
        flags_are_async: bool = False,
        ema: EMA | None = None,
        profilers: ProfilerList | None = None,
        expert_load: ExpertLoadMetrics | None = None,
        save_interval: SaveInterval | None = None,
        is_saving: Callable[[], bool] = lambda: False,
        events: RunEvents | None = None,
        timer: StepTimer | None = None,
        limit: StepLimit | None = None,
        users: UserCallbacks | None = None,
        on_shorten: Callable[[], None] | None = None,
        on_first_step: Callable[[], None] | None = None,
    ) -> None:
        state = state or LoopState.model_validate({})
        self._keys = keys
        self.limit = limit or StepLimit(keys.max_steps)
        self._on_shorten = on_shorten
        self._on_first_step = on_first_step
        self._users = users or UserCallbacks()
        self._users.load_state(state.callbacks)
        self._user_stops = False
        self._params = manager.checkpoint_callback_params
        self._interval = self._params.train_time_interval
        self._save_interval = save_interval
        self._is_saving = is_saving
        self._background_seconds = 0.0
        self._events = events or RunEvents(None)
        self._timer = timer or StepTimer()
        self._logger = logger
        self._stop = stop_handler
        self._validate = validate
        self._save = save
        self._checkpoints = checkpoint_directory
        self._all_reduce_flags = all_reduce_flags
        self._flags_are_async = flags_are_async
        self._ema = ema
        self._validates_ema = ema is not None and not manager.ema.validate_original_weights
        self._profilers = profilers or ProfilerList([], logger.log)
        self._expert_load = expert_load
        self._monitor = LossMonitor(keys.max_skipped_steps, keys.loss_spike_threshold, state)
        self._reporter = StepReporter(logger, self._monitor, throughput, consumed_samples, self._profilers, expert_load)
        self.early_stopping: EarlyStopping | None = None
        if manager.create_early_stopping_callback:
            self.early_stopping = EarlyStopping(manager.early_stopping_callback_params, state.patience)
        self._is_strict = manager.early_stopping_callback_params.strict
        self._is_verbose = manager.early_stopping_callback_params.verbose
        self._saved_at = time.monotonic()
        self._saved_just_now = False
        self._first_step = 0
        self._resumed_metrics = resumed_metrics or {}
        self._pending_signals = 0
        self.validation_pending = state.validation_due and validate is not None
        self.validation: EvaluationResult | None = None
        self.checkpoint: Path | None = None
        self.stop_reason: str | None = None
        if self.early_stopping is not None and self.early_stopping.stop_reason is not None:
            self.stop_reason = f"{STOP_REASON_PREFIX} ({self.early_stopping.stop_reason})"

    def run_pending_validation(self, module: LanguageModule) -> None:
        """Run the validation that was interrupted when the run was stopped, before training resumes."""
        step = module.step
        self._logger.log(f"running the interrupted validation of step {step:,}")
        with self._report_divergence():
            validation = self._run_validation(step, 0)
            if validation is None:
                self.stop_reason = self._stop.apply_flags(self._pending_signals)
                return
            self.validation_pending = False
            metrics = dict(self._resumed_metrics) | validation
            if self.early_stopping is not None and step % self._keys.val_check_interval == 0:
                stopping = self._check_progress(self.early_stopping, step, metrics)
                if stopping is not None and step < self.limit.max_steps:
                    self.stop_reason = f"{STOP_REASON_PREFIX} ({stopping})"
            if self._save is not None:  # replace the checkpoint of this step by one with its validation metrics
                self._save_checkpoint(module, metrics)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reinstall the signal handlers that Lightning replaces, and run the sanity validation."""
        assert isinstance(pl_module, LanguageModule)
        self._stop.install_signal_handlers()
        self._logger.defer_failures()
        self._first_step = pl_module.step
        batches = self._keys.num_sanity_val_steps
        if batches and self._validate is not None:
            loss = self._evaluate(batches).loss
            self._logger.log(
                f"validation loss before the first step {loss:.4f} ({pluralize(batches, 'batch', 'batches')})"
            )
        self._saved_at = time.monotonic()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the step in the profilers."""
        assert isinstance(pl_module, LanguageModule)
        self._profilers.on_step_start(pl_module.step + 1 - self._first_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, validate, save and stop as due after this step."""
        assert isinstance(pl_module, LanguageModule)
        self._timer.end_step()
        self._take_stop(trainer)
        if self._on_first_step is not None and pl_module.step == self._first_step + 1:
            with self._keep_failure():
                self._on_first_step()
        if self._save_interval is not None and self._is_saving():
            self._background_seconds += max(0.0, self._timer.last - (self._timer.median or 0.0))
        with self._report_divergence():
            self._profilers.on_step_end(pl_module.step - self._first_step)
            self._reporter.finish()  # deferred from the previous step, so that the device already has this one to run
            if self._ema is not None:
                assert pl_module.unwrapped_optimizer.grad_norm is not None
                self._ema.update(pl_module.step, pl_module.unwrapped_optimizer.grad_norm)
            if self.limit.after_step(pl_module.step) and self._on_shorten is not None:
                self._on_shorten()
            self.stop_reason = self._after_step(pl_module)
        trainer.should_stop |= self.stop_reason is not None or pl_module.step >= self.limit.max_steps
        if trainer.should_stop:
            self._timer.pause()
        else:
            self._timer.resume()

    def _after_step(self, module: LanguageModule) -> str | None:
        """Log, validate and save as due after this step; return the reason to stop now, or None."""
        step = module.step
        last = step == self.limit.max_steps
        flags = self._reduce_flags()
        reason = None if last else self._stop.apply_flags(flags)
        checks = step % self._keys.val_check_interval == 0
        validates = self._validate is not None and (last or checks)
        saves = self._save is not None and (
            reason is not None
            or bool(flags & StopFlag.SAVE)
            or self._is_save_due(step)
            or (self._save_interval is not None and self._save_interval.is_due(step))
            or (last and self._saves_last())
        )
        # Log steps that depend on the step alone, so that an interrupted and an uninterrupted run have the same ones:
        # clocks, signals and the end of this process do not count.
        regular = step % self._keys.log_every_n_steps == 0 or checks or self._is_save_due(step)
        first = not self._reporter.has_started
        needs_metrics = validates or saves or last or reason is not None or (checks and self.early_stopping is not None)
        if regular and not (first or needs_metrics) and is_async(module.device):
            self._reporter.start(module, restart=True)  # only logged, so the read is deferred to avoid a sync
        elif first or regular or saves or last:
            metrics = self._reporter.report(module, restart=regular)
            self._users.publish(module.trainer, metrics)
            flags |= self._own_failure()
            if flags & StopFlag.FAILING:
                reason, saves = self._stop.apply_flags(flags), self._save is not None
            if validates or saves:
                self._timer.pause()
            if validates:
                module.wait_for_weights()
                self._users.on_validation_start(module.trainer, module)
                validation = self._run_validation(step, flags)
                self.validation_pending = validation is None
                if validation is None:
                    reason, saves = self._stop.apply_flags(self._pending_signals), self._save is not None
                else:
                    metrics |= validation
                    self._users.on_validation_end(module.trainer, module, metrics)
                    self._take_stop(module.trainer)
                    if self._user_stops and not (last or self._flags_are_async):
                        reason = reason or self._stop.apply_flags(StopFlag.CALLBACK)
                        saves = saves or (self._save is not None and self._saves_last())
            if checks and self.early_stopping is not None and not self.validation_pending:
                stopping = self._check_progress(self.early_stopping, step, metrics)
                if stopping is not None and not last:
                    reason = reason or f"{STOP_REASON_PREFIX} ({stopping})"
                    saves = saves or (self._save is not None and self._saves_last())
            if saves:
                self._save_checkpoint(module, metrics)
            if validates or saves:
                self._reporter.restart_clock(module)
                self.limit.resume_clock()
        return reason

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Flush the deferred report of the last step, the profilers and the expert load."""
        assert isinstance(pl_module, LanguageModule)
        pl_module.wait_for_weights()
        with self._report_divergence():
            self._reporter.finish()
        self._profilers.close()
        self._save_expert_load(draw=True, last=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Flush the deferred report of the previous step, and save that step if the next one has no batch.

        Not with several ranks: both need a collective, and a rank may have failed before joining it.
        """
        assert isinstance(pl_module, LanguageModule)
        if pl_module.ranks.world_size == 1:
            try:
                self._reporter.finish()
                if isinstance(exception, WorkerLostError):
                    self._save_last_step(pl_module)
            except Exception as error:  # after a CUDA error nothing can be read; the original error matters more
                self._logger.log_to_file(f"report of the previous step: {error}")

    def _reduce_flags(self) -> int:
        """All-reduce the flags of all ranks; those of other ranks may arrive a step late."""
        flags = self._local_flags()
        if self._interval is not None and time.monotonic() - self._saved_at >= parse_duration(self._interval):
            flags |= StopFlag.SAVE
        reduced = self._all_reduce_flags(flags)
        if self._saved_just_now and self._flags_are_async:  # this result is of flags from before that save
            reduced &= ~StopFlag.SAVE
        self._saved_just_now = False
        return reduced

    def _local_flags(self) -> int:
        failing = StopFlag.FAILING if self._logger.failure is not None else 0
        return self._stop.flags | failing | (StopFlag.CALLBACK if self._user_stops else 0)

    def _own_failure(self) -> int:
        """Return the flag of logs that failed in this step; with several ranks it is reduced with those of the next."""
        return 0 if self._flags_are_async else self._local_flags() & StopFlag.FAILING

    def _take_stop(self, trainer: pl.Trainer) -> None:
        """Take over the wish of a user's callback to stop, on which all ranks must act in the same step."""
        self._user_stops |= trainer.should_stop
        trainer.should_stop = False

    def _is_save_due(self, step: int) -> bool:
        every = self._params.every_n_train_steps
        if self._save is None or every == "auto":  # which depends on the clock
            return False
        if every is not None:
            return step % every == 0
        return self._interval is None and step % self._keys.val_check_interval == 0

    def _saves_last(self) -> bool:
        return self._params.save_last or (self._params.every_n_train_steps is None and self._interval is None)

    def _run_validation(self, step: int, flags: int) -> dict[str, float] | None:
        """Validate and log the metrics; None if a signal interrupts it, or they cannot be logged.

        A time limit does not interrupt it, or a run whose validation takes longer than its limit would never get past
        it.
        """
        self._pending_signals = flags & INTERRUPTING_FLAGS
        if self._pending_signals:
            return None
        try:
            self.validation = self._evaluate(None, self._should_stop_validation)
        except EvaluationInterruptedError:
            return None
        val_loss, bits_per_byte = self.validation.loss, self.validation.bits_per_byte
        if not math.isfinite(val_loss):
            raise DivergedError(f"training diverged at step {step}: validation loss {val_loss}")
        metrics = {"val_loss": val_loss} | ({} if bits_per_byte is None else {"bits_per_byte": bits_per_byte})
        metrics |= {f"{OWN_METRIC}{name}": value for name, value in self.validation.metrics.items()}
        self._logger.log_validation(step, metrics)
        self._save_expert_load(draw=True)
        self._pending_signals = self._own_failure()
        return None if self._pending_signals else metrics

    def _should_stop_validation(self) -> bool:
        """Poll for signals between two validation batches; those of other ranks may arrive a batch late."""
        self._pending_signals = self._all_reduce_flags(self._local_flags()) & INTERRUPTING_FLAGS
        return bool(self._pending_signals)

    def _evaluate(self, batches: int | None, should_stop: Callable[[], bool] | None = None) -> EvaluationResult:
        assert self._validate is not None
        average = self._ema if self._validates_ema else None
        with self._profilers.phase("validation"), average.applied() if average is not None else nullcontext():
            return self._validate(batches, should_stop)

    def _check_progress(self, early: EarlyStopping, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return the reason why early stopping ends the run at this step, or None."""
        value = metrics.get(early.metric)
        if value is None:
            problem = f"`exp_manager.early_stopping_callback_params.monitor` ({early.metric}) was not measured"
            if self._is_strict:
                raise UserError(f"{problem} at step {step}; monitor one of {', '.join(metrics)}")
            self._logger.log_to_file(f"{problem} at step {step}")
            return None
        reason, line = early.check(value)
        if self._is_verbose:
            self._logger.log(f"{STOP_REASON_PREFIX}: {line}")
        return reason

    def _save_checkpoint(self, module: LanguageModule, metrics: Mapping[str, float]) -> None:
        assert self._save is not None
        if self._monitor.consecutive_skipped_steps and not _is_finite(module):
            raise DivergedError(f"training diverged at step {module.step}: some weights are not finite")
        state = self._monitor.state().model_copy(update={"validation_due": self.validation_pending})
        if self.early_stopping is not None:
            state = state.model_copy(update={"patience": self.early_stopping.state})
        state = state.model_copy(update={"callbacks": self._users.state()})
        if self._expert_load is not None:
            state = state.model_copy(update={"expert_load": self._expert_load.sums})
            self._save_expert_load(draw=False)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        started_at = time.monotonic()
        with self._profilers.phase("checkpoint"):
            self.checkpoint = self._save(module.step, finite, state)
        self._saved_at = time.monotonic()
        if self._save_interval is not None:
            seconds = self._saved_at - started_at + self._background_seconds
            self._background_seconds = 0.0
            self._adapt_interval(self._save_interval.after_save(module.step, seconds, self._timer.median))
        self._saved_just_now = True

    def _adapt_interval(self, change: Mapping[str, Any] | None) -> None:
        if change is not None:
            self._events.write("interval", **change)
            self._logger.log(
                f"saving every {pluralize(change['steps'], 'step')} from here on: a checkpoint costs "
                f"{change['save_seconds']:.2g} s, a step {change['step_seconds']:.2g} s; "
                f"{pluralize(change['failures'], 'failure')} so far"
            )

    def _save_last_step(self, module: LanguageModule) -> None:
        """Save a run that ends with an error between two steps, unless it has just been saved."""
        is_saved = self.checkpoint is not None and self.checkpoint.name == f"step-{module.step}"
        if self._save is not None and module.step > self._first_step and not is_saved:
            self._stop.is_failing = True
            self._save_checkpoint(module, {})
            self._logger.log(f"saved {self.checkpoint}, the last finished step")

    def _save_expert_load(self, *, draw: bool, last: bool = False) -> None:
        if self._expert_load is not None:
            with self._keep_failure():
                self._expert_load.save(plot=draw, last=last)

    @contextmanager
    def _keep_failure(self) -> Iterator[None]:
        """Give the error of a failed write to the logger, which keeps it until the step is saved."""
        try:
            yield
        except UserError as error:
            self._logger.fail(error)

    @contextmanager
    def _report_divergence(self) -> Iterator[None]:
        """Turn a DivergedError into a UserError with advice."""
        try:
            yield
        except DivergedError as error:
            saved = checkpoint_paths(self._checkpoints)
            raise UserError(
                [
                    str(error),
                    f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet",
                    "lower `model.optim.lr`, lengthen `model.optim.sched.warmup_steps` or clip harder with "
                    "`trainer.gradient_clip_val`",
                ]
            ) from None


def _is_finite(module: LanguageModule) -> bool:
    """Return True if all weights on all ranks are finite; a collective."""
    module.wait_for_weights()
    in_fp8 = weights_in_fp8(module.model)
    scales = [product.cast.rows.scale for product in in_fp8.values() if product.cast is not None]
    parameters = [local_tensor(each) for each in module.model.parameters() if each not in in_fp8] + scales
    bad = torch.stack([~torch.isfinite(parameter).all() for parameter in parameters]).any()
    return not module.ranks.all_reduce_(bad.float()).item()
