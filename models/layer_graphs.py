"""CUDA graphs of layers, between which gradients are reduced and tokens are exchanged as without them.

A micro batch whose gradients are reduced over ranks beside its backward pass cannot be captured as a whole: hooks of
autograd start the reductions, and the copies of some are counted. Nor can one that sends tokens to experts of other
ranks: how many come is known only when all have been routed. But a small model on a slow host waits for its launches.
So each layer is captured by itself, forward and backward, as far as its shapes are fixed: all of it, or all up to its
experts. A replay is one launch, and autograd sees a function of the layer's inputs and parameters. The graphs hold what
ranks that share a layer or its tokens send each other. Where several micro batches are in flight, as in a pipeline,
each has graphs and memory of its own, which later ones use again.

Like `torch.cuda.make_graphed_callables`, but without its copies and its memory for each layer: results of a layer are
read by the next one where they are, inputs that layers have in common (rotary tables, a learned bias, the output of an
encoder) are copied once and their gradients are summed in place, and the gradients of the residual stream share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

WARM_UP_MICRO_BATCHES = 3
"""Eager micro batches before capture: they compile and autotune the kernels, which is not possible during capture."""


class Graph(Protocol):
    """A CUDA graph, or a substitute for it in tests."""

    def replay(self) -> None:
        """Run what was captured, asynchronously."""
        ...


Capture = Callable[[Callable[[], list[Tensor]]], tuple[Graph, list[Tensor]]]
"""Captures what a function launches; returns the graph and the tensors of the function, which each replay writes. All
graphs of a function have memory in common; those of one shape are replayed in the order of their capture."""


class LayerPart(NamedTuple):
    """Part of a layer that is captured.

    Attributes:
        run: function of tuples of tensors and of constants, the residual stream first; it returns likewise.
        parameters: returns the parameters that it uses.
        whole_weights: returns a context in which it has these where later passes have them.
    """

    run: Callable[..., Any]
    parameters: Callable[[], list[nn.Parameter]]
    whole_weights: Callable[[], AbstractContextManager[None]] = nullcontext


class _Place(NamedTuple):
    """Where a tensor is among arguments or results whose other values are constants."""

    number: int


class _Source(NamedTuple):
    """Argument or result of the layer before."""

    kind: Literal["argument", "result"]
    number: int


class _Input(NamedTuple):
    """A tensor among the arguments of a part; `source` is None for one that is new."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    source: _Source | None


class _Arguments(NamedTuple):
    """Arguments of a part: `leaves` are constants, and places of the `inputs`."""

    structure: TreeSpec
    leaves: list[Any]
    inputs: list[_Input]

    @property
    def key(self) -> Any:
        """Key of the graphs: arguments with equal ones have the same."""
        return str(self.structure), tuple(self.leaves), tuple(self.inputs)


class _Buffer:
    """Static buffer of an input.

    Attributes:
        tensor: the buffer.
        users: numbers of the layers that read it.
        gradient: sum of the gradients of several users; None for one.
    """

    def __init__(self, given: _Input, result: Tensor | None) -> None:
        self._is_result = result is not None
        if result is None:
            # compiled layers depend on the strides
            result = torch.empty_strided(given.shape, given.strides, dtype=given.dtype, device=given.device).zero_()
        self.tensor = result.detach().requires_grad_(given.requires_grad)
        self.users: list[int] = []
        self.gradient: Tensor | None = None
        self._adds_first: int | None = None
        self._copied: tuple[Tensor, int] | None = None

    def copy_(self, tensor: Tensor) -> None:
        """Copy a tensor, unless it is there already."""
        if tensor.data_ptr() == self.tensor.data_ptr():
            return
        if self._is_result:
            raise RuntimeError("the output of a layer with a CUDA graph was replaced before the next layer")
        if self._copied is None or self._copied[0] is not tensor or self._copied[1] != tensor._version:
            self.tensor.copy_(tensor)
            # an activation would be kept alive
            self._copied = (tensor, tensor._version) if len(self.users) > 1 or not tensor.requires_grad else None

    def add_gradient(self, gradient: Tensor, user: int) -> None:
        """Add the gradient of a user, the last of them first."""
        if self.gradient is None:
            self.gradient, self._adds_first = torch.empty_like(gradient), user
        if user == self._adds_first:
            self.gradient.copy_(gradient)
        else:
            self.gradient.add_(gradient)


class _CapturedPart:
    """Graphs of a part of a layer, and their static buffers."""

    def __init__(self, number: int, part: LayerPart, arguments: _Arguments, buffers: list[_Buffer]) -> None:
        self.number = number
        self.buffers = buffers
        self.results: list[Tensor] = []
        self.passes = 0
        self.forward: Any = None
        self.parameters: list[nn.Parameter] = []
        self._part = part
        self._arguments = arguments
        self._differentiable = [each for each in buffers if each.tensor.requires_grad]
        self._structure: Any = None
        self._leaves: list[Any] = []
        self._live: list[Tensor] = []
        self._given: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._backward: Any = None

    def capture_forward(self, capture: Capture) -> None:
        """Capture the forward pass."""
        tensors = [each.tensor for each in self.buffers]
        leaves = [tensors[each.number] if isinstance(each, _Place) else each for each in self._arguments.leaves]

        def run() -> list[Tensor]:
            found, self._structure = tree_flatten(self._part.run(*tree_unflatten(leaves, self._arguments.structure)))
            self._leaves, self._live = _take_tensors(found)
            return self._live

        with self._part.whole_weights():
            self.parameters = [each for each in self._part.parameters() if each.requires_grad]
            self.forward, found = capture(run)
        self.results = [each.detach().requires_grad_(each.requires_grad) for each in found]

    def capture_backward(self, capture: Capture, memory: Callable[[int, Tensor], Tensor]) -> None:
        """Capture the backward pass; `memory` returns memory that all layers share, by number, like a tensor."""
        self._given = [memory(number, each) for number, each in enumerate(x for x in self.results if x.requires_grad)]
        if not self._given:  # nothing up to here is trained
            return
        inputs = len(self._differentiable)
        memory(0, self.buffers[0].tensor)  # allocated before capture, whose memory is that of one pass in flight
        known: list[bool] = []

        def run() -> list[Tensor]:
            results, self._live = [each for each in self._live if each.requires_grad], []
            wanted = [*(each.tensor for each in self._differentiable), *self.parameters]
            # it is captured within a forward pass, but a backward pass begins when autocast has ended; hooks of
            # parameters run after each replay
            with torch.autocast(results[0].device.type, enabled=False), _without_hooks(self.parameters):
                found: list[Tensor | None] = [*torch.autograd.grad(results, wanted, self._given, allow_unused=True)]
            for number, (buffer, gradient) in enumerate(zip(self._differentiable, found[:inputs], strict=True)):
                if len(buffer.users) > 1:
                    if gradient is not None:
                        buffer.add_gradient(gradient, self.number)
                    found[number] = buffer.gradient if self.number == buffer.users[0] else None
                elif gradient is not None and buffer is self.buffers[0]:
                    # of the residual stream: where the layer before expects it
                    found[number] = memory(0, gradient).copy_(gradient)
            known[:] = [each is not None for each in found]
            return [each for each in found if each is not None]

        self._backward, found = capture(run)
        gradients = iter(found)
        self._gradients = [next(gradients) if each else None for each in known]

    def keep_gradients(self) -> None:
        """Copy gradients of earlier passes out of memory that replays overwrite."""
        for parameter, gradient in zip(self.parameters, self._gradients[len(self._differentiable) :], strict=True):
            held = parameter.grad
            if held is not None and gradient is not None and held.data_ptr() == gradient.data_ptr():
                parameter.grad = held.clone()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run the part on the tensors among its arguments."""
        with torch.no_grad():
            for buffer, tensor in zip(self.buffers, tensors, strict=True):
                buffer.copy_(tensor)
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        results = _Replay.apply(self, *differentiable, *self.parameters)
        leaves = [results[each.number] if isinstance(each, _Place) else each for each in self._leaves]
        return tree_unflatten(leaves, self._structure)

    def run_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of inputs and parameters, from those of the results."""
        given = (gradient for gradient, each in zip(gradients, self.results, strict=True) if each.requires_grad)
        for buffer, gradient in zip(self._given, given, strict=True):
            if gradient is None:
                buffer.zero_()
            elif gradient.data_ptr() != buffer.data_ptr():
                buffer.copy_(gradient)
        self._backward.replay()
        return [None if each is None else each.detach() for each in self._gradients]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _CapturedPart, *tensors: Tensor) -> tuple[Tensor, ...]:
        captured.passes += 1
        ctx.captured, ctx.number = captured, captured.passes
        captured.forward.replay()
        results = tuple(each.detach() for each in captured.results)
        pairs = zip(results, captured.results, strict=True)
        ctx.mark_non_differentiable(*(result for result, each in pairs if not each.requires_grad))
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        captured: _CapturedPart = ctx.captured
        if ctx.number != captured.passes:
            raise RuntimeError("a layer with a CUDA graph ran again before this backward pass of it")
        return None, *captured.run_backward(gradients)


class LayerGraphs:
    """Runs consecutive layers in training, by CUDA graphs from a forward pass on that comes after three of its shapes,
    and while no other one waits for its backward pass.

    Each forward pass must be followed by its backward pass, of all layers, and these must come in the same order.

    Args:
        parts: of each layer, in the order in which they run.
        captures: see `Capture`; one for each forward pass that can wait for its backward pass at a time.
        on_failure: called with the error if capture fails; if it returns, all passes are eager from then on.
    """

    def __init__(
        self, parts: Sequence[LayerPart], captures: Sequence[Capture], on_failure: Callable[[Exception], None]
    ) -> None:
        self._parts = list(parts)
        self._captures = list(captures)
        self._on_failure = on_failure
        self._is_eager = False
        self._passes = self._in_flight = 0
        self._captured: dict[Any, list[list[_CapturedPart]]] = {}
        self._current: list[_CapturedPart] | None = None
        self._seen: dict[Any, int] = {}
        self._arguments: list[_Arguments] = []
        self._before: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._memory: dict[Any, Tensor] = {}

    def run(self, number: int, *arguments: Any) -> Any:
        """Run the part of a layer, counted from 0."""
        found, structure = tree_flatten(arguments)
        leaves, tensors = _take_tensors(found)
        if number == 0:
            self._before = [], []
            self._begin(_Arguments(structure, leaves, self._describe(tensors)))
        is_last = number + 1 == len(self._parts)
        if self._current is not None:
            results = self._current[number](tensors)
        else:
            results = self._parts[number].run(*arguments)
            if not self._is_eager:
                self._arguments.append(_Arguments(structure, leaves, self._describe(tensors)))
                self._before = ([], []) if is_last else (tensors, _tensors_in(results))
        if is_last and len(self._captures) > 1:
            self._count_pass(_tensors_in(results))
        return results

    def _count_pass(self, results: Sequence[Tensor]) -> None:
        """Count a forward pass, which has come to its last layer, as in flight up to its backward pass."""

        def end(gradient: Tensor) -> None:
            self._in_flight -= 1

        result = next((each for each in results if each.requires_grad), None)
        if result is not None:
            self._in_flight += 1
            result.register_hook(end)

    def release(self) -> None:
        """Free the graphs; all passes are eager from then on."""
        self._is_eager = True
        self._current = None
        self._captured.clear()
        self._memory.clear()

    def _describe(self, tensors: Sequence[Tensor]) -> list[_Input]:
        """Describe arguments of a layer, with those that the layer before has had or returned."""
        arguments, results = self._before
        found: list[_Input] = []
        for number, tensor in enumerate(tensors):
            source = None
            if number < len(arguments) and _is_same(arguments[number], tensor):
                source = _Source("argument", number)
            for place, result in enumerate(results):
                source = _Source("result", place) if _is_same(result, tensor) else source
            strides = tensor.stride() if 0 not in tensor.stride() else torch.empty(tensor.shape, device="meta").stride()
            found.append(_Input(tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, source))
        return found

    def _begin(self, given: _Arguments) -> None:
        """Choose the graphs of a forward pass whose first layer has these arguments; capture them if it is time."""
        key = given.key, torch.is_autocast_enabled()
        place, self._passes = self._passes % len(self._captures), self._passes + 1
        before, self._arguments = self._arguments, []
        if key not in self._captured and not self._is_eager:
            self._seen[key] = self._seen.get(key, 0) + 1
            is_like_before = len(before) == len(self._parts) and before[0].key == given.key
            # a pass in flight keeps autograd's nodes of the parameters, and with them the stream that is not captured
            if is_like_before and not self._in_flight and self._seen[key] > WARM_UP_MICRO_BATCHES:
                self._add(key, before)
        found = self._captured.get(key)
        self._current = None if found is None else found[place]
        if found is not None:  # all graphs of a place have memory in common, those of other shapes too
            for part in chain.from_iterable(each[place] for each in self._captured.values()):
                part.keep_gradients()

    def _add(self, key: Any, arguments: Sequence[_Arguments]) -> None:
        """Capture all layers, whose arguments were these in the pass before, once for each pass in flight."""
        try:
            self._captured[key] = [self._capture_parts(arguments, capture) for capture in self._captures]
        except Exception as error:
            self.release()
            self._on_failure(error)
        finally:
            torch.clear_autocast_cache()

    def _capture_parts(self, arguments: Sequence[_Arguments], capture: Capture) -> list[_CapturedPart]:
        found: list[_CapturedPart] = []
        for number, (part, given) in enumerate(zip(self._parts, arguments, strict=True)):
            buffers = [_buffer(each, found[-1] if found else None) for each in given.inputs]
            for each in buffers:
                each.users.append(number)
            # a cast that autocast keeps would be in the first graph alone, and keep autograd's nodes on the stream of
            # its capture; to switch the cache off would compile the layers again, in the capture
            torch.clear_autocast_cache()
            found.append(_CapturedPart(number, part, given, buffers))
            found[-1].capture_forward(capture)
        for captured in reversed(found):
            captured.capture_backward(capture, self._shared_memory)
        return found

    def _shared_memory(self, number: int, like: Tensor) -> Tensor:
        key = number, like.shape, like.dtype
        if key not in self._memory:
            self._memory[key] = torch.zeros_like(like, requires_grad=False)  # finite: tests compute with it at capture
        return self._memory[key]


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which `torch.autograd.grad` does not run the hooks of parameters on their gradients."""
    hooks = [each._backward_hooks for each in parameters]
    for each in parameters:
        each._backward_hooks = None
    try:
        yield
    finally:
        for each, held in zip(parameters, hooks, strict=True):
            each._backward_hooks = held


def _buffer(given: _Input, before: _CapturedPart | None) -> _Buffer:
    """Return the buffer of an input, given the layer before."""
    if given.source is None or before is None:
        return _Buffer(given, None)
    if given.source.kind == "argument":
        return before.buffers[given.source.number]
    return _Buffer(given, before.results[given.source.number])


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return True for the same values in memory: hooks of FSDP2 make other tensors of what they pass on."""
    if tensor is other:
        return True
    same = tensor.shape == other.shape and tensor.stride() == other.stride() and tensor.dtype == other.dtype
    return same and tensor.numel() > 0 and tensor.data_ptr() == other.data_ptr()


def _tensors_in(results: Any) -> list[Tensor]:
    return _take_tensors(tree_flatten(results)[0])[1]


def _take_tensors(leaves: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Return leaves with places instead of tensors, and the tensors; a tensor that is there twice has one place, since
    compiled layers depend on that.
    """
    tensors: list[Tensor] = []
    places: dict[int, _Place] = {}
    others: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if id(leaf) not in places:
                places[id(leaf)] = _Place(len(tensors))
                tensors.append(leaf)
            others.append(places[id(leaf)])
        else:
            others.append(leaf)
    return others, tensors
