"""How long a step waits for copies between a GPU and its host: layers and link, played through in order.

The order is that of `models.offload` and `models.offload_weights`. Of L layers the first N are offloaded. A copy to the
host begins with its layer and has ended before layer i + L - N runs; one from the host begins when the backward reaches
layer i + L - N - 1 and has ended when it reaches layer i. The link does one copy after the other, each way by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from .moments import PlacedLayer


class LayerTime(NamedTuple):
    """Seconds of a layer: of its forward, of its backward, and of the copy of what it sends to the host."""

    forward: float
    backward: float
    copy: float


def sent_by(layer: PlacedLayer) -> int:
    """Bytes that a layer sends to the host in its forward pass, as many as come back in its backward."""
    offload = layer.offload
    if offload is None or layer.number >= offload.layers:
        return 0
    weights = layer.memory.parameters * layer.stack.widths.weights
    return (layer.kept - layer.stays) * offload.activations + weights * offload.weights


def waited_for_copies(
    layers: Sequence[PlacedLayer], seconds: Callable[[PlacedLayer], tuple[float, float]], link: float
) -> float:
    """Seconds that a micro batch waits in all.

    Args:
        layers: of all stacks, in order.
        seconds: what the forward and the backward of a layer take.
        link: bytes a second each way.
    """
    total = 0.0
    for _, group in groupby(layers, key=lambda layer: id(layer.stack)):
        stack = list(group)
        if (offload := stack[0].offload) is None:
            continue
        times = [LayerTime(*seconds(layer), sent_by(layer) / link) for layer in stack]
        away = len(stack) - offload.layers
        ahead = max(stack[0].recompute.chunk, away - 1)
        if not offload.activations:
            away, ahead = max(2, away), 1
        total += waited_in_forward(times, away) + waited_in_backward(times, ahead)
    return total


def waited_in_forward(layers: Sequence[LayerTime], away: int) -> float:
    """Seconds.

    Args:
        layers: of a stack, in order.
        away: how many layers later what a layer sends has left the device.
    """
    now = link = waited = 0.0
    left: list[float] = []
    for number, layer in enumerate(layers):
        if number >= away and left[number - away] > now:
            waited += left[number - away] - now
            now = left[number - away]
        if layer.copy:
            link = max(link, now) + layer.copy
        now += layer.forward
        left.append(max(link, now) if layer.copy else 0.0)
    return waited


def waited_in_backward(layers: Sequence[LayerTime], ahead: int) -> float:
    """Seconds.

    Args:
        layers: of a stack, in order.
        ahead: how many layers earlier what a layer needs begins to come back.
    """
    now = link = waited = 0.0
    there = [0.0] * len(layers)
    coming = len(layers)
    for number in reversed(range(len(layers))):
        first = max(number - ahead, 0)
        for each in reversed(range(first, coming)):
            if layers[each].copy:
                there[each] = link = max(link, now) + layers[each].copy
        coming = min(coming, first)
        if there[number] > now:
            waited += there[number] - now
            now = there[number]
        now += layers[number].backward
    return waited
