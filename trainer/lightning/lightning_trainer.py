"""Lightning trainer: its training loop on this rank's device, with all other features disabled."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.process_group import DistributedContext
from .lightning_imports import (
    LightningEnvironment,
    Logger,
    ParallelStrategy,
    SIGTERMException,
    SingleDeviceStrategy,
    pl,
)
from .lightning_module import LanguageModule


def fit(
    module: LanguageModule,
    callback: pl.Callback,
    max_steps: int,
    device: torch.device,
    ranks: DistributedContext,
    *,
    users: Sequence[pl.Callback] = (),
    loggers: Sequence[Logger] = (),
    log_every_n_steps: int = 50,
) -> None:
    """Run Lightning's training loop from the module's step to `max_steps`.

    `callback` and `module` implement logging, validation, checkpointing and precision. Without callbacks and loggers of
    the user the trainer is barebones. It launches no processes, whatever the cluster environment.

    Args:
        module: model, optimizer and dataloader.
        callback: called after those of the user.
        users: callbacks of the user.
        loggers: loggers for what these log.
        log_every_n_steps: steps between two of its records.
    """
    environment = LightningEnvironment()  # given explicitly, so that Lightning does not detect a cluster of its own
    environment.set_world_size(ranks.world_size)
    environment.set_global_rank(ranks.rank)
    options: dict[str, Any] = {"barebones": True}
    if users or loggers:  # `check_val_every_n_epoch=None`: callbacks check after validations, not after the one epoch
        options = {"logger": list(loggers), "log_every_n_steps": log_every_n_steps}
        options |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        options |= {"check_val_every_n_epoch": None, "val_check_interval": max_steps}
    with _quiet_lightning():
        trainer = pl.Trainer(
            **options,
            accelerator=device.type,
            devices=1 if device.type != "cuda" else [device.index or 0],
            strategy=_ResidentStrategy(device) if ranks.world_size == 1 else MeshStrategy(device, ranks),
            plugins=[environment],
            callbacks=[*users, callback],
            max_steps=max_steps,
            max_epochs=-1,
            limit_val_batches=0,
            use_distributed_sampler=False,
        )
        # Lightning counts optimizer steps here; starting from zero it would stop too late after a resume.
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        progress.ready = progress.completed = module.step
        trainer.fit_loop.epoch_loop._batches_that_stepped = module.step  # of what callbacks log with `self.log`
        # Lightning would broadcast before every batch whether rank 0 has received SIGTERM, and wait for the device to
        # read it; `StopHandler` tells the other ranks without either.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing
        # Raised for a signal that arrives before our handlers are restored; `StopHandler` has recorded it too.
        try:
            with suppress(SIGTERMException):
                trainer.fit(module)
        finally:
            module.release_graphs()
    assert trainer.global_step == module.step


def _do_nothing() -> None:
    pass


class _ResidentStrategy(SingleDeviceStrategy):
    """Single device; model and optimizer stay on it after training (Lightning would move them to the CPU)."""

    def teardown(self) -> None:
        """Do nothing, so that the model stays on its device."""


class MeshStrategy(ParallelStrategy):
    """Strategy for several ranks whose model is already replicated (`distributed.ddp`) or sharded.

    Gradients, clipping, checkpoints and data order are handled elsewhere; this gives Lightning and callbacks basic
    collectives.
    """

    def __init__(self, device: torch.device, ranks: DistributedContext) -> None:
        super().__init__(parallel_devices=[device])
        self._device = device
        self._ranks = ranks

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        return self._device

    def model_to_device(self) -> None:
        """Do nothing: the model was built on the device."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._ranks.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank `src` gives: text, numbers, None, or lists and dictionaries of them.

        Raises:
            TypeError: it is something else, which would be pickled.
        """
        return json.loads(self._ranks.all_gather_text(json.dumps(obj))[src])

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Reduce a tensor over the ranks of a group, by default all: a `ReduceOp`, its name, or "mean"."""
        if not isinstance(tensor, Tensor):
            return tensor
        name, total = str(reduce_op or "sum").rpartition(".")[2].upper(), tensor.clone()
        averages = name in ("MEAN", "AVG")  # gloo has no mean
        dist.all_reduce(total, op=dist.ReduceOp.SUM if averages else getattr(dist.ReduceOp, name), group=group)
        return total / dist.get_world_size(group) if averages else total

    def teardown(self) -> None:
        """Do nothing, so that the model stays on its device."""


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Suppress Lightning's informational messages and hints."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(pytorch_lightning|lightning_fabric)\..*")
            # torch.compile recommends TF32 even for explicit fp32 runs, and for bf16 runs, where it has no effect.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
