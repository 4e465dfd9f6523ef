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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..utils.errors import UserError
from .batch_sampler import RankBatches, StepPart
from .datasets.samples import IGNORED_LABEL, Batch
from .datasets.seq2seq import AnySamples, NamedTensors

BATCHES_AHEAD = 2
"""Global batches that wait for their step."""


def fields_of(batch: Batch | NamedTensors) -> NamedTensors:
    """The tensors of some samples by name; what they do not have is left out."""
    if isinstance(batch, Batch):
        return {name: tensor for name, tensor in batch._asdict().items() if tensor is not None}
    return batch


class MicroBatch(NamedTuple):
    """Samples that go through the model at once.

    Attributes:
        number: which micro batch of the global batch this is.
        fields: the tensors of the samples by name, as `batch_loss` of the model takes them.
    """

    number: int
    fields: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """This rank's samples of one optimizer step.

    Attributes:
        numbers: which micro batches of the global batch these are.
        fields: the tensors of the samples by name, [samples, ...]. `labels` is among them, int64; ignored positions
            hold `IGNORED_LABEL`.
        targets: fp32 scalar tensor, the number of labels of this rank that count; summed over the ranks it divides
            every micro batch's loss.
    """

    numbers: tuple[int, ...]
    fields: dict[str, Tensor]
    targets: Tensor

    @classmethod
    def of(cls, numbers: tuple[int, ...], fields: dict[str, Tensor]) -> GlobalBatch:
        """The batch of some samples, whose labels are counted."""
        return cls(numbers, fields, (fields["labels"] != IGNORED_LABEL).sum().to(torch.float32))

    @property
    def labels(self) -> Tensor:
        """What is to be predicted."""
        return self.fields["labels"]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that travels to the device."""
        return (*self.fields.values(), self.targets)

    def micro_batches(self) -> Iterator[MicroBatch]:
        """The micro batches, in order."""
        parts = [field.chunk(len(self.numbers)) for field in self.fields.values()]
        for number, *rows in zip(self.numbers, *parts, strict=True):
            yield MicroBatch(number, dict(zip(self.fields, rows, strict=True)))

    def _with(self, tensors: Iterable[Tensor]) -> GlobalBatch:
        """The batch with other `tensors`."""
        *fields, targets = tensors
        return GlobalBatch(self.numbers, dict(zip(self.fields, fields, strict=True)), targets)

    def to(self, device: torch.device) -> GlobalBatch:
        """The batch on a device; a copy of a pinned batch to a CUDA device does not wait.

        Elsewhere it does: a copy to MPS that does not wait reads memory already given back (pytorch #189690).
        """
        free = device.type == "cuda"
        return self._with(tensor.to(device, non_blocking=free) for tensor in self.tensors)

    def pin_memory(self) -> GlobalBatch:
        """The batch in page-locked memory, from which the device copies without the host; DataLoader calls this too."""
        return self._with(tensor.pin_memory() for tensor in self.tensors)


class _GlobalBatches(Dataset[GlobalBatch]):
    """What a rank takes of a step, to its samples."""

    def __init__(self, samples: AnySamples) -> None:
        self.samples = samples

    def __getitem__(self, part: StepPart) -> GlobalBatch:
        batches = [fields_of(self.samples.batch(part.first + n * part.size, part.size)) for n in part.numbers]
        fields = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        return GlobalBatch.of(part.numbers, fields)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A batch on its way from a loader worker: through a pipe, as bytes.

    Tensors would go through shared memory, of which containers have little, and a socket in the temporary directory,
    whose path may be too long for one; the worker would then lose them, and the run wait forever.
    """

    numbers: tuple[int, ...]
    arrays: dict[str, np.ndarray]

    def unpacked(self) -> GlobalBatch:
        """The batch."""
        return GlobalBatch.of(self.numbers, {name: torch.from_numpy(array) for name, array in self.arrays.items()})

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
            return _Packed(batch.numbers, {name: field.numpy() for name, field in batch.fields.items()})
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

    def __init__(self, samples: AnySamples, parts: RankBatches, device: torch.device, num_workers: int = 0) -> None:
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
