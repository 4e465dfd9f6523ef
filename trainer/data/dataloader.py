"""Prefetching dataloader: the local micro batches of each global batch, on the device.

The data position depends on the number of consumed samples only (`batch_sampler.py`), so the dataloader has no state to
save. For CUDA devices batches are pinned and copied on a side stream, one step ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .batch_sampler import MicroBatchIndices, RankBatchSampler
from .dataloader_workers import WorkerPool
from .datasets.samples import IGNORE_INDEX, AnySamples, batch_tensors, concatenate_batches

PREFETCH_FACTOR = 2
"""Prefetched global batches."""

ShardFields = Callable[[dict[str, Tensor]], dict[str, Tensor]]


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
        """All tensors of the batch, `num_targets` last."""
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
        """Copy the batch to pinned memory."""
        return self._with(tensor.pin_memory() for tensor in self.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields as NumPy arrays, which a dataloader worker sends through a pipe.

        Tensors would be sent through shared memory, which is scarce in containers, and a socket in the temporary
        directory, whose path may exceed the length limit of sockets; then the batch is lost and the run hangs.
        """
        return _batch_from_arrays, (self.indices, {name: field.numpy() for name, field in self.fields.items()})


def _batch_from_arrays(indices: tuple[int, ...], arrays: dict[str, np.ndarray]) -> GlobalBatch:
    return GlobalBatch.from_fields(indices, {name: torch.from_numpy(array) for name, array in arrays.items()})


class _GlobalBatches:
    """Maps the micro batches of a step to their samples, or to this rank's tokens of these."""

    def __init__(self, samples: AnySamples, shard: ShardFields | None) -> None:
        self.samples = samples
        self.shard = shard

    def __call__(self, part: MicroBatchIndices) -> GlobalBatch:
        size = part.micro_batch_size
        batches = [self.samples.batch(part.first_sample + number * size, size) for number in part.indices]
        fields = batch_tensors(concatenate_batches(batches))
        return GlobalBatch.from_fields(part.indices, fields if self.shard is None else self.shard(fields))


class PrefetchingDataLoader:
    """Dataloader over an endless sequence of global batches.

    Args:
        device: device to copy batches to.
        num_workers: worker processes; 0 uses a thread.
        shard: returns this rank's tokens of the fields of a batch; None: all.
        report: logs a line when a worker that died is replaced.
    """

    def __init__(
        self,
        dataset: AnySamples,
        batch_sampler: RankBatchSampler,
        device: torch.device,
        num_workers: int = 0,
        report: Callable[[str], None] = print,
        shard: ShardFields | None = None,
    ) -> None:
        self._batches = _GlobalBatches(dataset, shard)
        self._parts = batch_sampler
        self._device = device
        self._num_workers = num_workers
        self._report = report
        self._pool: WorkerPool[MicroBatchIndices, GlobalBatch] | None = None
        self._thread: ThreadPoolExecutor | None = None

    def __iter__(self) -> Iterator[GlobalBatch]:
        self.close()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        host = self._prefetched(self._thread)
        return self._copy_ahead(host) if self._device.type == "cuda" else (b.to(self._device) for b in host)

    def close(self) -> None:
        """Stop the workers and the prefetch thread."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _prefetched(self, thread: ThreadPoolExecutor) -> Iterator[GlobalBatch]:
        """Yield the batches, prepared in the thread; an exception there is raised here."""
        if self._num_workers:
            self._pool = WorkerPool(self._batches, self._parts, self._num_workers, self._report)
        batches = iter(self._pool or map(self._batches, self._parts))
        ahead = deque(thread.submit(self._next, batches) for _ in range(PREFETCH_FACTOR))
        while True:
            batch = ahead.popleft().result()
            ahead.append(thread.submit(self._next, batches))
            yield batch

    def _next(self, batches: Iterator[GlobalBatch]) -> GlobalBatch:
        batch = next(batches)
        return batch.pin_memory() if self._device.type == "cuda" else batch

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
