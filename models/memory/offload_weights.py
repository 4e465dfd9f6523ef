"""Weights in host memory between the forward and the backward of their layer.

Of L layers the weights of the first N go to the host. Those of layer i leave the device before layer i + L - N runs (at
the earliest, layer i + 2), and come back one layer before the backward needs them. They stay from there to the next
forward: the update, a validation and a checkpoint find them where they always are, and a forward sends what it finds,
so the host copy is never older than the weights that were used. When the backward begins, all activations and none of
these weights are on the device.

A weight keeps its tensor, name and shape: its storage is emptied and filled again, as FSDP2 does, so what autograd has
saved of it stays valid. Sources: ZeRO-Offload (arXiv 2101.06840) for the idea, and `cpu_offload` of TransformerEngine
for the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .host_copies import Copies, bytes_of
from .offload_activations import LEAST_SIZE


class WeightOffload:
    """Keeps the weights of the first layers of a stack in host memory while they are not needed.

    Args:
        copies: of the device of the stack; not those of its activations, whose queues would delay these.
        layers: all layers of the stack, whose weights are whole.
        offloaded: the first so many of them; fewer than all.
        least_size: bytes below which a weight stays.

    Raises:
        ValueError: the weights are cut over processes.

    Attributes:
        copies: as given.
        sent_bytes: bytes of all copies to the host in one forward, as many as come back in its backward.
    """

    def __init__(
        self, copies: Copies, layers: Sequence[nn.Module], offloaded: int, *, least_size: int = LEAST_SIZE
    ) -> None:
        if any(type(parameter) is not nn.Parameter for layer in layers for parameter in layer.parameters()):
            raise ValueError(
                "`cpu_offloading_weights` (True) needs whole weights, but these are cut over processes; use "
                "cpu_offloading_weights=false."
            )
        self.copies = copies
        self._layers = [
            [_Weight(parameter, copies) for parameter in layer.parameters() if parameter.nbytes >= least_size]
            for layer in layers[:offloaded]
        ]
        self._away = max(2, len(layers) - offloaded)
        self._left = 0
        self.sent_bytes = sum(weight.size for layer in self._layers for weight in layer)

    def before(self, numbers: range) -> None:
        """Layers with these numbers, counted from 0, are about to run forward: their weights are on the device."""
        if numbers.start == 0:
            self.copies.begin()
            self._left = 0
        for weight in self._weights(numbers):
            weight.be_there()

    def after(self, numbers: range, hidden: Tensor) -> None:
        """These layers have run in training and given `hidden`: their weights are on their way."""
        for weight in self._weights(numbers):
            weight.send()
        leaving = max(self._left, min(numbers.start, numbers.stop - self._away + 1))
        for weight in self._weights(range(self._left, leaving)):
            weight.leave()
        self._left = leaving
        if hidden.requires_grad and numbers.start - len(numbers) < len(self._layers):
            hidden.register_hook(self._coming_back(numbers))

    def to_device(self) -> None:
        """All weights are on the device, also those that no backward has asked for."""
        for weight in self._weights(range(len(self._layers))):
            weight.be_there()

    def _weights(self, numbers: range) -> list[_Weight]:
        return [weight for layer in self._layers[numbers.start : numbers.stop] for weight in layer]

    def _coming_back(self, numbers: range) -> Callable[[Tensor], None]:
        """What happens when the backward reaches these layers: theirs are there, those before them are on their way."""

        def come_back(_: Tensor) -> None:
            for weight in self._weights(numbers):
                weight.come_back()
            for weight in reversed(self._weights(range(max(numbers.start - len(numbers), 0), numbers.start))):
                weight.come_back()
            for weight in self._weights(numbers):
                weight.be_there()

        return come_back


def weight_offloads(model: nn.Module) -> list[WeightOffload]:
    """Those of the stacks of a model; before an update, `to_device` brings the weights that no backward asked for."""
    found = (getattr(part, "weight_offload", None) for part in model.modules())
    return [offload for offload in found if isinstance(offload, WeightOffload)]


class _Weight:
    """One parameter, whose storage is empty while it is on the host alone."""

    def __init__(self, parameter: nn.Parameter, copies: Copies) -> None:
        self._storage = parameter.untyped_storage()
        self._copies = copies
        self._host: Tensor | None = None
        self._copying: Any = None
        self._is_there = True
        self.size = self._storage.nbytes()
        self._memory = bytes_of(self._storage, 0, self.size)  # to copy into it is no change that autograd sees

    def send(self) -> None:
        """Begin to copy it to the host, as it is now."""
        if self._host is None:
            self._host = self._copies.host(self.size)
        self._copying = self._copies.send(self._memory, self._host)

    def leave(self) -> None:
        """Give up the memory of the device."""
        self._wait()
        self._copies.resize(self._storage, 0)
        self._is_there = False

    def come_back(self) -> None:
        """Begin to fetch it, where it is not on the device."""
        if not self._is_there:
            assert self._host is not None
            self._copies.resize(self._storage, self.size)
            self._is_there = True
            self._copying = self._copies.fetch(self._host, self._memory)

    def be_there(self) -> None:
        """On the device, for work that is submitted from now on."""
        self.come_back()
        self._wait()

    def _wait(self) -> None:
        if self._copying is not None:
            self._copies.wait(self._copying)
            self._copying = None
