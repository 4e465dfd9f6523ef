"""CUDA graphs of micro batches: forward and backward are captured once, then replayed with one launch.

Small models are bound by kernel launches: T5 base launches 1,600 kernels a step. The optimizer step is not captured, as
its scalars change. Inputs are copied to static buffers, and every replay writes the gradients to the same addresses.

What several processes do between the layers cannot be captured: there each layer is, see `models.layer_graphs`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...models.layer_graphs import WARM_UP_MICRO_BATCHES, Capture
from ..utils.errors import UserError
from ..utils.host_memory import is_out_of_memory
from ..utils.text import one_line

Result = TypeVar("Result")
Fields = Mapping[str, Tensor]
RunMicroBatch = Callable[[Fields, Tensor], Tensor]


class CapturedGraph(NamedTuple):
    """A captured micro batch.

    Attributes:
        fields: static input buffers by name.
        denominator: static buffer of the loss denominator.
        replay: launch the graph, asynchronously.
        loss: output buffer of the loss.
        gradients: output buffers of the parameters' gradients, None for parameters without one.
    """

    fields: dict[str, Tensor]
    denominator: Tensor
    replay: Callable[[], None]
    loss: Tensor
    gradients: list[Tensor | None]


def capture(run: RunMicroBatch, fields: Fields, denominator: Tensor, parameters: list[nn.Parameter]) -> CapturedGraph:
    """Capture a micro batch as a CUDA graph; nothing runs during capture, so `.grad` is unchanged.

    Raises:
        UserError: an operation in it cannot be captured.
        RuntimeError: out of memory, see `utils.host_memory.is_out_of_memory`.
    """
    own_fields, own_denominator = {name: field.clone() for name, field in fields.items()}, denominator.clone()
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # so that backward allocates it in the graph's memory pool instead of accumulating
    try:
        graph, loss = _capture_graph(lambda: run(own_fields, own_denominator), torch.cuda.graph_pool_handle())
        gradients = [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    return CapturedGraph(own_fields, own_denominator, graph.replay, loss, gradients)


def layer_capture() -> Capture:
    """Return a function that captures graphs of layers, see `models.layer_graphs`; it raises what `capture` does."""
    pool = torch.cuda.graph_pool_handle()
    return lambda run: _capture_graph(run, pool)


def _capture_graph(run: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture what a function launches as a graph with memory of this pool."""
    graph = torch.cuda.CUDAGraph()
    try:
        # A failed capture leaves its own stream as the current one, hence the outer context. The mode is thread_local
        # because the prefetch thread issues copies to the device meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
        ):
            result = run()
    except RuntimeError as error:
        _clean_up_failed_capture(pool)
        # If ending the capture fails too, `error` is that failure and the original one is its context.
        for cause in (error, error.__context__):
            if cause is not None and is_out_of_memory(cause):
                raise cause from None
        reason = one_line(error, 200)
        raise UserError(
            [
                f"`model.enable_cuda_graph`: forward and backward cannot be captured: {reason}",
                "use model.enable_cuda_graph=False, or another model.attention_backend",
            ]
        ) from error
    return graph, result


def _clean_up_failed_capture(pool: tuple[int, int]) -> None:
    """Do the cleanup that torch skips if ending a capture fails.

    Otherwise the RNG would stay in capture mode, and the allocator would hold back blocks used on other streams.
    """
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # already done if ending the capture got that far
        torch._C._cuda_endAllocateToPool(device, pool)


def report_failure(error: Exception, on_failure: Callable[[str], None] | None) -> None:
    """Report that capture has failed, and release what the attempt holds.

    Args:
        error: what was raised; raised again unless it is a failure of capture.
        on_failure: called with a warning; None: raise `error`.
    """
    if on_failure is None or not (isinstance(error, UserError) or is_out_of_memory(error)):
        raise error
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:  # an exception re-raised from itself makes a cycle
        seen.add(id(cause))
        # Frames keep the failed attempt's autograd nodes alive, which would be reused on the wrong stream.
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    why = error.lines[0] if isinstance(error, UserError) else "out of memory while capturing a CUDA graph"
    on_failure(f"warning: {why}; continuing without CUDA graphs, set model.enable_cuda_graph=False to silence this")


class CapturedMicroBatches:
    """Run micro batches, replaying a CUDA graph from the fourth micro batch of each shape on.

    Args:
        run: forward and backward of a micro batch (tensors by name, loss denominator); returns the detached loss. It
            must not synchronize with the device.
        parameters: parameters of the model.
        on_failure: called with a warning when capture fails, for instance because a graph keeps the memory of a micro
            batch reserved; the run continues without graphs. None: raise instead.
        capture: `capture`, or a substitute for tests without a CUDA device.
    """

    def __init__(
        self,
        run: RunMicroBatch,
        parameters: Iterable[nn.Parameter],
        on_failure: Callable[[str], None] | None = None,
        capture: Callable[..., CapturedGraph] = capture,
    ) -> None:
        self._run = run
        self._on_failure = on_failure
        self._has_failed = False
        self._capture = capture
        self._parameters = list(parameters)
        self._graphs: dict[Any, CapturedGraph] = {}
        self._seen: dict[Any, int] = {}

    def __call__(self, fields: Fields, denominator: Tensor) -> Tensor:
        """Return the loss and accumulate the gradients into `.grad`, as `run` does."""
        shape = tuple((name, field.shape, field.dtype) for name, field in fields.items())
        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if seen > WARM_UP_MICRO_BATCHES and shape not in self._graphs and not self._has_failed:
            self._add(shape, fields, denominator)
        if shape not in self._graphs:
            return self._run(fields, denominator)
        return self._replay(self._graphs[shape], fields, denominator)

    def _add(self, shape: Any, fields: Fields, denominator: Tensor) -> None:
        """Capture a micro batch of a new shape, or give up."""
        try:
            self._graphs[shape] = self._capture(self._run, fields, denominator, self._parameters)
        except (UserError, RuntimeError) as error:
            self._has_failed = True
            self._graphs.clear()  # free their memory
            report_failure(error, self._on_failure)

    def _replay(self, graph: CapturedGraph, fields: Fields, denominator: Tensor) -> Tensor:
        for parameter, gradient in zip(self._parameters, graph.gradients, strict=True):
            if gradient is not None and parameter.grad is gradient:
                parameter.grad = gradient.clone()  # from the previous micro batch; the replay overwrites the buffer
        for name, field in graph.fields.items():
            field.copy_(fields[name])
        graph.denominator.copy_(denominator)
        graph.replay()
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for parameter, gradient in zip(self._parameters, graph.gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                sums.append(parameter.grad)
                added.append(gradient)
        if sums:
            torch._foreach_add_(sums, added)
        return graph.loss.clone()
