"""Choose the device of a run or a command."""

from __future__ import annotations

import torch

from ..config.schema.trainer_and_data import TrainerBlock
from ..utils.environment import enable_expandable_segments
from ..utils.errors import UserError
from ..utils.text import pluralize


def choose_device(keys: TrainerBlock, local_rank: int = 0) -> torch.device:
    """Return the device of `trainer.accelerator`; `auto` is a CUDA GPU if there is one, else the CPU.

    Args:
        keys: `trainer`.
        local_rank: rank of this process on its node, the index of its GPU.

    Raises:
        UserError: there is no such device.
    """
    name = keys.accelerator
    device = _find_device(
        "cuda" if name == "gpu" else name, f"`trainer.accelerator` ({name})", "trainer.accelerator=cpu or auto"
    )
    if device.type != "cuda":
        return device
    gpus = torch.cuda.device_count()
    if local_rank and local_rank >= gpus:
        raise UserError(
            f"`trainer.devices` ({keys.devices}): this machine has {pluralize(gpus, 'GPU')}; use trainer.devices={gpus}"
        )
    return torch.device("cuda", local_rank)


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the CUDA compute capability of a device; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


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
