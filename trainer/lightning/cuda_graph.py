"""Micro batches as CUDA graphs: recorded once, then launched by one call instead of one for each kernel.

A small model keeps the host busier than the GPU: T5 base launches 1,600 kernels a step. Only forward and backward of a
micro batch are recorded; the update, whose numbers change, follows as ever. The samples are copied to where the graph
reads them, and it writes every gradient to the same place each time.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..plan.memory_check import is_out_of_memory
from ..utils.errors import UserError

# before one is recorded: they compile and tune the kernels, which a recording cannot
WARM_UP = 3

Fields = Mapping[str, Tensor]
RunMicroBatch = Callable[[Fields, Tensor], Tensor]


class Recording(NamedTuple):
    """A micro batch that can be run again.

    Attributes:
        fields: the samples it reads.
        denominator: of its loss, likewise.
        replay: runs it, without a wait.
        loss: where its loss is then.
        gradients: where those of the parameters are then, None for one that has none.
    """

    fields: dict[str, Tensor]
    denominator: Tensor
    replay: Callable[[], None]
    loss: Tensor
    gradients: list[Tensor | None]


def record(run: RunMicroBatch, fields: Fields, denominator: Tensor, parameters: list[nn.Parameter]) -> Recording:
    """Record a micro batch as a CUDA graph; no gradient changes, for nothing runs yet.

    Raises:
        UserError: something in it cannot be recorded.
        RuntimeError: there is no memory for it, see `memory.is_out_of_memory`.
    """
    own_fields, own_denominator = {name: field.clone() for name, field in fields.items()}, denominator.clone()
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # the backward then makes one in the graph's memory, instead of adding to what is there
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        # a recording that fails leaves its own stream behind as the current one; the thread that copies the next batch
        # to the device goes on meanwhile
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
        ):
            loss = run(own_fields, own_denominator)
        gradients = [parameter.grad for parameter in parameters]
    except RuntimeError as error:
        _leave_recording(pool)
        # where the end of a recording fails too, that error is told and this one is its context
        for cause in (error, error.__context__):
            if cause is not None and is_out_of_memory(cause):
                raise cause from None
        said = " ".join(str(error).split())[:200]
        raise UserError(
            [
                f"`model.enable_cuda_graph`: forward and backward cannot be recorded: {said}",
                "use model.enable_cuda_graph=False, or another model.attention_backend",
            ]
        ) from error
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    return Recording(own_fields, own_denominator, graph.replay, loss, gradients)


def _leave_recording(pool: tuple[int, int]) -> None:
    """What torch does at the end of a recording, and leaves out where the end fails.

    Its generator would refuse to draw from then on, and its allocator keep back what another stream has used.
    """
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # the end got that far
        torch._C._cuda_endAllocateToPool(device, pool)  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]


class RecordedMicroBatches:
    """Runs micro batches, from the fourth of a shape on by its recording.

    Args:
        run: forward and backward of a micro batch of named tensors, whose loss is divided by a scalar tensor; returns
            the loss, detached. It may not wait for the device.
        parameters: of the model.
        give_up: is told in a line why there is no recording, which micro batches then go on without; None: the run
            ends. A recording keeps the memory of a micro batch for itself, beside what else a run needs.
        record: `record`, or what stands in for it where there is no CUDA device.
    """

    def __init__(
        self,
        run: RunMicroBatch,
        parameters: Iterable[nn.Parameter],
        give_up: Callable[[str], None] | None = None,
        record: Callable[..., Recording] = record,
    ) -> None:
        self._run = run
        self._give_up = give_up
        self._given_up = False
        self._record = record
        self._parameters = list(parameters)
        self._recordings: dict[Any, Recording] = {}
        self._seen: dict[Any, int] = {}

    def __call__(self, fields: Fields, denominator: Tensor) -> Tensor:
        """What `run` does: the loss, and gradients added to `.grad`."""
        shape = tuple((name, field.shape, field.dtype) for name, field in fields.items())
        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if seen > WARM_UP and shape not in self._recordings and not self._given_up:
            self._add(shape, fields, denominator)
        if shape not in self._recordings:
            return self._run(fields, denominator)
        return self._replay(self._recordings[shape], fields, denominator)

    def _add(self, shape: Any, fields: Fields, denominator: Tensor) -> None:
        """Record a micro batch of a shape, or give up."""
        try:
            self._recordings[shape] = self._record(self._run, fields, denominator, self._parameters)
        except (UserError, RuntimeError) as error:
            if self._give_up is None or not (isinstance(error, UserError) or is_out_of_memory(error)):
                raise
            cause: BaseException | None = error
            seen: set[int] = set()
            while cause is not None and id(cause) not in seen:  # raised again as its own cause, it is in a circle
                seen.add(id(cause))
                # what was computed hangs on the frames: its autograd nodes would be used again, on the wrong stream
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
            self._given_up = True
            self._recordings.clear()  # their memory may be what is missing
            why = error.lines[0] if isinstance(error, UserError) else "out of memory while a CUDA graph was recorded"
            self._give_up(f"warning: {why}; the run goes on without, model.enable_cuda_graph=False for no such try")

    def _replay(self, recording: Recording, fields: Fields, denominator: Tensor) -> Tensor:
        for parameter, gradient in zip(self._parameters, recording.gradients, strict=True):
            if gradient is not None and parameter.grad is gradient:
                parameter.grad = gradient.clone()  # of the micro batch before: the graph is about to write over it
        for name, field in recording.fields.items():
            field.copy_(fields[name])
        recording.denominator.copy_(denominator)
        recording.replay()
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for parameter, gradient in zip(self._parameters, recording.gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                sums.append(parameter.grad)
                added.append(gradient)
        if sums:
            torch._foreach_add_(sums, added)  # pyright: ignore[reportPrivateImportUsage]
        return recording.loss.clone()
