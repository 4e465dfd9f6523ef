"""What happens between steps: reports, validation, checkpoints, and stopping in time.

A Lightning callback with its own cadence by step: Lightning's `val_check_interval` counts from a restart, ours from the
first step of training, so a resumed run validates and saves at the same steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from .checkpoint import apply_retention, checkpoint_paths
from .config.schema import RootBlock
from .errors import UserError
from .evaluation import EvaluationResult
from .metrics import Journal, StepReport, peak_memory_gib
from .module import LanguageModule
from .stop import StopRequest

Validate = Callable[[int | None], EvaluationResult]
"""Runs a validation of so many global batches; None: as many as the configuration asks for."""
Save = Callable[[int, float | None], Path]
"""Writes a checkpoint of a step with its validation loss; returns its path."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What turns seconds into rates.

    Attributes:
        tokens_per_step: target positions in a global batch, padding included.
        flops_per_token: model FLOPs, forward and backward.
        peak_flops: of the device, or None where it is not known.
    """

    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None


class RunLoop(pl.Callback):
    """Reports, validates, saves and stops after the steps where it is due.

    Args:
        root: the configuration.
        journal: where figures go.
        stop: asked after every step.
        rates: tokens and FLOPs of a step.
        validate: runs the validation; None where there is none.
        save: writes a checkpoint of a step with its validation loss; None where none are written.
        checkpoints: the directory `save` writes to.
        consumed_samples: completed steps to samples trained on.

    Attributes:
        validation: the last validation result.
        checkpoint: the last checkpoint written.
        stopped_by: why training stopped before its last step, or None.
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
    ) -> None:
        self._trainer_keys = root.trainer
        self._retention = root.exp_manager.checkpoint_callback_params
        self._journal = journal
        self._stop = stop
        self._rates = rates
        self._validate = validate
        self._save = save
        self._checkpoints = checkpoints
        self._consumed_samples = consumed_samples
        self._window: _Window | None = None
        self.validation: EvaluationResult | None = None
        self.checkpoint: Path | None = None
        self.stopped_by: str | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals back from Lightning, and validate a little if that is asked for."""
        self._stop.install()
        batches = self._trainer_keys.num_sanity_val_steps
        if batches and self._validate is not None:
            loss = self._validate(batches).loss
            self._journal.say(f"validation loss before the first step {loss:.4f} ({batches} batches)")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Do what is due after this step."""
        assert isinstance(pl_module, LanguageModule)
        step = pl_module.step
        last = step == self._trainer_keys.max_steps
        reason = None if last else self._stop.reason
        validates = self._validate is not None and (last or step % self._trainer_keys.val_check_interval == 0)
        saves = self._save is not None and (reason is not None or self._is_save_due(step, last))
        if self._window is None or validates or saves or last or step % self._trainer_keys.log_every_n_steps == 0:
            self._report(pl_module)
            if validates or saves:
                self._pause(step, validates=validates, saves=saves, stopping=reason is not None)
        if reason is not None:
            self.stopped_by = reason
            trainer.should_stop = True

    def _is_save_due(self, step: int, last: bool) -> bool:
        if last and self._retention.save_last:
            return True
        interval = self._retention.every_n_train_steps or self._trainer_keys.val_check_interval
        return step % interval == 0 or (last and self._retention.every_n_train_steps is None)

    def _report(self, module: LanguageModule) -> None:
        values = module.read_unread()
        for step, (loss, grad_norm) in enumerate(values, module.step - len(values) + 1):
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise self._diverged(step, f"loss {loss}, gradient norm {grad_norm}")
        seconds = None if self._window is None else self._window.seconds_per_step(module.step)
        # The first step of a process compiles and allocates, so the clock starts after it.
        self._window = _Window(module.step)
        tokens_per_second = None if seconds is None else self._rates.tokens_per_step / seconds
        peak = self._rates.peak_flops
        self._journal.report(
            StepReport(
                step=module.step,
                loss=sum(loss for loss, _ in values) / len(values),
                grad_norm=values[-1][1],
                lr=module.lr,
                consumed_samples=self._consumed_samples(module.step),
                step_seconds=seconds,
                tokens_per_second=tokens_per_second,
                mfu=tokens_per_second * self._rates.flops_per_token / peak if tokens_per_second and peak else None,
                memory_gib=peak_memory_gib(module.device),
            )
        )

    def _pause(self, step: int, *, validates: bool, saves: bool, stopping: bool) -> None:
        val_loss: float | None = None
        if validates and self._validate is not None:
            self.validation = self._validate(None)
            val_loss = self.validation.loss
            if not math.isfinite(val_loss):
                raise self._diverged(step, f"validation loss {val_loss}")
            bits_per_byte = self.validation.bits_per_byte
            figures = {"val_loss": val_loss} | ({} if bits_per_byte is None else {"bits_per_byte": bits_per_byte})
            self._journal.report_validation(step, figures)
        if saves and self._save is not None:
            self.checkpoint = self._save(step, val_loss)
            apply_retention(
                self._checkpoints,
                save_top_k=self._retention.save_top_k,
                save_last=self._retention.save_last or stopping,
            )
        self._window = _Window(step)

    def _diverged(self, step: int, figures: str) -> UserError:
        saved = checkpoint_paths(self._checkpoints)
        return UserError(
            [
                f"training diverged at step {step}: {figures}",
                f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet",
                "lower `model.optim.lr`, lengthen `model.optim.sched.warmup_steps` or clip harder with "
                "`trainer.gradient_clip_val`",
            ]
        )


class _Window:
    """Time since a step, with nothing but steps in it."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._start = time.perf_counter()

    def seconds_per_step(self, step: int) -> float | None:
        steps = step - self._step
        return (time.perf_counter() - self._start) / steps if steps else None
