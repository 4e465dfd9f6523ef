"""Micro batches as CUDA graphs: recorded once, then launched by one call instead of one for each kernel.

A small model keeps the host busier than the GPU: T5 base launches 1,600 kernels a step. Only forward and backward of a
micro batch are recorded; the update, whose numbers change, follows as ever. The samples are copied to where the graph
reads them, and it writes every gradient to the same place each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.launch import HAS_TRITON
from ..models.build import recomputes_draws
from ..models.config.families import family_slice
from ..models.config.family_rules import stacks_of_keys
from ..models.config.memory_slice import offload_slice
from ..models.config.moe_slice import moe_slice
from ..models.config.t5 import T5Keys
from .config.schema import RootBlock
from .errors import UserError
from .memory import is_out_of_memory
from .sample_form import sample_form

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


def uses_cuda_graph(root: RootBlock, device: torch.device, processes: int) -> bool:
    """Whether micro batches are recorded: `model.enable_cuda_graph`, where null means wherever they can be.

    Raises:
        UserError: they shall be, but the device is not CUDA, there are several processes, or the host has to wait.
    """
    wish, reason = root.model.enable_cuda_graph, None
    if device.type != "cuda":
        reason = f"records work of a CUDA device, but this run is on {device.type}"
    elif processes > 1:
        reason = f"records no communication, but this run has {processes} processes"
    elif any(offload_slice(keys) for keys in stacks_of_keys(root.model).values()):
        reason = "keeps the memory of a recording to itself, which `cpu_offloading` (True) would give back in between"
    else:
        reason = _what_experts_need(root) or _what_recomputation_needs(root)
    if wish and reason:
        raise UserError(f"`model.enable_cuda_graph` (True) {reason}; use model.enable_cuda_graph=False")
    return wish is not False and reason is None


def _what_experts_need(root: RootBlock) -> str | None:
    """Why a micro batch with such experts cannot be recorded; None where it can, or has none."""
    for keys in stacks_of_keys(root.model).values():
        moe = moe_slice(keys, of_t5=isinstance(root.model, T5Keys))
        if moe is None:
            continue
        one_by_one = not HAS_TRITON or str(root.trainer.precision).startswith("64")
        if moe.reads_counts or (one_by_one and not moe.pad_to_capacity):
            return (
                "records no waits of the host, as experts need that run one after the other: those of "
                "`moe_grouped_gemm` (False), of fp64, and without Triton"
            )
    return None


def _what_recomputation_needs(root: RootBlock) -> str | None:
    """Why a micro batch of which parts run twice cannot be recorded; None where it can, or nothing is recomputed."""
    form = sample_form(root)
    for stack in family_slice(root.model, vocab_size=root.model.override_vocab_size or 1, form=form).stacks:
        if recomputes_draws(stack):
            keys = [f"`{name}` ({value})" for name, value in _recompute_keys(root)]
            return (
                f"records no state of random generators, which {' and '.join(keys)} need where noise or dropout is "
                "drawn again"
            )
    return None


def _recompute_keys(root: RootBlock) -> Iterator[tuple[str, Any]]:
    """The keys that switch recomputation on, of every stack."""
    for at, keys in stacks_of_keys(root.model).items():
        for name in ("activations_checkpoint_granularity", "activations_checkpoint_modules", "moe_layer_recompute"):
            if value := getattr(keys, name):
                yield f"{at}{name}", ", ".join(value) if isinstance(value, list) else value


def record(run: RunMicroBatch, fields: Fields, denominator: Tensor, parameters: list[nn.Parameter]) -> Recording:
    """Record a micro batch as a CUDA graph; no gradient changes, for nothing runs yet.

    Raises:
        UserError: something in it cannot be recorded.
    """
    own_fields, own_denominator = {name: field.clone() for name, field in fields.items()}, denominator.clone()
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # the backward then makes one in the graph's memory, instead of adding to what is there
    graph = torch.cuda.CUDAGraph()
    try:
        # the thread that copies the next batch to the device goes on meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = run(own_fields, own_denominator)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200]
        raise UserError(
            [
                f"`model.enable_cuda_graph`: forward and backward cannot be recorded: {said}",
                "use model.enable_cuda_graph=False, or another model.attention_backend",
            ]
        ) from error
    gradients = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    return Recording(own_fields, own_denominator, graph.replay, loss, gradients)


class RecordedMicroBatches:
    """Runs micro batches, from the fourth of a shape on by its recording.

    Args:
        run: forward and backward of a micro batch of named tensors, whose loss is divided by a scalar tensor; returns
            the loss, detached. It may not wait for the device.
        parameters: of the model.
        record: `record`, or what stands in for it where there is no CUDA device.
    """

    def __init__(
        self, run: RunMicroBatch, parameters: Iterable[nn.Parameter], record: Callable[..., Recording] = record
    ) -> None:
        self._run = run
        self._record = record
        self._parameters = list(parameters)
        self._recordings: dict[Any, Recording] = {}
        self._seen: dict[Any, int] = {}

    def __call__(self, fields: Fields, denominator: Tensor) -> Tensor:
        """What `run` does: the loss, and gradients added to `.grad`."""
        shape = tuple((name, field.shape, field.dtype) for name, field in fields.items())
        seen = self._seen[shape] = self._seen.get(shape, 0) + 1
        if seen <= WARM_UP:
            return self._run(fields, denominator)
        if shape not in self._recordings:
            self._recordings[shape] = self._record(self._run, fields, denominator, self._parameters)
        return self._replay(self._recordings[shape], fields, denominator)

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
