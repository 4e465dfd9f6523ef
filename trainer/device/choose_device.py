"""Choose the device of a run or a command."""

from __future__ import annotations

import torch

from ..config.schema.root import RootBlock
from ..utils.environment import enable_expandable_segments
from ..utils.errors import UserError
from ..utils.text import pluralize


def choose_device(root: RootBlock, local_rank: int = 0) -> torch.device:
    """Return the device of `trainer.accelerator`; `auto` is a CUDA GPU if there is one, else the CPU.

    Args:
        root: the configuration.
        local_rank: rank of this process on its node, the index of its GPU.

    Raises:
        UserError: there is no such device.
    """
    name = root.trainer.accelerator
    device = _find_device(
        "cuda" if name == "gpu" else name, f"`trainer.accelerator` ({name})", "trainer.accelerator=cpu or auto"
    )
    if device.type != "cuda":
        return device
    gpus = torch.cuda.device_count()
    if local_rank and local_rank >= gpus:
        raise UserError(
            f"`trainer.devices` ({root.trainer.devices}): this machine has {pluralize(gpus, 'GPU')}; "
            f"use trainer.devices={gpus}"
        )
    return torch.device("cuda", local_rank)


def device_from_option(name: str) -> torch.device:
    """Return the device of a `--device` option.

    Raises:
        UserError: this machine, or this build of torch, does not have it.
    """
    return _find_device(name, f"--device {name}", "--device cpu")


def _find_device(name: str, source: str, fix: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[name]:
        raise UserError(f"{source}: torch {torch.__version__} finds no such device here; use {fix}")
    if name == "cuda":
        enable_expandable_segments()
    return torch.device(name)
