"""Completed steps of each worker process, in memory that the launcher shares with them. Does not import torch.

A worker that is killed or hangs cannot tell how far it came. Writing a number to shared memory costs no system call and
can neither fail nor wait.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable

_STEP = struct.Struct("<q")


class StepCounters:
    """The launcher's side: an anonymous file with one number for each local rank, 0 at first."""

    def __init__(self, workers: int) -> None:
        self._file = tempfile.TemporaryFile(prefix="stoker-steps-")  # noqa: SIM115
        self._file.truncate(_STEP.size * workers)

    @property
    def descriptor(self) -> int:
        """File descriptor to pass to the workers."""
        return self._file.fileno()

    def read(self, local_rank: int) -> int:
        """Return the completed optimizer steps of a worker; 0 before its first."""
        return _STEP.unpack(os.pread(self.descriptor, _STEP.size, _STEP.size * local_rank))[0]

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._file.close()


def open_step_counter(descriptor: int, local_rank: int) -> Callable[[int], None]:
    """Return the worker's side: a function that stores its completed steps."""
    memory = mmap.mmap(descriptor, 0)
    return lambda step: _STEP.pack_into(memory, _STEP.size * local_rank, step)
