"""Global batches on the device, prepared ahead of the step that needs them.

The position in the data is the number of consumed samples and nothing else, so a resumed run asks for the same samples
without any saved state. On a CUDA device batches are pinned and copied on a stream of their own, one step ahead.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .data.samples import IGNORED_LABEL, Samples

BATCHES_AHEAD = 2
"""Global batches that wait for their step."""


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step.

    Attributes:
        first: position of the first sample in the data.
        tokens: int64 [global batch, s].
        labels: int64 [global batch, s]; ignored positions hold `IGNORED_LABEL`.
        targets: fp32 scalar tensor, the number of labels that count (at least 1): the divisor of every micro batch's
            loss.
    """

    first: int
    tokens: Tensor
    labels: Tensor
    targets: Tensor

    def micro_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and labels, `size` samples at a time."""
        return zip(self.tokens.split(size), self.labels.split(size), strict=True)

    def to(self, device: torch.device) -> GlobalBatch:
        """The batch on a device; a copy of a pinned batch to a CUDA device does not wait.

        Elsewhere it does: a copy to MPS that does not wait reads memory already given back (pytorch #189690).
        """
        free = device.type == "cuda"
        tokens, labels, targets = (
            tensor.to(device, non_blocking=free) for tensor in (self.tokens, self.labels, self.targets)
        )
        return GlobalBatch(self.first, tokens, labels, targets)

    def pin_memory(self) -> GlobalBatch:
        """The batch in page-locked memory, from which the device copies without the host; DataLoader calls this too."""
        return GlobalBatch(self.first, self.tokens.pin_memory(), self.labels.pin_memory(), self.targets.pin_memory())


class _GlobalBatches(Dataset[GlobalBatch]):
    """Position of the first sample to the global batch that starts there."""

    def __init__(self, samples: Samples, size: int) -> None:
        self.samples = samples
        self.size = size

    def __getitem__(self, first: int) -> GlobalBatch:
        tokens, labels = self.samples.batch(first, self.size)
        targets = (labels != IGNORED_LABEL).sum().clamp(min=1).to(torch.float32)
        return GlobalBatch(first, tokens, labels, targets)


class BatchFeed:
    """Endless global batches from a position on.

    Args:
        samples: the training samples.
        first: consumed samples so far.
        global_batch_size: samples per batch.
        device: where batches go.
        num_workers: processes that prepare batches; 0 prepares them in a thread.
    """

    def __init__(
        self, samples: Samples, first: int, global_batch_size: int, device: torch.device, num_workers: int = 0
    ) -> None:
        self._batches = _GlobalBatches(samples, global_batch_size)
        self._positions = range(first, 1 << 62, global_batch_size)
        self._device = device
        self._num_workers = num_workers
        self._thread: _Producer | None = None

    def __iter__(self) -> Iterator[GlobalBatch]:
        host = self._from_workers() if self._num_workers else self._from_thread()
        return self._copied_ahead(host) if self._device.type == "cuda" else (b.to(self._device) for b in host)

    def close(self) -> None:
        """Stop the thread that prepares batches."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def _from_thread(self) -> Iterator[GlobalBatch]:
        self.close()
        self._thread = _Producer(self._batches, self._positions, pin=self._device.type == "cuda")
        return iter(self._thread)

    def _from_workers(self) -> Iterator[GlobalBatch]:
        with warnings.catch_warnings():
            # More workers than cores is the user's choice.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._positions,
                num_workers=self._num_workers,
                prefetch_factor=BATCHES_AHEAD,
                pin_memory=self._device.type == "cuda",
                # A fork would copy the threads' locks of this process in whatever state they are.
                multiprocessing_context="spawn",
            )
        return iter(loader)

    def _copied_ahead(self, host: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
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
            for tensor in (batch.tokens, batch.labels, batch.targets):
                tensor.record_stream(current)
            yield batch


class _Producer:
    """A thread that prepares a few batches ahead; an exception in it is raised where the batch is asked for."""

    def __init__(self, batches: _GlobalBatches, positions: range, *, pin: bool) -> None:
        self._batches = batches
        self._positions = positions
        self._pin = pin
        self._queue: queue.Queue[GlobalBatch | BaseException] = queue.Queue(BATCHES_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[GlobalBatch]:
        while not self._stopped.is_set():
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for first in self._positions:
                batch = self._batches[first]
                if not self._put(batch.pin_memory() if self._pin else batch):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: GlobalBatch | BaseException) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
