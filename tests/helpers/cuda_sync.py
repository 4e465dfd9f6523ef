"""Context manager that makes synchronization with the CUDA device an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def forbid_device_sync() -> Iterator[None]:
    """Raise on any operation inside that synchronizes with the CUDA device."""
    try:
        with warnings.catch_warnings():
            # torch warns once, after setting the mode; as an error that would leave the mode on for later tests
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
