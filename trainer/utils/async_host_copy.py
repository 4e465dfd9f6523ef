"""Asynchronous device-to-host copies and CUDA event timing.

CUDA kernels run asynchronously to the host. A synchronous read (`.item()`) waits for everything launched before it and
leaves the device idle until the next launch. So copies are started here and read later.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor


def is_async(device: torch.device) -> bool:
    """Return True if the device is asynchronous: the host can launch the next step before reading this one's values."""
    return device.type == "cuda"


class AsyncHostCopy:
    """Asynchronous copy of a tensor to the host; the tensor may be overwritten right after construction.

    Args:
        tensor: a CUDA tensor is copied on its current stream without synchronization; others are copied at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            # A copy to pageable memory would block. The pinned allocator does not reuse the block before the copy ends.
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))
        else:
            self._values = tensor.to("cpu", copy=True)

    def get(self) -> Tensor:
        """Return the values on the host; waits for the copy, but not for work launched after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


class DeviceTimestamp:
    """Timestamp of the end of all work launched so far: a CUDA event on CUDA, the host clock elsewhere.

    Args:
        device: the timed device.
        excluded_seconds: total seconds to exclude so far, such as time spent writing a profile.
    """

    def __init__(self, device: torch.device, excluded_seconds: float) -> None:
        self._excluded_seconds = excluded_seconds
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: DeviceTimestamp) -> float:
        """Return the seconds since `earlier` on the same device, excluded time subtracted; waits for the event."""
        if self._event is not None and earlier._event is not None:
            self._event.synchronize()
            seconds = earlier._event.elapsed_time(self._event) / 1e3
        else:
            seconds = self._seconds - earlier._seconds
        return seconds - (self._excluded_seconds - earlier._excluded_seconds)
