"""Modules of users' own code: their parameters and buffers begin as their constructors set them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class OwnModule(Protocol):
    """Module with parameters or buffers of a user's own, which was built on the meta device."""

    def get_submodule(self, target: str) -> nn.Module:
        """See `nn.Module`."""
        ...

    def initial_tensors(self, seed: int) -> dict[str, Tensor]:
        """Return the initial values of these parameters and buffers by name, on the CPU, a function of the seed."""
        ...


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a module on the CPU, with PyTorch's default generator seeded, and restored afterwards."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return build()


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module with their names."""
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()
    yield from module.named_buffers()
