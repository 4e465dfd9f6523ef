"""`waits_forbidden`: what waits for the CUDA device inside is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_forbidden() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # said the first time, after the mode is set: as an error it would leave the mode on for all later tests
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
