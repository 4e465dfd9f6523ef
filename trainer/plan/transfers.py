"""Simulate CPU offloading to find how long a step stalls on copies between the GPU and its host.

The schedule is that of `models/memory/offload_activations.py` and `models/memory/offload_weights.py`. Activations are
copied to the host while their layer runs, weights after it; both must have been copied some layers later, and are
prefetched some layers before the backward pass needs them. Layers of a recomputed chunk run, wait and copy as one. The
link does one copy at a time in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from .layers import LayerInStack


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChunk:
    """Layers that run as one: a single layer, or a recomputed chunk. All times are in seconds.

    Attributes:
        layers: indices of the layers.
        forward: time of the forward pass.
        backward: time of the backward pass with recomputation.
        activations: time of the copy of all saved activations, in one direction.
        weights: time of the copy of the weights of each layer, in one direction.
    """

    layers: range
    forward: float
    backward: float
    activations: float = 0.0
    weights: tuple[float, ...] = ()


def offloaded_bytes(layer: LayerInStack) -> int:
    """Bytes of a layer copied to the host in its forward pass; as many are copied back in its backward pass."""
    activations, weights = _offloaded_bytes(layer)
    return activations + weights


def offload_stall_seconds(
    layers: Sequence[LayerInStack], layer_seconds: Callable[[LayerInStack], tuple[float, float]], link_bandwidth: float
) -> float:
    """Return the seconds a micro batch stalls on copies over a link with this bandwidth in each direction.

    `layers` are those of all stacks in forward order; `layer_seconds` returns a layer's forward and backward time.
    """
    total = 0.0
    for _, group in groupby(layers, key=lambda layer: id(layer.stack)):
        stack = list(group)
        if (offload := stack[0].offload) is None:
            continue
        chunk_size = stack[0].recompute.chunk
        chunks: list[LayerChunk] = []
        for first in range(0, len(stack), chunk_size):
            members = stack[first : first + chunk_size]
            times, sizes = [layer_seconds(layer) for layer in members], [_offloaded_bytes(layer) for layer in members]
            chunks.append(
                LayerChunk(
                    layers=range(first, first + len(members)),
                    forward=sum(time[0] for time in times),
                    backward=sum(time[1] for time in times),
                    activations=sum(size[0] for size in sizes) / link_bandwidth,
                    weights=tuple(size[1] / link_bandwidth for size in sizes),
                )
            )
        total += stall_seconds(chunks, len(stack) - offload.layers)
    return total


def stall_seconds(chunks: Sequence[LayerChunk], num_resident: int) -> float:
    """Return the seconds a stack of these chunks stalls on copies if `num_resident` layers are not offloaded."""
    return _forward_stall(chunks, num_resident) + _backward_stall(chunks, num_resident)


def _offloaded_bytes(layer: LayerInStack) -> tuple[int, int]:
    """Bytes of activations and of weights that a layer offloads."""
    offload = layer.offload
    if offload is None or layer.index >= offload.layers:
        return 0, 0
    activations = (layer.saved_bytes - layer.not_offloaded_bytes) * offload.activations
    return activations, layer.memory.num_parameters * layer.stack.widths.weights * offload.weights


def _first_activations_on_device(numbers: range, num_resident: int) -> int:
    """Index of the first layer whose activations are still on the device when `numbers` run
    (`ForwardPass.offload_saved_tensors`).
    """
    return min(numbers.start, numbers.stop - num_resident)


def _first_weights_on_device(numbers: range, num_resident: int) -> int:
    """Index of the first layer whose weights are still on the device after `numbers` ran
    (`WeightOffload.post_forward`).
    """
    return min(numbers.start, numbers.stop - max(2, num_resident) + 1)


class _Clock:
    """Simulated time of the device, time at which the link is free, and total time the device has stalled."""

    def __init__(self) -> None:
        self.now = self.link_free = self.stalled = 0.0

    def copy(self, seconds: float) -> float:
        """Queue a copy on the link and return the time at which it ends."""
        self.link_free = max(self.link_free, self.now) + seconds
        return self.link_free

    def wait_until(self, time: float) -> None:
        """Stall the device until `time`."""
        if time > self.now:
            self.stalled += time - self.now
            self.now = time


class _Copies:
    """Copies of activations or weights in one direction.

    Args:
        clock: simulated time.
        seconds: time of each copy, by the index of its (first) layer.
    """

    def __init__(self, clock: _Clock, seconds: dict[int, float]) -> None:
        self._clock = clock
        self._pending = {number: each for number, each in seconds.items() if each}
        self._ends: dict[int, float] = {}

    def start(self, numbers: Iterable[int]) -> None:
        """Start the pending copies of these layers, in this order."""
        for number in numbers:
            if number in self._pending:
                self._ends[number] = self._clock.copy(self._pending.pop(number))

    def wait(self, numbers: Iterable[int]) -> None:
        """Wait for the started copies of these layers."""
        for number in numbers:
            self._clock.wait_until(self._ends.get(number, 0.0))


def _forward_stall(chunks: Sequence[LayerChunk], num_resident: int) -> float:
    clock = _Clock()
    activations, weights = _Copies(clock, _activation_times(chunks)), _Copies(clock, _weight_times(chunks))
    for chunk in chunks:
        activations.wait(range(_first_activations_on_device(chunk.layers, num_resident)))
        activations.start(chunk.layers)
        clock.now += chunk.forward
        weights.start(chunk.layers)
        weights.wait(range(_first_weights_on_device(chunk.layers, num_resident)))
    return clock.stalled


def _backward_stall(chunks: Sequence[LayerChunk], num_resident: int) -> float:
    clock, last = _Clock(), chunks[-1].layers
    # only layers that the forward pass has offloaded by its end are copied back
    activation_end = _first_activations_on_device(last, num_resident)
    weight_end = _first_weights_on_device(last, num_resident)
    activations = _Copies(clock, {at: time for at, time in _activation_times(chunks).items() if at < activation_end})
    weights = _Copies(clock, {at: time for at, time in _weight_times(chunks).items() if at < weight_end})
    prefetch = max(1, num_resident - 1, len(chunks[0].layers))
    for chunk in reversed(chunks):
        first = chunk.layers.start
        activations.start(reversed(range(max(first - prefetch, 0), last.stop)))
        weights.start(chunk.layers)
        weights.start(reversed(range(max(first - len(chunk.layers), 0), first)))
        activations.wait(chunk.layers)
        weights.wait(chunk.layers)
        clock.now += chunk.backward
    return clock.stalled


def _activation_times(chunks: Sequence[LayerChunk]) -> dict[int, float]:
    return {chunk.layers.start: chunk.activations for chunk in chunks}


def _weight_times(chunks: Sequence[LayerChunk]) -> dict[int, float]:
    return {
        number: each
        for chunk in chunks
        for number, each in zip(chunk.layers, chunk.weights, strict=bool(chunk.weights))
    }
