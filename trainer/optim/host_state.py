"""Optimizer state that lives in host memory and goes through the device during an update, bucket by bucket.

While bucket i is updated, bucket i + 1 comes and bucket i - 1 leaves, each on a lane of its own:

    in       0  1  2  3  4
    compute     0  1  2  3  4
    out            0  1  2  3  4

The update is the one without this, on the device by the same kernels, so its results are the same bits. Device memory
for `SLOTS` buckets is held during the update only, when that of the activations is free.

Source: Rajbhandari et al. 2021, arXiv 2104.07857 (state outside of the device, moved through it); there the update of
what does not fit is the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...models.memory.host_copies import Copies
from .state_buckets import SLOTS, Bucket, BucketPlan, Place

Update = Callable[[Bucket, list[dict[str, Tensor]]], None]
"""Updates a bucket: the states of its stretches, on the device, are changed in place."""


class HostState:
    """The state of all parameters, in host memory.

    Args:
        plan: what lies where, and what moves together.
        copies: between host memory and the device.

    Attributes:
        plan: the same.
        memory: all host memory, uint8.
        tensors: group, then parameter: its state in host memory, by key; whole, for checkpoints. To be read after
            `settle`.
    """

    def __init__(self, plan: BucketPlan, copies: Copies) -> None:
        self.plan = plan
        self._copies = copies
        self.memory = copies.host(plan.host_bytes)
        self.tensors = tuple(
            tuple({key: place.of(self.memory) for key, place in home.items()} for home in homes) for homes in plan.homes
        )

    def run(self, update: Update) -> None:
        """Have every bucket updated, in order; nothing here waits for the device.

        When the work that is submitted after this call runs, all state is in host memory again.
        """
        copies, buckets = self._copies, self.plan.buckets
        copies.begin()
        slots = [copies.new(size) for size in self.plan.slots]
        coming: dict[int, list[Any]] = {}
        leaving: dict[int, list[Any]] = {}

        def wait(marks: list[Any]) -> None:
            for mark in marks:
                copies.wait(mark)

        def fetch(number: int) -> None:
            wait(leaving.pop(number - SLOTS, []))  # then its slot is free
            coming[number] = [
                copies.fetch(host, memory) for host, memory in self._both_ends(buckets[number], slots[number % SLOTS])
            ]

        for number, bucket in enumerate(buckets):
            if number == 0:
                fetch(0)
            if number + 1 < len(buckets):
                fetch(number + 1)
            wait(coming.pop(number))
            slot = slots[number % SLOTS]
            update(bucket, [_views(stretch.state, slot) for stretch in bucket.stretches])
            leaving[number] = [copies.send(memory, host) for host, memory in self._both_ends(bucket, slot)]
        for marks in leaving.values():  # only then may others have the memory of the slots
            wait(marks)

    def settle(self) -> None:
        """Wait until host memory holds what the updates so far have made: for whoever reads it there."""
        if self._copies.device.type == "cuda":
            torch.cuda.synchronize(self._copies.device)

    def _both_ends(self, bucket: Bucket, slot: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(self.memory[host : host + size], slot[device : device + size]) for host, device, size in bucket.copies]


def _views(state: Mapping[str, Place], memory: Tensor) -> dict[str, Tensor]:
    return {key: place.of(memory) for key, place in state.items()}
