"""What happens between steps: reports, validation, checkpoints, and stopping in time.

A Lightning callback with its own cadence by step: Lightning's `val_check_interval` counts from a restart, ours from the
first step of training, so a resumed run validates and saves at the same steps.

Every process of a run has one. What they decide by, figures and steps, is the same on all of them; signals and clocks
are not, so those go through `stop.Agree` first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.loop_state import LoopState
from ..checkpoint.reader import checkpoint_paths
from ..config.schema.root import RootBlock
from ..evaluation.held_out_loss import EvaluationResult, StoppedError
from ..lightning.lightning_imports import pl
from ..lightning.lightning_module import LanguageModule
from ..loggers.run_logger import Journal
from ..optim.ema import EMA
from ..utils.async_host_copy import runs_behind
from ..utils.errors import UserError
from ..utils.local_shard import local_tensor
from ..utils.text import counted
from .divergence import DivergedError, StepPolicy
from .early_stopping import EARLY_STOPPING, EarlyStopping
from .expert_load import ExpertLoad
from .preemption import SIGNALS, Agree, Flag, StopRequest, alone, seconds_of
from .profiler import Observers
from .reporting import Rates, StepReports

Validate = Callable[[int | None, Callable[[], bool] | None], EvaluationResult]
"""Runs a validation of so many global batches (None: as many as the configuration asks for); between batches it asks
its second argument whether to stop, and raises `evaluation.StoppedError` then."""
Save = Callable[[int, Mapping[str, float], LoopState], Path]
"""Writes a checkpoint of a step, with the finite figures of that step and the memory of the loop; returns its path."""


class RunLoop(pl.Callback):
    """Reports, validates, saves and stops after the steps where it is due.

    Args:
        root: the configuration.
        journal: where figures go.
        stop: what this process knows of signals and clocks.
        rates: tokens and FLOPs of a step.
        validate: runs the validation; None where there is none.
        save: writes a checkpoint; None where none are written.
        checkpoints: the directory `save` writes to.
        consumed_samples: completed steps to samples trained on.
        state: where an earlier process left off.
        figures: those of the step where it left off.
        agree: combines the flags of all processes; called once after every step, and between the batches of a
            validation.
        answers_late: what it returns is the answer to the call before.
        average: a moving average of the weights, or None.
        observers: profilers.
        expert_load: what reports the load of the experts; None without experts.

    Attributes:
        validation: the last validation result.
        owes_validation: the validation of the last step was broken off.
        checkpoint: the last checkpoint written.
        stopped_by: why training stopped before its last step, or None. Set from the beginning where early stopping had
            ended the run already.
    """

    def __init__(
        self,
        root: RootBlock,
        journal: Journal,
        stop: StopRequest,
        rates: Rates,
        *,
        validate: Validate | None,
        save: Save | None,
        checkpoints: Path,
        consumed_samples: Callable[[int], int],
        state: LoopState | None = None,
        figures: Mapping[str, float] | None = None,
        agree: Agree = alone,
        answers_late: bool = False,
        average: EMA | None = None,
        observers: Observers | None = None,
        expert_load: ExpertLoad | None = None,
    ) -> None:
        keys, manager = root.trainer, root.exp_manager
        state = state or LoopState.model_validate({})
        self._keys = keys
        self._params = manager.checkpoint_callback_params
        self._interval = self._params.train_time_interval
        self._journal = journal
        self._stop = stop
        self._validate = validate
        self._save = save
        self._checkpoints = checkpoints
        self._agree = agree
        self._answers_late = answers_late
        self._average = average
        self._validates_average = average is not None and not manager.ema.validate_original_weights
        self._observers = observers or Observers([], journal.say)
        self._expert_load = expert_load
        self._policy = StepPolicy(keys.max_skipped_steps, keys.loss_spike_threshold, state)
        self._reports = StepReports(journal, self._policy, rates, consumed_samples, self._observers, expert_load)
        self._early: EarlyStopping | None = None
        if manager.create_early_stopping_callback:
            self._early = EarlyStopping(manager.early_stopping_callback_params, state.patience)
        self._is_strict = manager.early_stopping_callback_params.strict
        self._is_verbose = manager.early_stopping_callback_params.verbose
        self._saved_at = time.monotonic()
        self._saved_just_now = False
        self._first_step = 0
        self._figures = figures or {}
        self._told_meanwhile = 0
        self.owes_validation = state.validation_due and validate is not None
        self.validation: EvaluationResult | None = None
        self.checkpoint: Path | None = None
        self.stopped_by: str | None = None
        if self._early is not None and self._early.reason is not None:
            self.stopped_by = f"{EARLY_STOPPING} ({self._early.reason})"

    def catch_up(self, module: LanguageModule) -> None:
        """Validate after the step at which an earlier process had no time to; before the training goes on."""
        step = module.step
        self._journal.say(f"validating after step {step:,}, which was broken off")
        validation = self._run_validation(step, 0)
        if validation is None:
            self.stopped_by = self._stop.adopt(self._told_meanwhile)
            return
        self.owes_validation = False
        figures = dict(self._figures) | validation
        if self._early is not None and step % self._keys.val_check_interval == 0:
            stopping = self._check_progress(self._early, step, figures)
            if stopping is not None and step < self._keys.max_steps:
                self.stopped_by = f"{EARLY_STOPPING} ({stopping})"
        if self._save is not None:  # now with its validation
            self._write(module, figures)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals back from Lightning, and validate a little if that is asked for."""
        assert isinstance(pl_module, LanguageModule)
        self._stop.install()
        self._first_step = pl_module.step
        batches = self._keys.num_sanity_val_steps
        if batches and self._validate is not None:
            loss = self._evaluate(batches).loss
            over = counted(batches, "batch", "batches")
            self._journal.say(f"validation loss before the first step {loss:.4f} ({over})")
        self._saved_at = time.monotonic()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Tell the profilers."""
        assert isinstance(pl_module, LanguageModule)
        self._observers.before(pl_module.step + 1 - self._first_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Do what is due after this step."""
        assert isinstance(pl_module, LanguageModule)
        step = pl_module.step
        self._observers.after(step - self._first_step)
        self._finish_report()  # of the step before, now that the device has this one to do
        if self._average is not None:
            assert pl_module.optimizer_state.grad_norm is not None
            self._average.update(step, pl_module.optimizer_state.grad_norm)
        last = step == self._keys.max_steps
        told = self._ask(step)
        reason = None if last else self._stop.adopt(told)
        checks = step % self._keys.val_check_interval == 0
        validates = self._validate is not None and (last or checks)
        saves = self._save is not None and (
            reason is not None or bool(told & Flag.SAVE) or self._is_save_due(step) or (last and self._saves_end())
        )
        # What an unbroken run reports too: clocks, signals and ends of this process are not among it.
        regular = step % self._keys.log_every_n_steps == 0 or checks or self._is_save_due(step)
        first = not self._reports.has_window
        others = validates or saves or last or reason is not None or (checks and self._early is not None)
        if regular and not (first or others) and runs_behind(pl_module.device):
            self._reports.begin(pl_module, restart=True)  # nothing is decided by it, so the device need not wait
        elif first or regular or saves or last:
            figures = self._report(pl_module, restart=regular)
            if validates:
                validation = self._run_validation(step, told)
                self.owes_validation = validation is None
                if validation is None:
                    reason, saves = self._stop.adopt(self._told_meanwhile), self._save is not None
                else:
                    figures |= validation
            if checks and self._early is not None and not self.owes_validation:
                stopping = self._check_progress(self._early, step, figures)
                if stopping is not None and not last:
                    reason = reason or f"{EARLY_STOPPING} ({stopping})"
                    saves = saves or (self._save is not None and self._saves_end())
            if saves:
                self._write(pl_module, figures)
            if validates or saves:
                self._reports.restart_clock(pl_module)
        if reason is not None:
            self.stopped_by = reason
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the report of the last step, the profilers and the load of the experts written."""
        self._finish_report()
        self._observers.close()
        self._keep_load(draw=True, last=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Have the report of the step before told, if it was left to the one that failed.

        Not with several processes, one of which may have failed before it sent its part.
        """
        assert isinstance(pl_module, LanguageModule)
        if pl_module.ranks.world_size == 1:
            try:
                self._reports.finish()
            except Exception as error:  # a broken device gives no values, and the first error says more
                self._journal.note(f"the report of the step before: {error}")

    def _ask(self, step: int) -> int:
        """What all processes know together; another process's knowledge may come a step late."""
        flags = self._stop.flags
        if self._interval is not None and time.monotonic() - self._saved_at >= seconds_of(self._interval):
            flags |= Flag.SAVE
        told = self._agree(flags)
        if self._saved_just_now and self._answers_late:  # to a question from before that save
            told &= ~Flag.SAVE
        self._saved_just_now = False
        return told

    def _is_save_due(self, step: int) -> bool:
        if self._save is None:
            return False
        if self._params.every_n_train_steps is not None:
            return step % self._params.every_n_train_steps == 0
        return self._interval is None and step % self._keys.val_check_interval == 0

    def _saves_end(self) -> bool:
        return self._params.save_last or (self._params.every_n_train_steps is None and self._interval is None)

    def _report(self, module: LanguageModule, *, restart: bool) -> dict[str, float]:
        """Report this step at once; returns the figures that others go by."""
        try:
            return self._reports.report(module, restart=restart)
        except DivergedError as error:
            raise self._diverged(str(error)) from None

    def _finish_report(self) -> None:
        """Finish the report of the step before, if that was left to this one."""
        try:
            self._reports.finish()
        except DivergedError as error:
            raise self._diverged(str(error)) from None

    def _run_validation(self, step: int, told: int) -> dict[str, float] | None:
        """The figures of a validation, or None where a signal leaves no time for it; a limit on time does.

        Otherwise a run whose validation takes longer than its limit would never get beyond it.
        """
        self._told_meanwhile = told & SIGNALS
        if self._told_meanwhile:
            return None
        try:
            self.validation = self._evaluate(None, self._is_told_to_stop)
        except StoppedError:
            return None
        val_loss, bits_per_byte = self.validation.loss, self.validation.bits_per_byte
        if not math.isfinite(val_loss):
            raise self._diverged(f"training diverged at step {step}: validation loss {val_loss}")
        figures = {"val_loss": val_loss} | ({} if bits_per_byte is None else {"bits_per_byte": bits_per_byte})
        self._journal.report_validation(step, figures)
        self._keep_load(draw=True)
        return figures

    def _is_told_to_stop(self) -> bool:
        """Between two batches of a validation; another process's knowledge may come a batch late."""
        self._told_meanwhile = self._agree(self._stop.flags) & SIGNALS
        return bool(self._told_meanwhile)

    def _evaluate(self, batches: int | None, is_told_to_stop: Callable[[], bool] | None = None) -> EvaluationResult:
        assert self._validate is not None
        average = self._average if self._validates_average else None
        with self._observers.phase("validation"), average.applied() if average is not None else nullcontext():
            return self._validate(batches, is_told_to_stop)

    def _check_progress(self, early: EarlyStopping, step: int, figures: Mapping[str, float]) -> str | None:
        """Whether early stopping ends the run at this step, and why."""
        value = figures.get(early.metric)
        if value is None:
            problem = f"`exp_manager.early_stopping_callback_params.monitor` ({early.metric}) was not measured"
            if self._is_strict:
                raise UserError(f"{problem} at step {step}; monitor one of {', '.join(figures)}")
            self._journal.note(f"{problem} at step {step}")
            return None
        reason, line = early.check(value)
        if self._is_verbose:
            self._journal.say(f"{EARLY_STOPPING}: {line}")
        return reason

    def _write(self, module: LanguageModule, figures: Mapping[str, float]) -> None:
        assert self._save is not None
        if self._policy.skipped_in_a_row and not _is_finite(module):
            raise self._diverged(f"training diverged at step {module.step}: some weights are not finite")
        state = self._policy.state().model_copy(update={"validation_due": self.owes_validation})
        if self._early is not None:
            state = state.model_copy(update={"patience": self._early.state})
        if self._expert_load is not None:
            state = state.model_copy(update={"expert_load": self._expert_load.sums})
            self._keep_load(draw=False)
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        with self._observers.phase("checkpoint"):
            self.checkpoint = self._save(module.step, finite, state)
        self._saved_at = time.monotonic()
        self._saved_just_now = True

    def _keep_load(self, *, draw: bool, last: bool = False) -> None:
        if self._expert_load is not None:
            self._expert_load.keep(draw=draw, last=last)

    def _diverged(self, what: str) -> UserError:
        saved = checkpoint_paths(self._checkpoints)
        return UserError(
            [
                what,
                f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet",
                "lower `model.optim.lr`, lengthen `model.optim.sched.warmup_steps` or clip harder with "
                "`trainer.gradient_clip_val`",
            ]
        )


def _is_finite(module: LanguageModule) -> bool:
    """Whether all weights on all processes are finite; they call it together."""
    parameters = [local_tensor(parameter) for parameter in module.model.parameters()]
    bad = torch.stack([~torch.isfinite(parameter).all() for parameter in parameters]).any()
    return not module.ranks.sum_(bad.float()).item()
