"""This rank's part of the global batches on the device, prepared ahead of the step that needs them.

The position in the data is the number of consumed samples and nothing else (`batching`), so a resumed run asks for the
same samples without any saved state. On a CUDA device batches are pinned and copied on a stream of their own, one step
ahead.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .batching import RankBatches, StepPart
from .data.samples import IGNORED_LABEL, Samples
from .errors import UserError

BATCHES_AHEAD = 2
"""Global batches that wait for their step."""


class MicroBatch(NamedTuple):
    """Samples that go through the model at once.

    Attributes:
        number: which micro batch of the global batch this is.
        tokens: int64 [samples, s].
        labels: int64 [samples, s].
        documents: int32 [samples, s], or None.
    """

    number: int
    tokens: Tensor
    labels: Tensor
    documents: Tensor | None


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """This rank's samples of one optimizer step.

    Attributes:
        numbers: which micro batches of the global batch these are.
        tokens: int64 [samples, s].
        labels: int64 [samples, s]; ignored positions hold `IGNORED_LABEL`.
        targets: fp32 scalar tensor, the number of labels of this rank that count; summed over the ranks it divides
            every micro batch's loss.
        documents: int32 [samples, s], the number of each token's document within its sample; None where documents are
            not kept apart.
    """

    numbers: tuple[int, ...]
    tokens: Tensor
    labels: Tensor
    targets: Tensor
    documents: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that travels to the device."""
        present = (self.tokens, self.labels, self.targets)
        return present if self.documents is None else (*present, self.documents)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The micro batches, in order."""
        parts = len(self.numbers)
        documents = (None,) * parts if self.documents is None else self.documents.chunk(parts)
        rows = zip(self.numbers, self.tokens.chunk(parts), self.labels.chunk(parts), documents, strict=True)
        return (MicroBatch(*row) for row in rows)

    def to(self, device: torch.device) -> GlobalBatch:
        """The batch on a device; a copy of a pinned batch to a CUDA device does not wait.

        Elsewhere it does: a copy to MPS that does not wait reads memory already given back (pytorch #189690).
        """
        free = device.type == "cuda"
        return GlobalBatch(self.numbers, *(tensor.to(device, non_blocking=free) for tensor in self.tensors))

    def pin_memory(self) -> GlobalBatch:
        """The batch in page-locked memory, from which the device copies without the host; DataLoader calls this too."""
        return GlobalBatch(self.numbers, *(tensor.pin_memory() for tensor in self.tensors))


class _GlobalBatches(Dataset[GlobalBatch]):
    """What a rank takes of a step, to its samples."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, part: StepPart) -> GlobalBatch:
        batches = [self.samples.batch(part.first + number * part.size, part.size) for number in part.numbers]
        tokens = torch.cat([batch.tokens for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        numbered = [batch.documents for batch in batches if batch.documents is not None]
        documents = torch.cat(numbered) if numbered else None
        return GlobalBatch(part.numbers, tokens, labels, (labels != IGNORED_LABEL).sum().to(torch.float32), documents)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A batch on its way from a loader worker: through a pipe, as bytes.

    Tensors would go through shared memory, of which containers have little, and a socket in the temporary directory,
    whose path may be too long for one; the worker would then lose them, and the run wait forever.
    """

    numbers: tuple[int, ...]
    arrays: tuple[np.ndarray, ...]

    def unpacked(self) -> GlobalBatch:
        """The batch."""
        return GlobalBatch(self.numbers, *(torch.from_numpy(array) for array in self.arrays))

    def pin_memory(self) -> GlobalBatch:
        """The batch in page-locked memory; the DataLoader's thread calls this."""
        return self.unpacked().pin_memory()


class _ToldBatches(Dataset[_Packed | UserError]):
    """The same in a loader worker, which hands over as a value what the user can mend.

    The DataLoader would raise it with the worker's traceback as its text.
    """

    def __init__(self, batches: _GlobalBatches) -> None:
        self._batches = batches

    def __getitem__(self, part: StepPart) -> _Packed | UserError:
        try:
            batch = self._batches[part]
            return _Packed(batch.numbers, tuple(tensor.numpy() for tensor in batch.tensors))
        except UserError as error:
            return error


class BatchFeed:
    """Endless global batches, in the order of the plan.

    Args:
        samples: the training samples.
        parts: what this rank takes of every step.
        device: where batches go.
        num_workers: processes that prepare batches; 0 prepares them in a thread.
    """

    def __init__(self, samples: Samples, parts: RankBatches, device: torch.device, num_workers: int = 0) -> None:
        self._batches = _GlobalBatches(samples)
        self._parts = parts
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
        self._thread = _Producer(self._batches, self._parts, pin=self._device.type == "cuda")
        return iter(self._thread)

    def _from_workers(self) -> Iterator[GlobalBatch]:
        with warnings.catch_warnings():
            # More workers than cores is the user's choice.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(
                _ToldBatches(self._batches),
                batch_size=None,
                sampler=self._parts,
                num_workers=self._num_workers,
                prefetch_factor=BATCHES_AHEAD,
                pin_memory=self._device.type == "cuda",
                # A fork would copy the threads' locks of this process in whatever state they are.
                multiprocessing_context="spawn",
                worker_init_fn=_heed_parent,
            )
        with _signals_held():
            return map(_raised, iter(loader))

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
            for tensor in batch.tensors:
                tensor.record_stream(current)
            yield batch


def _raised(item: GlobalBatch | _Packed | UserError) -> GlobalBatch:
    if isinstance(item, UserError):
        raise item
    return item.unpacked() if isinstance(item, _Packed) else item


_HELD = (signal.SIGINT, signal.SIGTERM) if hasattr(signal, "sigwaitinfo") else (signal.SIGINT,)
"""Signals that ask a run to stop. Ctrl-C and schedulers send them to all its processes, but the run needs its loader
workers until it has finished the step."""


@contextmanager
def _signals_held() -> Iterator[None]:
    """Start processes that never see `_HELD`: blocked signals stay blocked in them, from their first instruction."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # when started later it would end the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heed_parent(worker: int) -> None:
    """In a loader worker: end on a SIGTERM from the process that started it, and on nobody else's."""
    if signal.SIGTERM in _HELD and hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=_wait_for_order, args=(os.getppid(),), name="order", daemon=True).start()


def _wait_for_order(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)


class _Producer:
    """A thread that prepares a few batches ahead; an exception in it is raised where the batch is asked for."""

    def __init__(self, batches: _GlobalBatches, parts: RankBatches, *, pin: bool) -> None:
        self._batches = batches
        self._parts = parts
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
            for part in self._parts:
                batch = self._batches[part]
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
