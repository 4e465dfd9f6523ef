"""Host memory for the state of an optimizer, and the copies between it and a CUDA device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ...models.memory.host_copies import CudaCopies
from ..utils.errors import UserError

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context."""


class PinnedState(CudaCopies):
    """Copies whose host memory is pinned to the byte: it holds one state for as long as the run lasts.

    PyTorch's allocator of pinned memory rounds up to a power of two, which of tens of GiB may be twice as much.
    """

    _pinned = 0

    @property
    def host_bytes(self) -> int:
        """Host memory that is pinned."""
        return self._pinned

    def host(self, size: int) -> Tensor:
        """So many bytes of pinned host memory, uint8 [size].

        Raises:
            UserError: the system does not give or pin that much.
        """
        wish, cure = "`model.cpu_offloading_optimizer` (True)", "use model.cpu_offloading_optimizer=False"
        asked = f"{size / 2**30:,.1f} GiB of host memory"
        try:
            memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise UserError(f"{wish}: the system does not give {asked}; {cure}") from error
        if not size:
            return memory
        error = _register(memory, self.device)
        if error:
            raise UserError(f"{wish}: the system does not pin {asked} (CUDA error {error}); {cure}")
        self._pinned += size
        # It must not be given back while it is pinned; the end of the process does both.
        weakref.finalize(self, _unregister, memory, self.device).atexit = False
        return memory

    def give_back(self, host: Tensor) -> None:
        """Nothing: it is given back with this object."""


def _register(memory: Tensor, device: torch.device) -> int:
    """Pin memory that is there; returns the error of CUDA, 0 for none. torch itself pins shared memory so."""
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        return int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))


def _unregister(memory: Tensor, device: torch.device) -> None:
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        cudart.cudaHostUnregister(memory.data_ptr())
