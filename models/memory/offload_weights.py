"""Weight offloading: weights are in host memory between the forward and the backward of their layer.

Of L layers, the weights of the first N are offloaded. Those of layer i are freed on the device before layer i + L - N
runs (at the earliest, layer i + 2), and fetched one layer before the backward needs them. They then stay on the device
until the next forward: optimizer step, validation and checkpointing find them on the device, and each forward copies
the current weights, so the host copy is never stale. When the backward begins, all activations but none of these
weights are on the device.

A weight keeps its tensor, name and shape: its storage is resized to zero and back, as in FSDP2, so tensors saved by
autograd stay valid. Sources: ZeRO-Offload (arXiv 2101.06840) for the idea, and `cpu_offload` of TransformerEngine for
the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .host_copies import CopyEngine, bytes_of
from .offload_activations import MIN_OFFLOAD_BYTES


class WeightOffload:
    """Offload the weights of the first layers of a stack to host memory while they are not needed.

    Args:
        copies: copy engine of the stack's device; not that of its activations, whose queues would delay these copies.
        layers: all layers of the stack, with unsharded weights.
        num_offloaded: number of leading layers to offload; fewer than all.
        least_size: minimal bytes of an offloaded weight.

    Raises:
        ValueError: the weights are sharded.

    Attributes:
        copies: as given.
        sent_bytes: bytes copied to the host in one forward, and back in its backward.
    """

    def __init__(
        self,
        copies: CopyEngine,
        layers: Sequence[nn.Module],
        num_offloaded: int,
        *,
        least_size: int = MIN_OFFLOAD_BYTES,
    ) -> None:
        if any(type(parameter) is not nn.Parameter for layer in layers for parameter in layer.parameters()):
            raise ValueError(
                "`cpu_offloading_weights` (True) is not supported with sharded weights; use "
                "cpu_offloading_weights=false."
            )
        self.copies = copies
        self._layers = [
            [_Weight(parameter, copies) for parameter in layer.parameters() if parameter.nbytes >= least_size]
            for layer in layers[:num_offloaded]
        ]
        self._delay = max(
            2, len(layers) - num_offloaded
        )  # layers between the forward of a layer and freeing its weights
        self._num_freed = 0
        self.sent_bytes = sum(weight.size for layer in self._layers for weight in layer)

    def pre_forward(self, indices: range) -> None:
        """Make the weights of these layers, counted from 0, available on the device; call before their forward."""
        if indices.start == 0:
            self.copies.use_current_stream()
            self._num_freed = 0
        for weight in self._weights(indices):
            weight.ensure_on_device()

    def post_forward(self, indices: range, hidden: Tensor) -> None:
        """Start copying the weights of these layers to the host; call after their forward returned `hidden`."""
        for weight in self._weights(indices):
            weight.copy_to_host()
        num_freed = max(self._num_freed, min(indices.start, indices.stop - self._delay + 1))
        for weight in self._weights(range(self._num_freed, num_freed)):
            weight.free()
        self._num_freed = num_freed
        if hidden.requires_grad and indices.start - len(indices) < len(self._layers):
            hidden.register_hook(self._backward_hook(indices))

    def to_device(self) -> None:
        """Make all weights available on the device, also those that no backward has fetched."""
        for weight in self._weights(range(len(self._layers))):
            weight.ensure_on_device()

    def _weights(self, numbers: range) -> list[_Weight]:
        return [weight for layer in self._layers[numbers.start : numbers.stop] for weight in layer]

    def _backward_hook(self, numbers: range) -> Callable[[Tensor], None]:
        """Return a hook for when the backward reaches these layers: fetch their weights, prefetch those before."""

        def fetch(_: Tensor) -> None:
            for weight in self._weights(numbers):
                weight.prefetch()
            for weight in reversed(self._weights(range(max(numbers.start - len(numbers), 0), numbers.start))):
                weight.prefetch()
            for weight in self._weights(numbers):
                weight.ensure_on_device()

        return fetch


def find_weight_offloads(model: nn.Module) -> list[WeightOffload]:
    """Return the weight offloads of a model's stacks; call their `to_device` before an optimizer step."""
    found = (getattr(module, "weight_offload", None) for module in model.modules())
    return [offload for offload in found if isinstance(offload, WeightOffload)]


class _Weight:
    """Offloaded parameter, whose storage is empty while only the host has its value."""

    def __init__(self, parameter: nn.Parameter, copies: CopyEngine) -> None:
        self._storage = parameter.untyped_storage()
        self._copies = copies
        self._host: Tensor | None = None
        self._pending_copy: Any = None
        self._on_device = True
        self.size = self._storage.nbytes()
        self._memory = bytes_of(self._storage, 0, self.size)  # own version counter: autograd sees no in-place change

    def copy_to_host(self) -> None:
        """Start copying the current value to the host."""
        if self._host is None:
            self._host = self._copies.allocate_host(self.size)
        self._pending_copy = self._copies.copy_to_host(self._memory, self._host)

    def free(self) -> None:
        """Free the device memory, after the copy."""
        self._wait()
        self._copies.resize(self._storage, 0)
        self._on_device = False

    def prefetch(self) -> None:
        """Start copying the value back, unless it is on the device."""
        if not self._on_device:
            assert self._host is not None
            self._copies.resize(self._storage, self.size)
            self._on_device = True
            self._pending_copy = self._copies.copy_to_device(self._host, self._memory)

    def ensure_on_device(self) -> None:
        """Make the value available to work submitted from now on."""
        self.prefetch()
        self._wait()

    def _wait(self) -> None:
        if self._pending_copy is not None:
            self._copies.wait(self._pending_copy)
            self._pending_copy = None
