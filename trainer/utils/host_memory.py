"""Memory of host and device: how much is installed and was used, and errors that mean it is exhausted."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int | None:
    """Return the host memory in bytes: the machine's, or the limit of its container (cgroup); None if unknown."""
    limits: list[int] = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # `max` means no limit
            limits.append(int(Path(path).read_text()))
    return min(limits, default=None)


def peak_memory_gib(device: torch.device) -> float | None:
    """Return the peak memory in GiB: allocated on a CUDA device, else resident size of the process; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error is a failed allocation on the device or the host, from Python, NumPy or torch."""
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_host_memory(error):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Return True if the error is a failed allocation of host memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
