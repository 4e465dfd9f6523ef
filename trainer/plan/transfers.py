"""How long a step waits for copies between a GPU and its host: layers and link, played through in order.

The order is that of `models.offload` for activations, of `models.offload_weights` for weights. Activations go to the
host while their layer runs, weights when it has run; both have left some layers later, and begin to come back some
layers before the backward needs them. Layers that are recomputed together run, wait and copy as one. The link does one
copy after the other, each way by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from .timeline import PlacedLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Layers that run together: one, or a chunk.

    Attributes:
        numbers: of the layers.
        forward: seconds of their forward.
        backward: of their backward, and of what it recomputes.
        activations: of the copy of what they save, each way.
        weights: of the copies of the weights of each, each way.
    """

    numbers: range
    forward: float
    backward: float
    activations: float = 0.0
    weights: tuple[float, ...] = ()


def sent_by(layer: PlacedLayer) -> int:
    """Bytes that a layer sends to the host in its forward pass, as many as come back in its backward."""
    activations, weights = _sent(layer)
    return activations + weights


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
        chunk = stack[0].recompute.chunk
        runs: list[Run] = []
        for first in range(0, len(stack), chunk):
            members = stack[first : first + chunk]
            times, sent = [seconds(layer) for layer in members], [_sent(layer) for layer in members]
            runs.append(
                Run(
                    numbers=range(first, first + len(members)),
                    forward=sum(time[0] for time in times),
                    backward=sum(time[1] for time in times),
                    activations=sum(size[0] for size in sent) / link,
                    weights=tuple(size[1] / link for size in sent),
                )
            )
        total += waited(runs, len(stack) - offload.layers)
    return total


def waited(runs: Sequence[Run], away: int) -> float:
    """Seconds that a forward and a backward wait for copies.

    Args:
        runs: of a stack, in order.
        away: its layers that are not offloaded, L - N.
    """
    return _waited_forward(runs, away) + _waited_backward(runs, away)


def _sent(layer: PlacedLayer) -> tuple[int, int]:
    """Bytes of activations and of weights that a layer sends to the host."""
    offload = layer.offload
    if offload is None or layer.number >= offload.layers:
        return 0, 0
    activations = (layer.kept - layer.stays) * offload.activations
    return activations, layer.memory.parameters * layer.stack.widths.weights * offload.weights


def _activations_left(numbers: range, away: int) -> int:
    """The layers before this one have left before these run (`ForwardPass.layers`)."""
    return min(numbers.start, numbers.stop - away)


def _weights_left(numbers: range, away: int) -> int:
    """The weights of the layers before this one have left when these have run (`WeightOffload.after`)."""
    return min(numbers.start, numbers.stop - max(2, away) + 1)


class _Clock:
    """The time on the device, that at which a link will be free, and how long the device has waited."""

    def __init__(self) -> None:
        self.now = self.link = self.waited = 0.0

    def copied(self, seconds: float) -> float:
        """When a copy that may begin now has ended."""
        self.link = max(self.link, self.now) + seconds
        return self.link

    def wait_for(self, time: float) -> None:
        """Do nothing until then."""
        if time > self.now:
            self.waited += time - self.now
            self.now = time


class _Copies:
    """Copies of a kind one way, by the first layer they are of, in seconds."""

    def __init__(self, clock: _Clock, seconds: dict[int, float]) -> None:
        self._clock = clock
        self._to_begin = {number: each for number, each in seconds.items() if each}
        self._ends: dict[int, float] = {}

    def begin(self, numbers: Iterable[int]) -> None:
        """Those of these layers, in this order, that have not begun yet."""
        for number in numbers:
            if number in self._to_begin:
                self._ends[number] = self._clock.copied(self._to_begin.pop(number))

    def wait(self, numbers: Iterable[int]) -> None:
        """Until those of these layers that have begun have ended."""
        for number in numbers:
            self._clock.wait_for(self._ends.get(number, 0.0))


def _waited_forward(runs: Sequence[Run], away: int) -> float:
    clock = _Clock()
    activations, weights = _Copies(clock, _activations(runs)), _Copies(clock, _weights(runs))
    for run in runs:
        activations.wait(range(_activations_left(run.numbers, away)))
        activations.begin(run.numbers)
        clock.now += run.forward
        weights.begin(run.numbers)
        weights.wait(range(_weights_left(run.numbers, away)))
    return clock.waited


def _waited_backward(runs: Sequence[Run], away: int) -> float:
    clock, last = _Clock(), runs[-1].numbers
    left, weights_left = _activations_left(last, away), _weights_left(last, away)
    activations = _Copies(clock, {number: each for number, each in _activations(runs).items() if number < left})
    weights = _Copies(clock, {number: each for number, each in _weights(runs).items() if number < weights_left})
    ahead = max(1, away - 1, len(runs[0].numbers))
    for run in reversed(runs):
        first = run.numbers.start
        activations.begin(reversed(range(max(first - ahead, 0), last.stop)))
        weights.begin(run.numbers)
        weights.begin(reversed(range(max(first - len(run.numbers), 0), first)))
        activations.wait(run.numbers)
        weights.wait(run.numbers)
        clock.now += run.backward
    return clock.waited


def _activations(runs: Sequence[Run]) -> dict[int, float]:
    return {run.numbers.start: run.activations for run in runs}


def _weights(runs: Sequence[Run]) -> dict[int, float]:
    return {number: each for run in runs for number, each in zip(run.numbers, run.weights, strict=bool(run.weights))}
