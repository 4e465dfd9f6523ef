"""Pipeline parallelism: the stages of this rank, run by the schedules of torch.distributed.pipelining.

1F1B (PipeDream-Flush, arXiv 2006.09503), or GPipe (arXiv 1811.06965) if there are fewer micro batches than stages, and
interleaved 1F1B (arXiv 2104.04473) with several stages on each rank. Every rank reads the same micro batches, so only
hidden states and their gradients are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from ...models.parallel.pipeline import RankStages
from ...models.parallel.schedule import PassKind
from ...models.parallel.stages import Stage, StageInput
from ..utils.async_host_copy import DeviceTimestamp
from .process_group import DistributedContext

RunStage = Callable[[int, StageInput], tuple[Tensor, ...]]
"""Run a stage on the micro batch of an index in the step; return its output, see `GPT.run_stage`."""

# On an error the schedule of all ranks would be logged.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShapes:
    """Shapes of what stages send.

    Attributes:
        micro_batch: samples of a micro batch.
        lengths: tokens of a sample on this rank, of each stack.
        hidden_size: width of the residual stream.
        dtype: dtype of the output of each stack.
        residual_dtypes: dtype of the residual stream of each stack.
        sequence_ranks: ranks that share the tokens of the residual stream (`sequence_parallel`); 1 without.
    """

    micro_batch: int
    lengths: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype
    residual_dtypes: tuple[torch.dtype, ...]
    sequence_ranks: int = 1

    def outputs(self, stage: Stage) -> tuple[Tensor, ...]:
        """Return the outputs of a stage, on the meta device."""
        if stage.last:
            return (_meta((), torch.promote_types(self.dtype, torch.float32)),)
        tokens = self.micro_batch * self.lengths[stage.stack]
        whole = [(self.micro_batch, length, self.hidden_size) for length in self.lengths]
        stream = whole[stage.stack] if stage.ends else (1, tokens // self.sequence_ranks, self.hidden_size)
        if self.sequence_ranks == 1:
            stream = whole[stage.stack]
        sent = _meta(stream, self.dtype if stage.ends else self.residual_dtypes[stage.stack])
        return (sent,) if stage.stack == 0 else (sent, _meta(whole[0], self.dtype))


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


class TimedPass(NamedTuple):
    """Pass of a micro batch through a stage, and when it ran."""

    stage: int
    micro_batch: int
    kind: PassKind
    start: DeviceTimestamp
    end: DeviceTimestamp


class Pipeline:
    """The stages of this rank.

    Args:
        stages: the stages.
        all_stages: those of all ranks, first to last.
        shapes: shapes of what they send.
        ranks: ranks of the pipeline.
        device: device of this rank.
        after_backward: called after each backward pass of a stage.
        reuses_gradients: backward passes write the gradients of what is received to the same memory, as CUDA graphs do.

    Attributes:
        passes: passes of the current step, if they are timed; None if not.
    """

    def __init__(
        self,
        stages: RankStages,
        all_stages: Sequence[Stage],
        shapes: StageShapes,
        ranks: DistributedContext,
        device: torch.device,
        after_backward: Callable[[], None],
        *,
        reuses_gradients: bool = False,
    ) -> None:
        self.stages = stages.stages
        self._inputs = {
            each.number: shapes.outputs(all_stages[each.number - 1]) if each.number else () for each in self.stages
        }
        self._outputs = {each.number: shapes.outputs(each) for each in self.stages}
        self._num_stages = len(all_stages)
        self._ranks = ranks
        self._device = device
        self.after_backward = after_backward
        self.passes: list[TimedPass] | None = None
        self._schedules: dict[int, Any] = {}
        self._run: RunStage | None = None
        self._micro_batches = 1
        self._sends: list[tuple[dist.Work, Tensor]] = []
        self._reuses_gradients = reuses_gradients

    def step(self, micro_batches: int, run: RunStage) -> list[Tensor]:
        """Run forward and backward of all micro batches of a step.

        Returns:
            The loss of each, on the rank with the last stage; empty on others.
        """
        if micro_batches not in self._schedules:
            self._schedules[micro_batches] = self._build_schedule(micro_batches)
        self._run, self._micro_batches = run, micro_batches
        losses: list[Tensor] = []
        target = torch.zeros(micro_batches) if self.stages[-1].last else None
        try:
            self._schedules[micro_batches].step(
                micro_batch=torch.arange(micro_batches), target=target, losses=losses, return_outputs=False
            )
        except RuntimeError as error:  # the schedule wraps errors of stages
            raise error.__cause__ or error from None
        return [loss.detach() for loss in losses]

    def forward(self, run: Callable[[StageInput], tuple[Tensor, ...]]) -> Tensor | None:
        """Run the forward pass of one micro batch, through all stages; stages work on several such calls at a time.

        Returns:
            The loss, on the rank with the last stage; None on others.
        """
        loss = None
        for stage in self.stages:
            received = tuple(torch.empty_like(each, device=self._device) for each in self._inputs[stage.number])
            for tensor in received:
                dist.recv(tensor, group=self._ranks.group, group_src=(stage.number - 1) % self._ranks.world_size)
            output = run(StageInput(stage, received))
            if stage.last:
                loss = output[0]
                continue
            self.finish_forwards()
            receiver = (stage.number + 1) % self._ranks.world_size
            for tensor in map(Tensor.contiguous, output):
                work = dist.isend(tensor, group=self._ranks.group, group_dst=receiver)
                assert work is not None
                self._sends.append((work, tensor))
        return loss

    @contextmanager
    def timed(self, stage: int, micro_batch: int, kind: PassKind) -> Iterator[None]:
        """Context of a pass, which is recorded if passes are timed."""
        if self.passes is None:
            yield
            return
        start = DeviceTimestamp(self._device, 0.0)
        yield
        self.passes.append(TimedPass(stage, micro_batch, kind, start, DeviceTimestamp(self._device, 0.0)))

    def finish_forwards(self) -> None:
        """Wait until everything that `forward` has sent is received."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _build_schedule(self, micro_batches: int) -> Any:
        """Build the schedule of a step of so many micro batches, and stages with its receive buffers."""
        stages = [
            _Stage(
                _StageModule(self, stage),
                stage.number,
                self._num_stages,
                self._device,
                input_args=self._inputs[stage.number],
                output_args=self._outputs[stage.number],
                group=self._ranks.group,
            )
            for stage in self.stages
        ]
        for stage in stages:
            stage.pipeline = self
        options: dict[str, Any] = {"loss_fn": _loss_of, "scale_grads": False}
        if len(stages) > 1:
            return ScheduleInterleaved1F1B(list(stages), micro_batches, **options)
        if micro_batches < self._num_stages:
            return ScheduleGPipe(stages[0], micro_batches, **options)
        return Schedule1F1B(stages[0], micro_batches, **options)

    def run_stage(self, stage: Stage, received: tuple[Tensor, ...], micro_batch: int) -> tuple[Tensor, ...]:
        """Run a stage of the current step; return contiguous tensors of the shapes that the next stage expects.

        Raises:
            RuntimeError: the output has other shapes, which the next stage would read as garbage.
        """
        assert self._run is not None
        for tensor in received if self._reuses_gradients else ():
            tensor.register_hook(torch.clone)  # sent while the next pass runs
        output = self._run(micro_batch, StageInput(stage, received, micro_batch, self._micro_batches))
        found, expected = (
            [(tuple(each.shape), each.dtype) for each in which] for which in (output, self._outputs[stage.number])
        )
        if not stage.last and found != expected:
            raise RuntimeError(f"pipeline stage {stage.number} has the output {found}, not {expected}")
        return tuple(map(Tensor.contiguous, output))


def _loss_of(output: Any, target: Tensor) -> Tensor:
    """Return the output of the last stage, which is the loss."""
    return output


class _StageModule(nn.Module):
    """A stage as the module that torch's pipelining calls; its parameters are those of the model, not its own."""

    def __init__(self, pipeline: Pipeline, stage: Stage) -> None:
        super().__init__()
        self._pipeline = pipeline
        self.stage = stage

    def forward(self, *received: Tensor, micro_batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the output of the stage.

        Args:
            received: output of the stage before.
            micro_batch: index of the micro batch in the step, int64 (1,) on the CPU.
        """
        output = self._pipeline.run_stage(self.stage, received, int(micro_batch))
        return output[0] if self.stage.last else output


class _Stage(PipelineStage):
    """Stage whose receive buffers exist while they are in use: torch's exist for all micro batches of a step."""

    pipeline: Pipeline

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(*args, **kwargs)
        for infos in self.args_recv_info.values():
            _free(infos)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        for infos in self.grad_recv_info.values():
            _free(infos)
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffers of a micro batch; return the operations that receive it."""
        _allocate(self.args_recv_info[fwd_chunk_id], self.device, requires_grad=self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffers of gradients; return the operations that receive them."""
        if self.has_backward and not self.is_last:
            _allocate(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a micro batch."""
        with self.pipeline.timed(self.stage_index, fwd_chunk_id, "forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a micro batch; free its buffers."""
        with self.pipeline.timed(self.stage_index, bwd_chunk_id, "backward"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        _free(self.args_recv_info[bwd_chunk_id])
        _free(self.grad_recv_info[bwd_chunk_id])
        self.pipeline.after_backward()


def _buffers(infos: Iterable[Any]) -> list[Any]:
    """Return the records of received tensors; those of inputs of the first stage have none."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


def _free(infos: Iterable[Any]) -> None:
    for info in _buffers(infos):
        if not hasattr(info, "like"):
            info.like = torch.empty_like(info.buffer, device="meta", requires_grad=False)
        info.buffer = info.buffer.new_empty(0)


def _allocate(infos: Iterable[Any], device: torch.device, *, requires_grad: bool = False) -> None:
    for info in _buffers(infos):
        info.buffer = torch.empty_like(info.like, device=device, requires_grad=requires_grad)
