"""Lightning's part: its loop, on one device, with everything else switched off."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException

from .module import LanguageModule


def fit(module: LanguageModule, loop: pl.Callback, max_steps: int, device: torch.device) -> None:
    """Run Lightning's loop from the module's step to `max_steps`.

    The trainer is bare: reports, validation, checkpoints and precision are ours, so its own are off. It runs one
    process, whatever scheduler started it.
    """
    with _quiet_lightning():
        trainer = pl.Trainer(
            barebones=True,
            accelerator=device.type,
            devices=1 if device.type != "cuda" else [device.index or 0],
            strategy=_ResidentStrategy(device),
            plugins=[LightningEnvironment()],
            callbacks=[loop],
            max_steps=max_steps,
            max_epochs=-1,
            limit_val_batches=0,
            use_distributed_sampler=False,
        )
        # Lightning counts optimizer steps here; with a step of its own it would stop too late after a resume.
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        progress.ready = progress.completed = module.step
        # Raised for a signal that comes before the loop takes the handlers back; `StopRequest` has it too.
        with suppress(SIGTERMException):
            trainer.fit(module)
    assert trainer.global_step == module.step


class _ResidentStrategy(SingleDeviceStrategy):
    """One device, on which model and optimizer stay when training ends (Lightning would move them to the CPU)."""

    def teardown(self) -> None:
        """Leave everything where it is."""


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keep Lightning's greetings and hints, which are not about this run, off the terminal."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(pytorch_lightning|lightning_fabric)\..*")
            # The compiler recommends TF32, for fp32 runs that were asked for and bf16 runs that have no use for it.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
