"""Pinned host memory for optimizer state, and copies between it and a CUDA device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ...models.memory.host_copies import CudaCopyEngine
from ..utils.errors import UserError

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context."""


class PinnedStateCopyEngine(CudaCopyEngine):
    """Copy engine with exactly sized pinned host memory, for state that is kept for the whole run.

    PyTorch's caching host allocator rounds up to a power of two, up to twice as much, which matters for tens of GiB.
    """

    _pinned = 0

    @property
    def host_bytes(self) -> int:
        """See `CopyEngine`."""
        return self._pinned

    def host(self, size: int) -> Tensor:
        """Allocate pinned host memory, uint8 (size,).

        Raises:
            UserError: the memory cannot be allocated or pinned.
        """
        key, advice = "`model.cpu_offloading_optimizer` (True)", "use model.cpu_offloading_optimizer=False"
        amount = f"{size / 2**30:,.1f} GiB of host memory"
        try:
            memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise UserError(f"{key}: cannot allocate {amount}; {advice}") from error
        if not size:
            return memory
        error = _register(memory, self.device)
        if error:
            raise UserError(f"{key}: cannot pin {amount} (CUDA error {error}); {advice}")
        self._pinned += size
        # Unpin before the memory is freed with this object; at exit, the operating system does both.
        weakref.finalize(self, _unregister, memory, self.device).atexit = False
        return memory

    def give_back(self, host: Tensor) -> None:
        """Do nothing: the memory is freed with this object."""


def _register(memory: Tensor, device: torch.device) -> int:
    """Pin allocated memory, as torch does for shared memory; return the CUDA error code, 0 for success."""
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        return int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))


def _unregister(memory: Tensor, device: torch.device) -> None:
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(memory.data_ptr())
