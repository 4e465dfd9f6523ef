"""Lightning's part: its loop, on this rank's device, with everything else switched off."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.process_group import Ranks
from .lightning_imports import ClusterEnvironment, ParallelStrategy, SIGTERMException, SingleDeviceStrategy, pl
from .lightning_module import LanguageModule


def fit(module: LanguageModule, loop: pl.Callback, max_steps: int, device: torch.device, ranks: Ranks) -> None:
    """Run Lightning's loop from the module's step to `max_steps`.

    The trainer is bare: reports, validation, checkpoints and precision are ours, so its own are off. It starts no
    process, whatever scheduler started this one.
    """
    with _quiet_lightning():
        trainer = pl.Trainer(
            barebones=True,
            accelerator=device.type,
            devices=1 if device.type != "cuda" else [device.index or 0],
            strategy=_ResidentStrategy(device) if ranks.world_size == 1 else MeshStrategy(device, ranks),
            plugins=[_Environment(ranks)],
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


class _Environment(ClusterEnvironment):
    """Tells Lightning the place of this process, which it must not look for itself."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._ranks.world_size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._ranks.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._ranks.local_rank

    def node_rank(self) -> int:
        return 0


class _ResidentStrategy(SingleDeviceStrategy):
    """One device, on which model and optimizer stay when training ends (Lightning would move them to the CPU)."""

    def teardown(self) -> None:
        """Leave everything where it is."""


class MeshStrategy(ParallelStrategy):
    """Several ranks whose model is where it belongs already: whole on each (`distributed.replicated`) or cut over them.

    Gradients, clipping, checkpoints and the order of the data are the trainer's own; for Lightning and for callbacks
    this knows who is who, and how to wait and to share small things.
    """

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        super().__init__(parallel_devices=[device])
        self._device = device
        self._ranks = ranks

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self._device

    @property
    def world_size(self) -> int:
        """Ranks in the run."""
        return self._ranks.world_size

    @property
    def global_rank(self) -> int:
        """Of this process in the run."""
        return self._ranks.rank

    @property
    def local_rank(self) -> int:
        """Of this process on its machine."""
        return self._ranks.local_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes and prints for all."""
        return self._ranks.is_first

    def model_to_device(self) -> None:
        """Nothing to do: the model was built where it is."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self._ranks.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Nothing is sent: what Lightning would share, a log directory, is the same on every rank here."""
        return obj

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensor of every rank, stacked."""
        rows = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(rows, tensor.contiguous(), group=group)
        return torch.stack(rows)

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Sum or mean of a tensor over all ranks."""
        if not isinstance(tensor, Tensor):
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total / self.world_size if str(reduce_op).lower() in ("mean", "avg") else total

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
