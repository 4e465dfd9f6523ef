"""Optimizer state in host memory, streamed through the device bucket by bucket during an update.

While bucket i is updated, bucket i + 1 is fetched and bucket i - 1 is written back, each on a CUDA stream of its own:

    in       0  1  2  3  4
    compute     0  1  2  3  4
    out            0  1  2  3  4

The update runs on the device with the same kernels as without offloading, so results are bitwise identical. Device
memory for `NUM_SLOTS` buckets is allocated during the update only, when the memory of activations is free.

Source: ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857), where offloaded state is updated on the CPU instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...models.memory.host_copies import CopyEngine
from .state_buckets import NUM_SLOTS, Bucket, BucketPlan, TensorLocation

Update = Callable[[Bucket, list[dict[str, Tensor]]], None]
"""Updates a bucket: changes the states of its parameters, on the device, in place."""


class HostState:
    """State of all parameters in host memory.

    Args:
        plan: buckets and memory layout.
        copies: copy engine between host memory and the device.

    Attributes:
        plan: as given.
        memory: all host memory, uint8.
        tensors: views of the state in host memory by key, for each group and parameter; call `synchronize` before
            reading.
    """

    def __init__(self, plan: BucketPlan, copies: CopyEngine) -> None:
        self.plan = plan
        self._copies = copies
        self.memory = copies.allocate_host(plan.host_bytes)
        self.tensors = tuple(
            tuple({key: location.view(self.memory) for key, location in locations.items()} for locations in group)
            for group in plan.host_locations
        )

    def run(self, update: Update) -> None:
        """Update all buckets in order, without blocking the host.

        All state is back in host memory before device work submitted after this call runs.
        """
        copies, buckets = self._copies, self.plan.buckets
        copies.use_current_stream()
        slots = [copies.allocate_device(size) for size in self.plan.slot_bytes]
        fetches: dict[int, list[Any]] = {}
        write_backs: dict[int, list[Any]] = {}

        def wait(events: list[Any]) -> None:
            for event in events:
                copies.wait(event)

        def fetch(number: int) -> None:
            wait(write_backs.pop(number - NUM_SLOTS, []))  # then its slot is free
            fetches[number] = [
                copies.copy_to_device(host, memory)
                for host, memory in self._copy_views(buckets[number], slots[number % NUM_SLOTS])
            ]

        for number, bucket in enumerate(buckets):
            if number == 0:
                fetch(0)
            if number + 1 < len(buckets):
                fetch(number + 1)
            wait(fetches.pop(number))
            slot = slots[number % NUM_SLOTS]
            update(bucket, [_views(part.state, slot) for part in bucket.slices])
            write_backs[number] = [copies.copy_to_host(memory, host) for host, memory in self._copy_views(bucket, slot)]
        for events in write_backs.values():  # before the memory of the slots is freed
            wait(events)

    def synchronize(self) -> None:
        """Wait until host memory contains the results of all updates so far; call before reading it."""
        if self._copies.device.type == "cuda":
            torch.cuda.synchronize(self._copies.device)

    def _copy_views(self, bucket: Bucket, slot: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the host and device views of each transfer of a bucket."""
        return [
            (self.memory[host : host + size], slot[device : device + size]) for host, device, size in bucket.transfers
        ]


def _views(state: Mapping[str, TensorLocation], memory: Tensor) -> dict[str, Tensor]:
    return {key: location.view(memory) for key, location in state.items()}
