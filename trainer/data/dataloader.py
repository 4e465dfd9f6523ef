"""Prefetching dataloader: the local micro batches of each global batch, on the device.

The data position depends on the number of consumed samples only (`batch_sampler.py`), so the dataloader has no state to
save. For CUDA devices batches are pinned and copied on a side stream, one step ahead.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..utils.errors import UserError
from .batch_sampler import MicroBatchIndices, RankBatchSampler
from .datasets.samples import IGNORE_INDEX, AnySamples, batch_tensors, concatenate_batches

PREFETCH_FACTOR = 2
"""Prefetched global batches."""


class MicroBatch(NamedTuple):
    """Samples of one forward pass.

    Attributes:
        number: index of the micro batch in the global batch.
        fields: tensors by name, the input of the model's `batch_loss`.
    """

    number: int
    fields: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """Local samples of one optimizer step.

    Attributes:
        indices: indices of the micro batches in the global batch.
        fields: tensors by name, [B, ...]. `labels` is int64, with `IGNORE_INDEX` at ignored positions.
        num_targets: fp32 scalar tensor, the number of local labels that are not ignored; its sum over ranks is the
            denominator of every micro batch's loss.
    """

    indices: tuple[int, ...]
    fields: dict[str, Tensor]
    num_targets: Tensor

    @classmethod
    def from_fields(cls, numbers: tuple[int, ...], fields: dict[str, Tensor]) -> GlobalBatch:
        """Build a batch and count its targets."""
        return cls(numbers, fields, (fields["labels"] != IGNORE_INDEX).sum().to(torch.float32))

    @property
    def labels(self) -> Tensor:
        """Labels, int64 [B, S]."""
        return self.fields["labels"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the batch, `targets` last."""
        return (*self.fields.values(), self.num_targets)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro batches in order."""
        parts = [field.chunk(len(self.indices)) for field in self.fields.values()]
        for number, *rows in zip(self.indices, *parts, strict=True):
            yield MicroBatch(number, dict(zip(self.fields, rows, strict=True)))

    def _with(self, tensors: Iterable[Tensor]) -> GlobalBatch:
        """Return the batch with its `tensors` replaced."""
        *fields, targets = tensors
        return GlobalBatch(self.indices, dict(zip(self.fields, fields, strict=True)), targets)

    def to(self, device: torch.device) -> GlobalBatch:
        """Copy the batch to a device; asynchronous for a pinned batch and a CUDA device.

        Synchronous elsewhere: a non-blocking copy to MPS reads memory that is already freed (pytorch #189690).
        """
        non_blocking = device.type == "cuda"
        return self._with(tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors)

    def pin_memory(self) -> GlobalBatch:
        """Copy the batch to pinned memory; DataLoader calls this too."""
        return self._with(tensor.pin_memory() for tensor in self.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields as NumPy arrays, which a dataloader worker sends through a pipe.

        Tensors would be sent through shared memory, which is scarce in containers, and a socket in the temporary
        directory, whose path may exceed the length limit of sockets; then the batch is lost and the run hangs.
        """
        return _batch_from_arrays, (self.indices, {name: field.numpy() for name, field in self.fields.items()})


def _batch_from_arrays(indices: tuple[int, ...], arrays: dict[str, np.ndarray]) -> GlobalBatch:
    return GlobalBatch.from_fields(indices, {name: torch.from_numpy(array) for name, array in arrays.items()})


class _GlobalBatches(Dataset[GlobalBatch | UserError]):
    """Maps the micro batches of a step to their samples."""

    def __init__(self, samples: AnySamples) -> None:
        self.samples = samples

    def read(self, part: MicroBatchIndices) -> GlobalBatch:
        size = part.micro_batch_size
        batches = [self.samples.batch(part.first_sample + number * size, size) for number in part.indices]
        return GlobalBatch.from_fields(part.indices, batch_tensors(concatenate_batches(batches)))

    def __getitem__(self, part: MicroBatchIndices) -> GlobalBatch | UserError:
        """In a dataloader worker: return a `UserError`; DataLoader would raise it with a traceback as its message."""
        try:
            return self.read(part)
        except UserError as error:
            return error


class PrefetchingDataLoader:
    """Dataloader over an endless sequence of global batches.

    Args:
        device: device to copy batches to.
        num_workers: worker processes; 0 uses a thread.
    """

    def __init__(
        self, dataset: AnySamples, batch_sampler: RankBatchSampler, device: torch.device, num_workers: int = 0
    ) -> None:
        self._batches = _GlobalBatches(dataset)
        self._parts = batch_sampler
        self._device = device
        self._num_workers = num_workers
        self._thread: ThreadPoolExecutor | None = None

    def __iter__(self) -> Iterator[GlobalBatch]:
        host = self._from_workers() if self._num_workers else self._from_thread()
        return self._copy_ahead(host) if self._device.type == "cuda" else (b.to(self._device) for b in host)

    def close(self) -> None:
        """Stop the prefetch thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _from_thread(self) -> Iterator[GlobalBatch]:
        self.close()
        self._thread = thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        parts = iter(self._parts)
        ahead = deque(thread.submit(self._read, part) for part in islice(parts, PREFETCH_FACTOR))
        for part in parts:
            batch = ahead.popleft().result()
            ahead.append(thread.submit(self._read, part))
            yield batch

    def _read(self, part: MicroBatchIndices) -> GlobalBatch:
        batch = self._batches.read(part)
        return batch.pin_memory() if self._device.type == "cuda" else batch

    def _from_workers(self) -> Iterator[GlobalBatch]:
        with warnings.catch_warnings():
            # The number of workers is the user's choice.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._parts,
                num_workers=self._num_workers,
                prefetch_factor=PREFETCH_FACTOR,
                pin_memory=self._device.type == "cuda",
                # A fork would copy locks held by threads of this process.
                multiprocessing_context="spawn",
                worker_init_fn=_init_worker,
            )
        with _signals_blocked():
            return map(_unwrap, iter(loader))

    def _copy_ahead(self, host: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        stream = torch.cuda.Stream(self._device)

        def start_copy() -> tuple[GlobalBatch, Any]:
            with torch.cuda.stream(stream):
                batch = next(host).to(self._device)
                return batch, stream.record_event()

        ahead = start_copy()
        while True:
            batch, copied = ahead
            ahead = start_copy()
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in batch.tensors:
                tensor.record_stream(current)
            yield batch


def _unwrap(item: GlobalBatch | UserError) -> GlobalBatch:
    if isinstance(item, UserError):
        raise item
    return item


_BLOCKED_SIGNALS = (signal.SIGINT, signal.SIGTERM) if hasattr(signal, "sigwaitinfo") else (signal.SIGINT,)
"""Stop signals. Ctrl-C and schedulers send them to all processes, but the run needs its dataloader workers until it has
finished the step."""


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Context in which new processes inherit `_BLOCKED_SIGNALS` as blocked, from their first instruction."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # if started inside, it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _init_worker(worker: int) -> None:
    """In a dataloader worker: exit with the parent process or on SIGTERM from it, and ignore SIGTERM from others."""
    # torch's own watchdog compares parent ids from here on, and so never ends a worker whose parent has died before
    threading.Thread(target=_exit_with_parent, name="parent", daemon=True).start()
    if signal.SIGTERM in _BLOCKED_SIGNALS and hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_exit_on_sigterm_from, args=(os.getppid(),), name="sigterm", daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is no worker"
    parent.join()
    os._exit(1)


def _exit_on_sigterm_from(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)
