"""What the host learns of the device without stopping it: values, and when it was where.

A CUDA device runs behind the host. Whoever asks for a value on the spot waits for all that was launched before, and the
device then waits for the next launch. So values are sent off at one time and taken later.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor


def runs_behind(device: torch.device) -> bool:
    """Whether a device works on after a launch, so that the host may launch the next step and read this one then."""
    return device.type == "cuda"


class LateValues:
    """The values of a tensor, on their way to the host; the tensor may be changed at once.

    Args:
        tensor: on a CUDA device it is copied there, behind what is launched and without a wait; elsewhere here and now.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            # A copy to memory that is not pinned waits. The allocator gives the memory to nobody before it is read.
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))
        else:
            self._values = tensor.to("cpu", copy=True)

    def get(self) -> Tensor:
        """The values, on the host; waits for the device, but not for what was launched after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


class Instant:
    """When the device is done with what is launched so far: on CUDA by its own clock, elsewhere now.

    Args:
        device: whose work is timed.
        aside: seconds that count for nothing so far, such as those of writing a profile.
    """

    def __init__(self, device: torch.device, aside: float) -> None:
        self._aside = aside
        self._seconds = time.perf_counter()
        self._reached: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._reached = torch.cuda.Event(enable_timing=True)
            self._reached.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: Instant) -> float:
        """Of the same device, without those that count for nothing; waits until the device is there."""
        if self._reached is not None and earlier._reached is not None:
            self._reached.synchronize()
            seconds = earlier._reached.elapsed_time(self._reached) / 1e3
        else:
            seconds = self._seconds - earlier._seconds
        return seconds - (self._aside - earlier._aside)
